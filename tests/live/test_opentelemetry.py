"""What goes to OpenTelemetry: through a real collector (rotel, of PyPI) to a receiver of ours, and where none listens."""

from __future__ import annotations

import gzip
import http.server
import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install '.[otlp]'")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from synthetic_metrics import a_mixed_job
from world import free_port, until

from horoclone.live import measurements, otlp

ROOT = Path(__file__).resolve().parents[2]
RUN = [Path(sys.executable).with_name("horoclonerun"), "-np", "2", sys.executable]
PROGRAM = """
import numpy as np, horoclone as hvd
hvd.init()
for _ in range(5):
    hvd.allreduce(np.ones(1000, np.float32), name="gradient")
    hvd.broadcast(np.ones(3), 0)
print("rank", hvd.rank(), "is content")
"""


class Receiver:
    """Takes what the collector passes on."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.spans: list[Any] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                if self.path.endswith("/traces"):
                    receiver.spans.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
                else:
                    receiver.metrics.extend(ExportMetricsServiceRequest.FromString(body).resource_metrics)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Receiver, dict[str, int]]]:
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        pytest.skip("rotel, a collector, is not installed: pip install rotel")
    receiver, ports = Receiver(), {"http/protobuf": free_port(), "grpc": free_port()}
    command = [
        Path(found.origin).with_name("rotel-agent"), "start", "--batch-timeout", "100ms", "--exporter", "otlp",
        "--otlp-exporter-protocol", "http",
        "--otlp-exporter-endpoint", f"http://127.0.0.1:{receiver.port}",
        "--otlp-http-endpoint", f"127.0.0.1:{ports['http/protobuf']}",
        "--otlp-grpc-endpoint", f"127.0.0.1:{ports['grpc']}",
    ]  # fmt: skip
    running = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for port in ports.values():
            until(lambda port=port: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 60)
        yield receiver, ports
    finally:
        running.kill()
        running.wait(10)
        receiver.server.shutdown()


def attributes(one: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in one.attributes}


def told_by(resources: list[Any], service: str) -> list[Any]:
    return [one for one in list(resources) if attributes(one.resource)["service.name"] == service]


@pytest.mark.parametrize("protocol", ["http/protobuf", pytest.param("grpc", marks=pytest.mark.long(15))])
def test_a_collector_gets_metrics_and_spans_of_every_rank(
    launch: Any, collector: tuple[Receiver, dict[str, int]], protocol: str
) -> None:
    if protocol == "grpc":
        pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="its exporter is not installed")
    receiver, ports = collector
    service = f"job-{protocol}"
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{ports[protocol]}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_SERVICE_NAME": service,
    }
    program = PROGRAM
    if protocol == "grpc":  # whose exporter sends nothing more once the interpreter ends
        program += (
            "import threading\nhvd.shutdown()\n"
            "[one.join() for one in threading.enumerate() if one.name == 'hc-otlp']\n"
        )
    done = launch([*RUN, "-c", program], env=env)
    assert done.stdout.count("is content") == 2 and "OpenTelemetry" not in done.output, done.output

    def spans_of() -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for one in told_by(receiver.spans, service):
            rank = attributes(one.resource)["horoclone.rank"]
            found.setdefault(rank, []).extend(s for scope in one.scope_spans for s in scope.spans)
        return found

    def ranks_with_metrics() -> set[int]:
        return {attributes(one.resource)["horoclone.rank"] for one in told_by(receiver.metrics, service)}

    until(lambda: {rank: len(spans) for rank, spans in spans_of().items()} == {0: 14, 1: 14}, 60)
    until(lambda: ranks_with_metrics() == {0, 1}, 60)
    traces = []
    for spans in spans_of().values():
        steps = {s.span_id: s for s in spans if s.name == "step"}
        traces.append({s.trace_id for s in steps.values()})
        assert sorted(attributes(s)["horoclone.step"] for s in steps.values()) == [1, 2, 3, 4]
        named = [s for s in spans if s.name == "allreduce"]
        assert len(named) == 5
        for one in named:
            told = attributes(one)
            assert told["horoclone.tensor"] == "gradient" and told["horoclone.dtype"] == "float32"
            assert told["horoclone.algorithm"] and told["horoclone.shape"] == "[1000]"
            assert one.start_time_unix_nano <= one.events[0].time_unix_nano <= one.end_time_unix_nano
            assert abs(one.start_time_unix_nano / 1e9 - time.time()) < 600
        in_steps = [s for s in spans if s.name != "step" and s.parent_span_id]
        assert len(in_steps) == 8
        for one in in_steps:
            step = steps[one.parent_span_id]
            assert step.trace_id == one.trace_id and step.start_time_unix_nano <= one.start_time_unix_nano
    assert traces[0] == traces[1] and len(traces[0]) == 4  # one trace of both ranks a step

    metrics = {
        m.name: m
        for one in told_by(receiver.metrics, service)
        for scope in one.scope_metrics
        for m in scope.metrics
    }
    names = {f"horoclone.{one.name}" for one in measurements.of([])} - {"horoclone.elastic"}
    late = {"horoclone.rank.last_to_come", "horoclone.rank.awaited"}  # without points where nobody was
    assert names - late <= set(metrics) <= names
    operations = metrics["horoclone.operations"]
    assert operations.sum.is_monotonic and operations.unit == "{operation}"
    counts = {
        attributes(p)["horoclone.operation"]: p.as_double or p.as_int for p in operations.sum.data_points
    }
    assert counts["allreduce"] == 5 and counts["broadcast"] >= 5  # the core's own is one
    duration = metrics["horoclone.operation.duration"]
    (point,) = (
        p for p in duration.histogram.data_points if attributes(p)["horoclone.operation"] == "allreduce"
    )
    assert duration.unit == "s" and point.count == sum(point.bucket_counts) == 5
    assert len(point.explicit_bounds) == len(point.bucket_counts) - 1 and 0 < point.sum < 600
    assert 0 < point.start_time_unix_nano < point.time_unix_nano


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.long(10))])
def test_an_endpoint_that_does_not_answer_is_told_of_once(launch: Any, answers: bool) -> None:
    """answers: it takes connections, and says nothing."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        if answers:
            place.listen(8)
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{place.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "OTEL_METRIC_EXPORT_INTERVAL": "100",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        steps = 40 if answers else 12
        calm = f"import time\nfor _ in range({steps}):\n    hvd.allreduce(np.ones(3), name='y'); time.sleep(0.1)\n"
        done = launch([*RUN, "-c", PROGRAM + calm], env=env)
    assert done.stdout.count("is content") == 2
    told = [line for line in done.output.splitlines() if "pentelemetry" in line.lower()]
    assert len(told) == 1, done.output
    assert "127.0.0.1" in told[0] and "Training goes on" in told[0] and "Traceback" not in done.output


def test_what_is_missing_or_not_wanted_is_said_once_or_not_at_all(launch: Any, tmp_path: Path) -> None:
    shadow = tmp_path / "opentelemetry"
    shadow.mkdir()
    (shadow / "__init__.py").write_text("")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = launch([*RUN, "-c", PROGRAM], env=env)
    assert done.stdout.count("is content") == 2
    (line,) = (line for line in done.output.splitlines() if "OpenTelemetry" in line)
    assert "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http" in line
    asks = "import sys\nassert not any(name.startswith('opentelemetry') for name in sys.modules)"
    for unwanted in (
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_METRICS_EXPORTER": "none", "OTEL_TRACES_EXPORTER": "none"},
    ):
        done = launch([RUN[-1], "-c", PROGRAM + asks], env={**env, **unwanted})
        assert "is content" in done.stdout and "OpenTelemetry" not in done.output


def test_a_protocol_that_there_is_not_is_named(launch: Any) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "pigeon"}
    done = launch([*RUN, "-c", PROGRAM], env=env)
    (line,) = (line for line in done.output.splitlines() if "OpenTelemetry" in line)
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=pigeon" in line and "http/protobuf, grpc" in line
    assert done.stdout.count("is content") == 2


def spans_of(events: list[list[Any]]) -> dict[str, Any]:
    ids = otlp._StepIds("job")
    provider, kept = TracerProvider(id_generator=ids, shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    spans = otlp.Spans(provider.get_tracer("test"), ids)
    for event in events:
        spans.take(json.loads(json.dumps(event)))
    spans.end()
    return {one.name: one for one in kept.get_finished_spans()}


def test_a_recovery_is_a_trace_with_its_parts() -> None:
    found = spans_of(
        [
            ["span", "allreduce", 0, "RECOVERY", 0, "", {"generation": 2, "cause": "rank 1"}, 5_000, 9.0],
            ["span", "allreduce", 0, "FORMED", 0, "", {}, 6_000, 1.5],
        ]
    )
    whole, part = found["recovery"], found["recovery.formed"]
    assert whole.parent is None and part.parent.span_id == whole.context.span_id
    assert whole.attributes["horoclone.recovery.generation"] == 2
    assert (whole.end_time - whole.start_time, part.end_time - part.start_time) == (9_000, 1_500)
    assert part.start_time - whole.start_time == 1_000


def test_failures_odd_names_and_gaps_make_spans_as_well() -> None:
    ok: dict[str, Any] = {"dtype": "float32", "shape": "[2]"}
    found = spans_of(
        [
            ["done", "barrier", 0, "", 3, "", {}, 10, 0],  # whose beginning nobody saw
            ["announced", "gather", 0, "a\udcff", 0, "", {}, 20, 0],
            ["started", "gather", 0, "a\udcff", 0, "queue", {}, 30, 0],
            ["phase", "gather", 0, "a\udcff", 0, "ring", {}, 40, 0],
            ["done", "gather", 0, "a\udcff", 0, "", {**ok, "error": "rank 1 is lost"}, 50, 0],
            ["announced", "reduce", 0, "x", 0, "", {}, 60, 0],
            ["dropped", 7],
            ["done", "reduce", 0, "x", 0, "", ok, 70, 0],
        ]
    )
    (one,) = found.values()
    assert one.name == "gather" and one.end_time - one.start_time == 30
    assert (
        one.attributes["horoclone.tensor"] == "a\\udcff" and one.attributes["horoclone.algorithm"] == "ring"
    )
    assert one.status.description == "rank 1 is lost" and not one.status.is_ok


def test_the_list_has_every_metric_under_both_names() -> None:
    from horoclone.live import exposition

    page = (ROOT / "deploy" / "grafana" / "README.md").read_text()
    told = list(measurements.of(a_mixed_job(3).ranks()))
    assert {one.name for one in told} == {one.name for one in measurements.of([])}
    for one in told:
        assert re.search(rf"`(horoclone)?\.{re.escape(one.name)}`", page), one.name
        ending = "_total" if one.kind == "counter" else ""
        assert f"`{exposition.name_of(one)}{ending}`" in page, one.name


def test_the_endpoint_is_told_of_whichever_variable_has_it_and_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://me:se@cret@collector:4318/v1/traces?key=secret"
    )
    assert otlp._endpoint() == "https://collector:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector:4317")
    assert otlp._endpoint() == "collector:4317"
