"""Spans in torch's profiler: which there are, where, and that there are none where no profiler runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from world import ranks  # noqa: E402

import horoclone.torch as hvd  # noqa: E402
from horoclone.torch.operations import spans  # noqa: E402


def profiled(body: Callable[[], Any], path: Path) -> list[tuple[str, float, float]]:
    """The spans of horoclone in the trace that torch exports: name, begin, end in microseconds, by begin."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        body()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    ours = [event for event in events if str(event.get("name", "")).startswith("horoclone.")]
    return sorted(
        (e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in ours if e["ph"] == "X"
    )


def calls() -> None:
    hvd.allreduce(torch.ones(3), name="mean")
    hvd.allreduce_(torch.ones(3), name="in place")
    hvd.allgather(torch.ones(hvd.rank() + 1, 2), name="rows")
    hvd.broadcast(torch.ones(3), 0, name="from 0")
    hvd.alltoall(torch.ones(hvd.size()), name="parts")
    hvd.reducescatter(torch.ones(hvd.size()), name="share")
    hvd.barrier()
    hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="later"))
    hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(3), torch.ones(2)], name="both"))
    hvd.allreduce(torch.ones(2))


@ranks(2)
def test_every_call_has_a_span_and_results_are_the_same(tmp_path: Path) -> None:
    calls()  # the fast path is open
    found = [name for name, _, _ in profiled(calls, tmp_path / f"trace{hvd.rank()}.json")]
    expected = [
        "horoclone.allreduce mean", "horoclone.allreduce in place", "horoclone.allgather rows",
        "horoclone.broadcast from 0", "horoclone.alltoall parts", "horoclone.reducescatter share", "horoclone.barrier",
        "horoclone.allreduce.submit later", "horoclone.allreduce.wait later", "horoclone.grouped_allreduce.submit both",
        "horoclone.grouped_allreduce.wait both", "horoclone.allreduce",
    ]  # fmt: skip
    assert sorted(found) == sorted(expected), set(found) ^ set(expected)
    assert not spans._noted, "what was waited for is forgotten"
    with torch.profiler.profile():
        handle = hvd.allreduce_async(torch.full((3,), float(hvd.rank())), name="across")
        mean = hvd.allreduce(torch.full((2,), float(hvd.rank())), name="value")
    assert hvd.synchronize(handle).tolist() == [0.5] * 3 and mean.tolist() == [0.5] * 2
    with torch.profiler.profile(), pytest.raises(hvd.Mismatch):  # an error closes its span
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="differs")
    with torch.profiler.profile() as profile, pytest.raises(TypeError, match="prescale_factor"):
        hvd.allreduce(torch.ones(2), prescale_factor="2")  # type: ignore[arg-type]
    assert any(event.name == "horoclone.allreduce" for event in profile.events())


def trained(steps: int) -> Callable[[], None]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

    def train() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    return train


def is_of_bucket(call: str, span: str) -> bool:
    return span.startswith(f"horoclone.allreduce.{call} ") and " (gradients." in span


@ranks(2)
def test_a_step_shows_how_long_it_waits_for_its_buckets(tmp_path: Path) -> None:
    train = trained(2)
    train()  # buckets exist
    found = profiled(train, tmp_path / f"trace{hvd.rank()}.json")
    whole = [span for span in found if span[0] == "horoclone.synchronize"]
    waits = [span for span in found if is_of_bucket("wait", span[0])]
    assert len(whole) == 4 and len(waits) >= 2  # at the end of backward, and in step()
    assert len(waits) == sum(is_of_bucket("submit", span[0]) for span in found)
    for _, begin, end in waits:
        assert any(outer[1] <= begin and end <= outer[2] for outer in whole), (waits, whole)


@ranks(2)
def test_without_a_profiler_nothing_is_recorded() -> None:
    made: list[Any] = []
    original = spans.record_function
    spans.record_function = lambda *arguments: made.append(arguments)  # type: ignore[assignment]
    try:
        calls()
        trained(1)()
    finally:
        spans.record_function = original
    assert not made


def test_torch_says_in_python_whether_it_profiles() -> None:
    assert spans.profiler is torch.autograd.profiler and spans.profiler._is_profiler_enabled is False
    with torch.profiler.profile():
        assert spans.profiler._is_profiler_enabled is True
    with torch.autograd.profiler.emit_nvtx(enabled=False):
        assert spans.profiler._is_profiler_enabled is False
