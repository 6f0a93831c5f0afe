"""Whether this rank sends its metrics and spans to an OpenTelemetry collector: live/otlp.py is loaded only then.

Thread: those of init() and shutdown().
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from horoclone.live import rank_metrics
from horoclone.runtime.current import say

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.bootstrap.exchange import Job

_EXIT_S = 2.0  # for what is left to send when the process ends
_exports: list[Any] = []
_has_complained = False


def begin(runtime: Runtime, job: Job) -> None:
    """The runtime is connected. Never raises: a job runs without what cannot be sent."""
    _exports[:] = [export for export in _exports if not export.is_over()]  # each holds its life's runtime
    sends_metrics, sends_spans = (_is_wanted(os.environ, signal) for signal in ("METRICS", "TRACES"))
    if not (sends_metrics or sends_spans) or not _has_packages(runtime):
        return
    try:
        from horoclone.live import otlp

        if sends_spans:
            runtime.listen_to_timeline()
        source = otlp.Source(
            rank=runtime.rank,
            size=runtime.size,
            local_rank=runtime.local_rank,
            generation=job.generation,
            host=socket.gethostname(),
            key=hashlib.sha256(f"{job.name}:{job.generation}".encode()).hexdigest()[:16],
            read_metrics=lambda: rank_metrics.read(runtime.rank_metrics()),
            heard=runtime.heard_of_timeline if sends_spans else None,
            sends_metrics=sends_metrics,
            say=say,
        )
        _exports.append(otlp.Export(source))
    except Exception as error:  # packages of others, of any release
        _complain(
            f"OpenTelemetry cannot be used: {type(error).__name__}: {error}. The job runs without", runtime
        )


def end() -> None:
    """The runtime is shut down. Does not wait: what is left is sent in the background."""
    for export in _exports:
        export.end()


def wait_at_exit() -> None:
    """The process ends: what is left has two seconds."""
    end()
    deadline = time.monotonic() + _EXIT_S
    while _exports:
        _exports.pop().wait(max(0.0, deadline - time.monotonic()))


def forget() -> None:
    """In a forked child: what is sent is the parent's."""
    _exports.clear()


def _is_wanted(environ: Mapping[str, str], signal: str) -> bool:
    """As the SDK's own set-up decides, where an endpoint is named."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    exporters = environ.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    return any(environ.get(name) for name in names) and "otlp" in exporters.split(",")


def _has_packages(runtime: Runtime) -> bool:
    try:
        is_there = importlib.util.find_spec("opentelemetry.sdk") is not None
    except ImportError:  # the parent is missing
        is_there = False
    if not is_there:
        _complain(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry's SDK is not installed, so nothing is sent: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http; "
            "OTEL_SDK_DISABLED=true says that none is wanted",
            runtime,
        )
    return is_there


def _complain(text: str, runtime: Runtime) -> None:
    global _has_complained
    if not _has_complained and runtime.local_rank == 0:
        say(text)
    _has_complained = True
