"""What `horoclonerun --metrics-port` serves: the ranks' metrics for Prometheus. Needs prometheus_client.

Names follow https://prometheus.io/docs/practices/naming/; deploy/grafana has a dashboard that uses them.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from horoclone import connection_limits
from horoclone.live import rank_metrics
from horoclone.live.overview import late_seconds, late_times, state_of, upper_bounds_s
from horoclone.live.rank_metrics import RankMetrics

PREFIX = "horoclone_"
_RANK = ["rank", "host"]

# (name, what it is, how to get it from the metrics of a rank)
_Row = tuple[str, str, Callable[[RankMetrics], float]]
GAUGES: tuple[_Row, ...] = (
    ("rank_up", "1 while the process of the rank runs.", lambda one: float(state_of(one) not in ("lost", "ended"))),
    ("rank_stalled", "1 while the rank waits for others for longer than the stall check allows.",
     lambda one: float(state_of(one) == "stalled")),
    ("generation", "Which generation of the world the rank is in.", attrgetter("generation")),
    ("start_time_seconds", "When init() began, Unix time.", attrgetter("started")),
    ("heartbeat_time_seconds",
     "When the rank last gave a sign of life, Unix time; it gives none while it has nothing to do.",
     attrgetter("heartbeat")),
    ("step_duration_seconds", "How long the last whole step took.", attrgetter("step_seconds")),
    ("step_communication_seconds", "For how long of the last whole step operations were under way.",
     attrgetter("step_communication_seconds")),
    ("step_waited_seconds", "For how long of the last whole step a thread of the program waited for operations.",
     attrgetter("step_waited_seconds")),
)  # fmt: skip
COUNTERS: tuple[_Row, ...] = (
    ("steps", "Steps that have begun.", attrgetter("step")),
    ("communication_seconds", "Time in which any operation was under way.", attrgetter("communication_seconds")),
    ("overlapped_seconds", "Of that, time in which no thread of the program waited.",
     attrgetter("overlapped_seconds")),
)  # fmt: skip


class RanksCollector(Collector):
    """Reads the ranks' metrics anew at each scrape. read_ranks: called from the threads of the server, one at a
    time."""

    def __init__(self, read_ranks: Callable[[], Sequence[RankMetrics]]) -> None:
        self._read_ranks = read_ranks
        self._one_at_a_time = threading.Lock()

    def describe(self) -> Iterator[Metric]:
        """Empty: a registry would ask collect() for the names, before there are ranks."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._one_at_a_time:
            ranks = list(self._read_ranks())
        yield from families(ranks)


def families(ranks: Sequence[RankMetrics]) -> Iterator[Metric]:
    """The metrics of these ranks, each with the labels rank and host."""
    info = InfoMetricFamily(f"{PREFIX}rank", "Which process the rank is.", labels=_RANK)
    state = GaugeMetricFamily(
        f"{PREFIX}rank_state",
        "1 for the state in which the rank is, 0 for the others.",
        labels=[*_RANK, "state"],
    )
    for metrics in ranks:
        ours = _labels(metrics)
        info.add_metric(
            ours, {"pid": str(metrics.pid), "local_rank": str(metrics.local_rank), "size": str(metrics.size)}
        )
        for name in rank_metrics.STATES:
            state.add_metric([*ours, name], float(name == state_of(metrics)))
    yield info
    yield state
    kind: Any
    for kind, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, text, value in rows:
            family = kind(PREFIX + name, text, labels=_RANK)
            for metrics in ranks:
                family.add_metric(_labels(metrics), value(metrics))
            yield family
    yield _waits(ranks)
    yield from _goodput(ranks)
    yield from _late(ranks)
    yield from _operations(ranks)


def _goodput(ranks: Sequence[RankMetrics]) -> Iterator[Metric]:
    family = _counter(
        "elastic_seconds",
        "How the time of an elastic job has gone by, since this rank began to train.",
        [*_RANK, "part"],
    )
    for metrics in ranks:
        if (goodput := metrics.goodput) is not None:
            for name, seconds in dataclasses.asdict(goodput).items():
                family.add_metric([*_labels(metrics), name.removesuffix("_seconds")], seconds)
    if family.samples:  # of an elastic job
        yield family


def _labels(metrics: RankMetrics) -> list[str]:
    return [str(metrics.rank), metrics.host]


def _counter(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _waits(ranks: Sequence[RankMetrics]) -> Metric:
    text = "Time that threads of the program waited for operations, before (peers) and after (transfer) data moved."
    waited = _counter("waited_seconds", text, [*_RANK, "reason"])
    for metrics in ranks:
        waited.add_metric([*_labels(metrics), "peers"], metrics.waited_for_peers_seconds)
        waited.add_metric([*_labels(metrics), "transfer"], metrics.waited_for_transfer_seconds)
    return waited


def _late(ranks: Sequence[RankMetrics]) -> Iterator[Metric]:
    hosts = {metrics.rank: metrics.host for metrics in ranks}
    times = _counter(
        "rank_last_to_come", "How often the rank was the last one to come to an operation.", _RANK
    )
    text = "How long others have waited for the rank, as one of them saw it."
    seconds = _counter("rank_awaited_seconds", text, _RANK)
    for rank, count in late_times(ranks).items():
        times.add_metric([str(rank), hosts.get(rank, "")], count)
    for rank, value in late_seconds(ranks).items():
        seconds.add_metric([str(rank), hosts.get(rank, "")], value)
    yield times
    yield seconds


def _operations(ranks: Sequence[RankMetrics]) -> Iterator[Metric]:
    labels = [*_RANK, "operation"]
    count = _counter("operations", "Operations that have ended.", labels)
    moved = _counter("operation_bytes", "Bytes of the rank's tensors in operations.", labels)
    queued = _counter("operation_queued_seconds", "From the submission until data moves, summed.", labels)
    running = _counter("operation_running_seconds", "From then until the end, summed.", labels)
    text = "From the submission to the end of an operation."
    duration = HistogramMetricFamily(f"{PREFIX}operation_duration_seconds", text, labels=labels)
    bounds = ["+Inf" if bound is None else repr(bound) for bound in upper_bounds_s()]
    for metrics in ranks:
        for kind, one in metrics.operations.items():
            ours = [*_labels(metrics), kind]
            count.add_metric(ours, one.count)
            moved.add_metric(ours, one.bytes)
            queued.add_metric(ours, one.queued_seconds)
            running.add_metric(ours, one.running_seconds)
            so_far, buckets = 0, []
            for bound, inside in zip(bounds, one.histogram, strict=True):
                so_far += inside
                buckets.append((bound, float(so_far)))
            duration.add_metric(ours, buckets, one.queued_seconds + one.running_seconds)
    yield from (count, moved, queued, running, duration)


class _Server(connection_limits.BoundedThreads, WSGIServer):
    """Anybody may scrape it, so it takes a bounded number of connections, and none for long."""

    @classmethod
    def at(cls, address: str, port: int, tell: Callable[[str], None]) -> _Server:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        of_family = type(cls.__name__, (cls,), {"address_family": family, "tell": staticmethod(tell)})
        return of_family(place[:2], _Handler)  # type: ignore[no-any-return]

    def server_bind(self) -> None:
        super().server_bind()
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = 10.0  # seconds, of one read

    def log_message(self, *args: Any) -> None:
        """A scrape is no news."""


class MetricsServer:
    """Answers scrapes from threads of its own. OSError where the address cannot be had. port: 0 takes any free one.
    tell: takes a line about a crowd at the port, once.
    """

    def __init__(self, address: str, port: int, tell: Callable[[str], None]) -> None:
        self._read_ranks: Callable[[], Sequence[RankMetrics]] = lambda: []
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(RanksCollector(lambda: self._read_ranks()))
        self._server = _Server.at(address, port, tell)
        self._server.set_app(prometheus_client.make_wsgi_app(registry))
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="hc-metrics", daemon=True).start()

    def show(self, read_ranks: Callable[[], Sequence[RankMetrics]]) -> None:
        """From now on these; before there were none."""
        self._read_ranks = read_ranks

    def close(self) -> None:
        """Takes no new scrape. Does not wait: its loop looks only twice a second whether it is to end."""
        threading.Thread(target=self._server.shutdown, name="hc-metrics-end", daemon=True).start()
