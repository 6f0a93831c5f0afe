"""Sends the metrics and spans of one rank to a collector, through OpenTelemetry's SDK. Needs the extra `otlp`.

The numbers are those of measurements.py, the spans are made of what the timeline records. The SDK reads its variables
(OTEL_*) itself: endpoints, headers, intervals, sampling, names. Thread: one for each life of the runtime, beside those
of the SDK; training never waits for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from horoclone.live import measurements
from horoclone.live.measurements import Measurement
from horoclone.live.overview import upper_bounds_s
from horoclone.live.rank_metrics import RankMetrics

SCOPE = "horoclone"
_PREFIX = "horoclone."
_KEEP_S = 0.1  # one reading serves all instruments of a collection
_SPANS_AT_ONCE = (
    512  # then they are sent before more are made: a queue of the SDK's that is full forgets spans
)
_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}


class Source(NamedTuple):
    """One life of a rank. read_metrics, heard: called from threads of this module; heard waits, and returns "" at the
    end. key: the same on all ranks, different in each generation. say: takes a line for people."""

    rank: int
    size: int
    local_rank: int
    generation: int
    host: str
    key: str
    read_metrics: Callable[[], RankMetrics]
    heard: Callable[[], str] | None
    sends_metrics: bool
    say: Callable[[str], None]


class Export:
    """From now on what the rank does is sent. end(): it has ended; what is left is sent in the background."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ended = threading.Event()
        self.outcome = _Outcome(source)
        self._thread = threading.Thread(target=self._run, name="hc-otlp", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def is_over(self) -> bool:
        """Whether nothing is left to send."""
        return not self._thread.is_alive()

    def wait(self, limit_s: float) -> None:
        """For what is left; not for an endpoint that has not answered before."""
        if not self.outcome.has_failed:
            self._thread.join(limit_s)

    def _run(self) -> None:
        providers: list[Any] = []
        try:
            resource = _resource(self._source)
            if self._source.sends_metrics:
                providers.append(self._meters(resource))
            if self._source.heard is not None:
                self._trace(resource, providers)
        except Exception as error:  # a variable that is wrong, an exporter that is missing
            self.outcome.failed(f"{type(error).__name__}: {error}")
        while self._source.heard is not None and self._source.heard():
            pass  # what came to nothing must not fill the memory
        self._ended.wait()
        for provider in providers:
            provider.shutdown()

    def _meters(self, resource: Resource) -> MeterProvider:
        reading = _Reading(self._source.read_metrics)
        exporter = _MetricExporter(
            _exporter("METRICS", "metric_exporter", "OTLPMetricExporter"), self.outcome, reading
        )
        provider = MeterProvider(
            [PeriodicExportingMetricReader(exporter)], resource=resource, shutdown_on_exit=False
        )
        meter = provider.get_meter(SCOPE)
        for one in measurements.of([]):
            make: Any = {
                "gauge": meter.create_observable_gauge,
                "counter": meter.create_observable_counter,
            }.get(one.kind)
            if make is not None:  # an observed histogram is unknown to the SDK: the exporter adds it
                make(_PREFIX + one.name, [reading.observer(one.name)], unit=one.unit, description=one.text)
        return provider

    def _trace(self, resource: Resource, providers: list[Any]) -> None:
        exporter = _SpanExporter(_exporter("TRACES", "trace_exporter", "OTLPSpanExporter"), self.outcome)
        ids = _StepIds(self._source.key)
        provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        providers.append(provider)
        spans = Spans(provider.get_tracer(SCOPE), ids)
        assert self._source.heard is not None
        made = 0
        while text := self._source.heard():
            for line in text.splitlines():
                made += spans.take(json.loads(line))
                if made >= _SPANS_AT_ONCE:
                    provider.force_flush()
                    made = 0
            if spans.dropped:
                self.outcome.say_once(
                    "OpenTelemetry: spans come faster than they can be sent, and some are missing; "
                    "OTEL_TRACES_SAMPLER=traceidratio with OTEL_TRACES_SAMPLER_ARG=0.01 sends every hundredth step"
                )
        spans.end()


# ---- spans


class _StepIds(RandomIdGenerator):
    """All ranks give the trace of a step the same number: it is one trace, and a sampler chooses the same steps."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._step: int | None = None

    def of_step(self, step: int | None) -> None:
        """The next trace is that of this step; None: of none."""
        self._step = step

    def generate_trace_id(self) -> int:
        if self._step is None:
            return super().generate_trace_id()
        digest = hashlib.sha256(f"{self._key}:{self._step}".encode()).digest()
        return int.from_bytes(digest[:16], "big")


@dataclasses.dataclass(slots=True)
class _Running:
    submitted_ns: int
    started_ns: int = 0
    algorithm: str = ""


class Spans:
    """Makes spans of the timeline's events (csrc/engine/record/trace.h): a step is a trace, the operations that were
    submitted in it are its children, and a recovery is a trace of its own. Thread: one.
    """

    def __init__(self, tracer: trace.Tracer, ids: _StepIds) -> None:
        self._tracer, self._ids = tracer, ids
        self._to_unix_ns = time.time_ns() - time.monotonic_ns()
        # (begin, span) of the running one and the one before it
        self._steps: list[tuple[int, trace.Span]] = []
        self._running: dict[tuple[Any, ...], _Running] = {}
        self._recovery: Context = Context()
        self._last_ns = 0
        self.dropped = 0

    def take(self, event: list[Any]) -> int:
        """One event, as event_line() of the core writes it. Returns how many spans have ended."""
        if event[0] == "dropped":
            self.dropped += event[1]
            self._running.clear()  # ends are missing
            return 0
        kind, operation, process_set, name, sequence, phase, args, at_ns, micros = event
        self._last_ns = at_ns
        if kind == "step":
            return self._begin_step(sequence, at_ns)
        if kind == "span":
            return self._tell_recovery(name, args, at_ns, round(micros * 1000))
        key = (operation, process_set, name, sequence if not name else 0)
        if kind == "announced":
            self._running.setdefault(key, _Running(at_ns))
            return 0
        if kind == "done":
            return self._end_operation(key, args, at_ns)
        one = self._running.setdefault(key, _Running(at_ns))
        if phase == "queue":
            return 0
        one.algorithm = phase
        one.started_ns = one.started_ns or at_ns
        return 0

    def end(self) -> None:
        """No more events come: the running step ends with the last one."""
        if self._steps:
            self._steps[-1][1].end(self._unix(self._last_ns))
            self._steps.clear()

    def _unix(self, ns: int) -> int:
        return ns + self._to_unix_ns

    def _span(self, name: str, parent: Context, at_ns: int, attributes: Mapping[str, Any]) -> trace.Span:
        told = {_PREFIX + key: value for key, value in attributes.items()}
        return self._tracer.start_span(name, parent, start_time=self._unix(at_ns), attributes=told)

    def _begin_step(self, number: int, at_ns: int) -> int:
        ended = 0
        if self._steps:
            self._steps[-1][1].end(self._unix(at_ns))
            ended = 1
        self._ids.of_step(number)
        span = self._span("step", Context(), at_ns, {"step": number})
        self._ids.of_step(None)
        self._steps = [*self._steps[-1:], (at_ns, span)]
        return ended

    def _parent_at(self, at_ns: int) -> Context:
        for begin_ns, span in reversed(self._steps):
            if begin_ns <= at_ns:
                return trace.set_span_in_context(span, Context())
        return Context()

    def _end_operation(self, key: tuple[Any, ...], args: Mapping[str, Any], at_ns: int) -> int:
        one = self._running.pop(key, None)
        if one is None:
            return 0
        operation, process_set, name, _ = key
        attributes: dict[str, Any] = {"operation": operation, "process_set": process_set}
        for label, value in (
            ("tensor", _clean(name)),
            ("algorithm", one.algorithm),
            ("dtype", args.get("dtype")),
            ("shape", args.get("shape")),
            ("tensors", args.get("tensors")),
        ):
            if value:
                attributes[label] = value
        span = self._span(operation, self._parent_at(one.submitted_ns), one.submitted_ns, attributes)
        if one.started_ns:
            span.add_event("started", timestamp=self._unix(max(one.started_ns, one.submitted_ns)))
        if error := args.get("error"):
            span.set_status(trace.StatusCode.ERROR, _clean(error))
        span.end(self._unix(max(at_ns, one.submitted_ns)))
        return 1

    def _tell_recovery(self, name: str, args: Mapping[str, Any], at_ns: int, took_ns: int) -> int:
        """The whole comes first, then its parts."""
        is_whole = name == "RECOVERY"
        told = {
            f"recovery.{key}": value
            for key, value in args.items()
            if isinstance(value, (str, int, float, bool))
        }
        parent = Context() if is_whole else self._recovery
        span = self._span("recovery" if is_whole else f"recovery.{_clean(name).lower()}", parent, at_ns, told)
        if is_whole:
            self._recovery = trace.set_span_in_context(span, Context())
        span.end(self._unix(at_ns + took_ns))
        return 1


def _clean(text: str) -> str:
    """A name need not be UTF-8, what is sent must be."""
    return text.encode("utf-8", "backslashreplace").decode()


# ---- metrics


class _Reading:
    def __init__(self, read_metrics: Callable[[], RankMetrics]) -> None:
        self._read_metrics = read_metrics
        self._lock = threading.Lock()
        self._read_s = -1.0
        self._found: dict[str, Measurement] = {}
        self._started_ns = 0

    def all(self) -> Mapping[str, Measurement]:
        with self._lock:
            now = time.monotonic()
            if self._read_s < 0 or now - self._read_s > _KEEP_S:
                metrics = self._read_metrics()
                self._started_ns = int(metrics.started * 1e9)
                self._found = {one.name: one for one in measurements.of([metrics])}
                self._read_s = now
            return self._found

    def observer(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            one = self.all()[name]
            return [Observation(point.value, _attributes(one, point)) for point in one.points]

        return observe

    def histograms(self) -> list[Metric]:
        found, now_ns = self.all(), time.time_ns()
        return [
            Metric(_PREFIX + one.name, one.text, one.unit, self._histogram(one, now_ns))
            for one in found.values()
            if one.kind == "histogram" and one.times
        ]

    def _histogram(self, one: Measurement, now_ns: int) -> Histogram:
        bounds = [bound for bound in upper_bounds_s() if bound is not None]
        points = [
            HistogramDataPoint(
                attributes=_attributes(one, times),
                start_time_unix_nano=self._started_ns,
                time_unix_nano=now_ns,
                count=times.operation.count,
                sum=times.operation.queued_seconds + times.operation.running_seconds,
                bucket_counts=list(times.operation.histogram),
                explicit_bounds=bounds,
                min=None,  # type: ignore[arg-type]  # unknown, which the format allows
                max=None,  # type: ignore[arg-type]
            )
            for times in one.times
        ]
        return Histogram(points, AggregationTemporality.CUMULATIVE)


def _attributes(one: Measurement, point: measurements.Point | measurements.Times) -> dict[str, Any]:
    told: dict[str, Any] = {
        _PREFIX + label: value for label, value in zip(one.labels, point.labels, strict=True)
    }
    if one.is_of_others:
        told[f"{_PREFIX}awaited_rank"] = point.rank
    return told


# ---- sending


def _resource(source: Source) -> Resource:
    """Who sends. What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes before."""
    ours = Resource.create(
        {
            "service.name": SCOPE,
            "service.instance.id": f"{source.key}/{source.rank}",
            "host.name": source.host,
            "process.pid": os.getpid(),
            f"{_PREFIX}rank": source.rank,
            f"{_PREFIX}local_rank": source.local_rank,
            f"{_PREFIX}size": source.size,
            f"{_PREFIX}generation": source.generation,
        }
    )
    return ours.merge(OTELResourceDetector().detect())


def _exporter(signal: str, module: str, name: str) -> Any:
    """The SDK's, of the protocol that is asked for. ValueError, ImportError."""
    asked = (
        os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    if asked not in _PROTOCOLS:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={asked}: the protocols are {', '.join(_PROTOCOLS)}")
    try:
        found = import_module(f"opentelemetry.exporter.otlp.proto.{_PROTOCOLS[asked]}.{module}")
    except ImportError:
        raise ImportError(
            f"the protocol {asked} needs: pip install opentelemetry-exporter-otlp-proto-{_PROTOCOLS[asked]}"
        ) from None
    return getattr(found, name)()


class _Outcome:
    """What has become of sending: the first failure is told, by one rank of each host; the SDK's own lines about our
    exports are not shown, they would come again and again."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pid = os.getpid()
        self.has_failed = False

    def of(self, export: Callable[[], Any], logger: logging.Logger) -> bool:
        """Whether it was sent. In a forked child, whose SDK has started its threads again, nothing is."""
        if os.getpid() != self._pid:
            return True
        heard = _Heard()
        logger.addFilter(heard)
        try:
            result = export()
        except Exception as error:
            self.failed(f"{type(error).__name__}: {error}")
            return False
        finally:
            logger.removeFilter(heard)
        sent: bool = result.name == "SUCCESS"
        if sent:
            self.has_failed = False
        else:
            self.failed(heard.text or "no reason was given")
        return sent

    def failed(self, why: str) -> None:
        self.has_failed = True
        self.say_once(
            f"OpenTelemetry: nothing is sent to {_endpoint()}: {why}. Training goes on; is OTEL_EXPORTER_OTLP_ENDPOINT "
            "right, and does a collector listen there? This is said once"
        )

    def say_once(self, text: str) -> None:
        start = text[:40]
        if self._source.local_rank == 0 and start not in _said:
            _said.add(start)
            self._source.say(text)


_said: set[str] = set()  # in this process, over all generations


def _endpoint() -> str:
    """Without what may be secret in it: a password, a key in the query."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT" for signal in ("", "METRICS_", "TRACES_"))
    url = next((os.environ[name] for name in names if os.environ.get(name)), "the collector")
    scheme, slashes, rest = url.partition("?")[0].partition("#")[0].rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


class _Heard(logging.Filter):
    """Keeps what this thread says from the handlers."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True
        self.text = record.getMessage().splitlines()[0] if record.getMessage() else ""
        return False


class _MetricExporter(MetricExporter):
    def __init__(self, inner: Any, outcome: _Outcome, reading: _Reading) -> None:
        super().__init__(
            preferred_temporality=inner._preferred_temporality,
            preferred_aggregation=inner._preferred_aggregation,
        )
        self._inner, self._outcome, self._reading = inner, outcome, reading
        self._logger = logging.getLogger(type(inner).__module__)

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        def send() -> Any:
            return self._inner.export(self._with_histograms(metrics_data), timeout_millis, **kwargs)

        sent = self._outcome.of(send, self._logger)
        return MetricExportResult.SUCCESS if sent else MetricExportResult.FAILURE

    def _with_histograms(self, data: MetricsData) -> MetricsData:
        histograms = itertools.chain(self._reading.histograms())
        resources = []
        for of_resource in data.resource_metrics:
            scopes = [
                dataclasses.replace(scope, metrics=[*scope.metrics, *histograms])
                if scope.scope.name == SCOPE
                else scope
                for scope in of_resource.scope_metrics
            ]
            resources.append(dataclasses.replace(of_resource, scope_metrics=scopes))
        return dataclasses.replace(data, resource_metrics=resources)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._inner.shutdown()


class _SpanExporter(SpanExporter):
    def __init__(self, inner: Any, outcome: _Outcome) -> None:
        self._inner, self._outcome = inner, outcome
        self._logger = logging.getLogger(type(inner).__module__)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        sent = self._outcome.of(lambda: self._inner.export(spans), self._logger)
        return SpanExportResult.SUCCESS if sent else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def shutdown(self) -> None:
        self._inner.shutdown()
