"""The metrics of ranks, named as OpenTelemetry does it; exposition.py (Prometheus) and otlp.py pass them on. Pure.

https://opentelemetry.io/docs/specs/semconv/general/naming/ has the rules for names and units.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from horoclone.live.overview import late_seconds, late_times, state_of
from horoclone.live.rank_metrics import STATES, Operation, RankMetrics


class Point(NamedTuple):
    """One value. rank, host: whom it is about. labels: the values of the measurement's labels."""

    rank: int
    host: str
    labels: tuple[str, ...]
    value: float


class Times(NamedTuple):
    """One histogram, of the operations of a rank; it has the bounds of overview.upper_bounds_s()."""

    rank: int
    host: str
    labels: tuple[str, ...]
    operation: Operation


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """name: with dots, without the prefix `horoclone.`. unit: as UCUM has it, "s", "By", "1", "{step}"; times are in
    seconds. is_of_others: its points are about the ranks that the measuring one has waited for.
    """

    name: str
    text: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    labels: tuple[str, ...] = ()
    points: Sequence[Point] = ()
    times: Sequence[Times] = ()
    is_of_others: bool = False


# (name, unit, what it is, how to get it from the metrics of a rank)
_Row = tuple[str, str, str, Callable[[RankMetrics], float]]
_GAUGES: tuple[_Row, ...] = (
    ("rank.up", "1", "1 while the process of the rank runs.",
     lambda one: float(state_of(one) not in ("lost", "ended"))),
    ("rank.stalled", "1", "1 while the rank waits for others for longer than the stall check allows.",
     lambda one: float(state_of(one) == "stalled")),
    ("generation", "1", "Which generation of the world the rank is in.", attrgetter("generation")),
    ("start_time", "s", "When init() began, Unix time.", attrgetter("started")),
    ("heartbeat_time", "s",
     "When the rank last gave a sign of life, Unix time; it gives none while it has nothing to do.",
     attrgetter("heartbeat")),
    ("step.duration", "s", "How long the last whole step took.", attrgetter("step_seconds")),
    ("step.communication", "s", "For how long of the last whole step operations were under way.",
     attrgetter("step_communication_seconds")),
    ("step.waited", "s", "For how long of the last whole step a thread of the program waited for operations.",
     attrgetter("step_waited_seconds")),
)  # fmt: skip
_COUNTERS: tuple[_Row, ...] = (
    ("steps", "{step}", "Steps that have begun.", attrgetter("step")),
    ("communication", "s", "Time in which any operation was under way.", attrgetter("communication_seconds")),
    ("overlapped", "s", "Of that, time in which no thread of the program waited.",
     attrgetter("overlapped_seconds")),
)  # fmt: skip


def of(ranks: Sequence[RankMetrics]) -> Iterator[Measurement]:
    """Everything that is known of these ranks. Of no ranks: the same measurements without points."""
    yield _states(ranks)
    kind: Literal["gauge", "counter"]
    for kind, rows in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, unit, text, value in rows:
            yield Measurement(name, text, kind, unit, (), [_point(one, (), value(one)) for one in ranks])
    yield _waits(ranks)
    yield _goodput(ranks)
    yield from _late(ranks)
    yield from _operations(ranks)


def _point(metrics: RankMetrics, labels: tuple[str, ...], value: float) -> Point:
    return Point(metrics.rank, metrics.host, labels, float(value))


def _states(ranks: Sequence[RankMetrics]) -> Measurement:
    points = [_point(one, (name,), name == state_of(one)) for one in ranks for name in STATES]
    text = "1 for the state in which the rank is, 0 for the others."
    return Measurement("rank.state", text, "gauge", "1", ("state",), points)


def _waits(ranks: Sequence[RankMetrics]) -> Measurement:
    text = "Time that threads of the program waited for operations, before (peers) and after (transfer) data moved."
    points = []
    for one in ranks:
        points.append(_point(one, ("peers",), one.waited_for_peers_seconds))
        points.append(_point(one, ("transfer",), one.waited_for_transfer_seconds))
    return Measurement("waited", text, "counter", "s", ("reason",), points)


def _goodput(ranks: Sequence[RankMetrics]) -> Measurement:
    """Without points where the job is not elastic."""
    points = [
        _point(one, (name.removesuffix("_seconds"),), seconds)
        for one in ranks
        if one.goodput is not None
        for name, seconds in dataclasses.asdict(one.goodput).items()
    ]
    text = "How the time of an elastic job has gone by, since this rank began to train."
    return Measurement("elastic", text, "counter", "s", ("part",), points)


def _late(ranks: Sequence[RankMetrics]) -> Iterator[Measurement]:
    hosts = {one.rank: one.host for one in ranks}
    for name, unit, text, values in (
        ("rank.last_to_come", "{operation}", "How often the rank was the last one to come to an operation.",
         late_times(ranks)),
        ("rank.awaited", "s", "How long others have waited for the rank, as one of them saw it.", late_seconds(ranks)),
    ):  # fmt: skip
        points = [Point(rank, hosts.get(rank, ""), (), float(value)) for rank, value in values.items()]
        yield Measurement(name, text, "counter", unit, (), points, is_of_others=True)


def _operations(ranks: Sequence[RankMetrics]) -> Iterator[Measurement]:
    done = [(one, kind, operation) for one in ranks for kind, operation in one.operations.items()]
    rows: tuple[tuple[str, str, str, Callable[[Operation], float]], ...] = (
        ("operations", "{operation}", "Operations that have ended.", attrgetter("count")),
        ("operation.bytes", "By", "Bytes of the rank's tensors in operations.", attrgetter("bytes")),
        (
            "operation.queued",
            "s",
            "From the submission until data moves, summed.",
            attrgetter("queued_seconds"),
        ),
        ("operation.running", "s", "From then until the end, summed.", attrgetter("running_seconds")),
    )
    for name, unit, text, value in rows:
        points = [_point(one, (kind,), value(operation)) for one, kind, operation in done]
        yield Measurement(name, text, "counter", unit, ("operation",), points)
    times = [Times(one.rank, one.host, (kind,), operation) for one, kind, operation in done]
    text = "From the submission to the end of an operation."
    yield Measurement("operation.duration", text, "histogram", "s", ("operation",), (), times)
