"""What `horoclonerun --metrics-port` serves: the ranks' metrics for Prometheus. Needs prometheus_client.

Names follow https://prometheus.io/docs/practices/naming/; deploy/grafana has a dashboard that uses them.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
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
from horoclone.live import measurements
from horoclone.live.measurements import Measurement
from horoclone.live.overview import upper_bounds_s
from horoclone.live.rank_metrics import RankMetrics

PREFIX = "horoclone_"
_RANK = ["rank", "host"]


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
    for one in ranks:
        about = {"pid": str(one.pid), "local_rank": str(one.local_rank), "size": str(one.size)}
        info.add_metric([str(one.rank), one.host], about)
    yield info
    for measurement in measurements.of(ranks):
        if measurement.name != "elastic" or measurement.points:  # which others have not
            yield _family(measurement)


def name_of(measurement: Measurement) -> str:
    """Prometheus's name, without its ending `_total`: dots become underscores, and seconds are told."""
    return PREFIX + measurement.name.replace(".", "_") + ("_seconds" if measurement.unit == "s" else "")


def _family(measurement: Measurement) -> Metric:
    name, labels = name_of(measurement), [*_RANK, *measurement.labels]
    if measurement.kind == "histogram":
        return _histogram(measurement, HistogramMetricFamily(name, measurement.text, labels=labels))
    kind: Any = GaugeMetricFamily if measurement.kind == "gauge" else CounterMetricFamily
    family: Any = kind(name, measurement.text, labels=labels)
    for point in measurement.points:
        family.add_metric([str(point.rank), point.host, *point.labels], point.value)
    return family  # type: ignore[no-any-return]


def _histogram(measurement: Measurement, family: HistogramMetricFamily) -> Metric:
    bounds = ["+Inf" if bound is None else repr(bound) for bound in upper_bounds_s()]
    for rank, host, labels, one in measurement.times:
        buckets = list(zip(bounds, map(float, itertools.accumulate(one.histogram)), strict=True))
        family.add_metric([str(rank), host, *labels], buckets, one.queued_seconds + one.running_seconds)
    return family


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
