"""What the views show of a job: figures of each rank and of all, out of metrics that were read one after the other.

Rates are over the last seconds, not since the start. Pure but for the job that is asked.
"""

from __future__ import annotations

import dataclasses
import signal
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from horoclone.live import late_ranks
from horoclone.live.job import Event
from horoclone.live.rank_metrics import BUCKETS, Goodput, Operation, RankMetrics

WINDOW_S = 5.0  # for which a rate is given
LATE_SHARE = (
    0.1  # of that time: a rank for which others wait longer, and twice as long as for the rest, stands out
)
MAX_EVENTS = 200
# In the order of how much they matter to who looks. A rank that has failed is "lost", whatever its metrics say.
STATES = ("lost", "stalled", "starting", "waiting", "running", "ended")


class Source(Protocol):
    """As far as a view is concerned: live.job.Job, or the launcher's own."""

    def ranks(self) -> list[RankMetrics]: ...
    def events(self) -> list[Event]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One rank. note: why it is in this state, or "". None: not known (yet), or it has no sense in this state.

    communication: share of time in which operations were under way, 0 to 1, and overlap: of that, the share for which
    no thread waited; of the last whole step, or where there are no steps of the last seconds. late_s: how long others
    have waited for it since init(), as the one saw it who waited longest; late_share: of the last seconds, of a rank
    that stands out by it, else 0. why, advice: of a rank that is late, where the ranks measure that. is_culprit: it
    holds others up; the note says what it does.
    """

    rank: int
    host: str
    pid: int
    state: str
    note: str
    generation: int
    step: int
    steps_per_s: float | None
    step_s: float | None
    communication: float | None
    overlap: float | None
    bytes: int
    bytes_per_s: float | None
    late_s: float
    operation: str
    why: str = ""
    advice: str = ""
    is_culprit: bool = False
    late_share: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Overview:
    """A job at the moment `now` (Unix seconds). step_s: of the median rank, slowest_step_s: of the slowest, both of the
    last whole step. communication: mean of the ranks. slowest: who holds the others up now, or else was waited for
    longest; None: nobody. new_events: of `events`, those that were not there at the look before. goodput: of an elastic
    job, as who is in it for longest has seen it; else None."""

    now: float
    rows: tuple[Row, ...]
    operations: Mapping[str, Operation]
    step: int
    step_s: float | None
    slowest_step_s: float | None
    communication: float | None
    bytes_per_s: float | None
    slowest: int | None
    events: tuple[Event, ...]
    new_events: tuple[Event, ...]
    goodput: Goodput | None = None


class Observer:
    """Looks at a job again and again. Not for two threads at once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        # (rank, pid) -> metrics, of the last seconds
        self._before: deque[dict[tuple[int, int], RankMetrics]] = deque()
        self._events: tuple[Event, ...] = ()

    def look(self) -> Overview:
        return self.digest(self._source.ranks(), self._source.events())

    def digest(self, ranks: Sequence[RankMetrics], events: Sequence[Event]) -> Overview:
        """What these metrics and events say, as the next look after those before."""
        current = {(metrics.rank, metrics.pid): metrics for metrics in ranks}
        now = max((metrics.now for metrics in ranks), default=0.0)
        while len(self._before) > 1 and _time_of(self._before[1]) <= now - WINDOW_S:
            self._before.popleft()
        late = late_seconds(ranks)
        why = {one.rank: one for one in late_ranks.of_ranks(ranks)}
        culprits = late_ranks.culprits(ranks)
        for rank in culprits:  # what the ranks have summed up ends with the last operation
            late[rank] = late.get(rank, 0.0) + late_ranks.waited_seconds(ranks)
        earlier = {key: self._earlier(key, metrics) for key, metrics in current.items()}
        shares = _late_shares([(one, earlier[key]) for key, one in current.items()])
        rows = tuple(
            _with_cause(
                _row(metrics, earlier[key], late.get(metrics.rank, 0.0), shares),
                why.get(metrics.rank),
                culprits.get(metrics.rank),
                len(ranks) - 1,
            )
            for key, metrics in current.items()
        )
        self._before.append(current)
        seen, self._events = set(self._events), tuple(events[-MAX_EVENTS:])
        active = [metrics for metrics in ranks if state_of(metrics) in ("running", "waiting", "stalled")]
        steps = [row.step_s for row in rows if row.step_s is not None]
        # Of several culprits the one that has made the others wait for longest before.
        slowest = max(culprits or late, key=lambda rank: late.get(rank, 0.0), default=None)
        return Overview(
            now=now,
            rows=rows,
            operations=total(metrics.operations for metrics in ranks),
            step=max((metrics.step for metrics in active or ranks), default=0),
            step_s=statistics.median(steps) if steps else None,
            slowest_step_s=max(steps, default=None),
            communication=_mean(row.communication for row in rows),
            bytes_per_s=_sum(row.bytes_per_s for row in rows),
            slowest=slowest,
            events=self._events,
            new_events=tuple(one for one in self._events if one not in seen),
            goodput=longest_goodput(ranks),
        )

    def _earlier(self, key: tuple[int, int], metrics: RankMetrics) -> RankMetrics | None:
        """The oldest metrics of this process in the window since its last init()."""
        for ranks in self._before:
            found = ranks.get(key)
            if found is not None and found.started == metrics.started and found.now < metrics.now:
                return found
        return None


def _with_cause(row: Row, why: late_ranks.Reason | None, culprit: str | None, others: int) -> Row:
    if culprit is not None:
        who = "the other rank" if others == 1 else "the others"
        return dataclasses.replace(row, is_culprit=True, note=f"holds up {who}: {culprit}")
    if why is None:
        return row
    return dataclasses.replace(row, why=str(why), advice=why.advice)


def longest_goodput(ranks: Iterable[RankMetrics]) -> Goodput | None:
    """That of the rank which has trained for longest: newcomers do not know what was before them."""
    found = [one.goodput for one in ranks if one.goodput is not None]
    return max(found, key=lambda one: one.whole_seconds, default=None)


def state_of(metrics: RankMetrics) -> str:
    """The rank's state; a process that ended with another exit code than 0 has failed, whatever it wrote before."""
    return "lost" if metrics.exit_code not in (None, 0) else metrics.state


def end_of(exit_code: int | None) -> str:
    """How a process ended, in a few letters. exit_code: as subprocess has it; None: nobody saw it."""
    if exit_code is None:
        return "gone"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def late_seconds(ranks: Iterable[RankMetrics]) -> dict[int, float]:
    """rank -> how long others have waited for it, as that rank says which has the most."""
    found: dict[int, float] = {}
    for metrics in ranks:
        for one in metrics.late:
            found[one.rank] = max(found.get(one.rank, 0.0), one.seconds)
    return found


def late_times(ranks: Iterable[RankMetrics]) -> dict[int, int]:
    """rank -> how often it was the last one to come, as that rank says which has the most."""
    found: dict[int, int] = {}
    for metrics in ranks:
        for one in metrics.late:
            found[one.rank] = max(found.get(one.rank, 0), one.times)
    return found


def total(of_ranks: Iterable[Mapping[str, Operation]]) -> dict[str, Operation]:
    """The sum over ranks, by kind of operation."""
    by_kind: dict[str, list[Operation]] = {}
    for operations in of_ranks:
        for kind, one in operations.items():
            by_kind.setdefault(kind, []).append(one)
    return {
        kind: Operation(
            sum(one.count for one in each),
            sum(one.bytes for one in each),
            sum(one.queued_seconds for one in each),
            sum(one.running_seconds for one in each),
            tuple(map(sum, zip(*(one.histogram for one in each), strict=True))),
        )
        for kind, each in by_kind.items()
    }


def upper_bounds_s() -> tuple[float | None, ...]:
    """Of the buckets of a histogram, in seconds; None: the last one has none."""
    return (*(2**at / 1e6 for at in range(BUCKETS - 1)), None)


def _late_shares(ranks: Sequence[tuple[RankMetrics, RankMetrics | None]]) -> dict[int, float]:
    """rank -> for which share of the last seconds others have waited for it, as that rank says which has the most; only
    those that stand out. ranks: each with its metrics of some seconds ago: of one that has none, nobody knows what of
    its waiting is of these seconds."""
    shares: dict[int, float] = {}
    for metrics, earlier in ranks:
        if earlier is not None:
            before = {one.rank: one.seconds for one in earlier.late}
            for one in metrics.late:
                share = (one.seconds - before.get(one.rank, 0.0)) / (metrics.now - earlier.now)
                shares[one.rank] = min(1.0, max(share, shares.get(one.rank, 0.0)))
    found = {}
    for rank, share in shares.items():
        others = [shares[other] for other in shares if other != rank]
        others += [0.0] * (len(ranks) - 1 - len(others))
        if share >= max(LATE_SHARE, 2 * statistics.median(others or [0.0])):
            found[rank] = share
    return found


def _row(
    metrics: RankMetrics, before: RankMetrics | None, late_s: float, late_shares: Mapping[int, float]
) -> Row:
    state = state_of(metrics)
    if state == "lost" and metrics.is_consequence:
        state = "ended"
    # what it does now may be told
    moves = state in ("running", "waiting") and not late_ranks.is_stale(metrics)
    elapsed_s = metrics.now - before.now if before is not None else 0.0
    communication = overlap = None
    if metrics.step_seconds:
        communication, overlap = metrics.communication_share, metrics.overlap
    elif before is not None and elapsed_s > 0:
        busy_s = metrics.communication_seconds - before.communication_seconds
        communication = min(1.0, max(0.0, busy_s / elapsed_s))
        overlap = (metrics.overlapped_seconds - before.overlapped_seconds) / busy_s if busy_s > 0 else None
    rate = (metrics.bytes - before.bytes) / elapsed_s if before is not None and elapsed_s > 0 else None
    return Row(
        rank=metrics.rank,
        host=metrics.host,
        pid=metrics.pid,
        state=state,
        note=_note(metrics, state),
        generation=metrics.generation,
        step=metrics.step,
        steps_per_s=1 / metrics.step_seconds_smoothed if moves and metrics.step_seconds_smoothed else None,
        step_s=metrics.step_seconds or None if moves else None,
        communication=communication if moves else None,
        overlap=None if overlap is None or not moves else min(1.0, max(0.0, overlap)),
        bytes=metrics.bytes,
        bytes_per_s=rate if moves else None,
        late_s=late_s,
        late_share=late_shares.get(metrics.rank, 0.0) if moves else 0.0,
        operation=_last(metrics),
    )


def _note(metrics: RankMetrics, state: str) -> str:
    if state == "lost" or metrics.exit_code:
        return end_of(metrics.exit_code)
    if state != "stalled":
        return ""
    who = (
        f", for rank{'' if len(metrics.stalled_for) == 1 else 's'} {','.join(map(str, metrics.stalled_for))}"
    )
    return metrics.stalled_on + (who if metrics.stalled_for else "")


def _last(metrics: RankMetrics) -> str:
    last = metrics.last_operation
    if last is None:
        return ""
    return f"{last.kind} '{last.name}'" if last.name else last.kind


def _time_of(ranks: Mapping[tuple[int, int], RankMetrics]) -> float:
    return max((metrics.now for metrics in ranks.values()), default=0.0)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
