"""What operations take between these ranks: two sizes of each, and how much a reduction slows computing beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import horoclone.torch as hvd
from horoclone.plan.profile import Line, Rates
from horoclone.plan.torch.subject import Subject

SIZES = (1 << 20, 16 << 20)  # bytes: those of the optimizer's buckets
REPEATS = 5
# Of a reduction beside which the model computes: its time as a share of the computing, within these bytes.
MOST, SMALLEST, LARGEST = 0.8, 256 << 10, 64 << 20


def rates(subject: Subject, compute_s: float) -> Rates:
    """Collective. compute_s: of this rank's step."""
    everybody = hvd.allgather_object(compute_s)
    local = hvd.local_size()
    if hvd.size() == 1:
        return Rates(1, 1, True, {}, 0.0, tuple(everybody))
    measured = {
        "bucket": _line(lambda size: _bucket(size, torch.float32)),
        "bucket16": _line(lambda size: _bucket(size, torch.bfloat16)),
        "allreduce": _line(lambda size: _plain(size, lambda t: hvd.allreduce_(t, name="plan.allreduce"))),
        "reducescatter": _line(
            lambda size: _plain(size, lambda t: hvd.reducescatter(t, name="plan.scatter"))
        ),
        "broadcast": _line(lambda size: _plain(size, lambda t: hvd.broadcast_(t, 0, name="plan.broadcast"))),
        "allgather": _line(
            lambda size: _plain(size, lambda t: hvd.allgather(t, name="plan.gather")), hvd.size()
        ),
        "alltoall": _line(lambda size: _plain(size, lambda t: hvd.alltoall(t, name="plan.exchange"))),
    }
    agreed = {name: Line(*hvd.broadcast_object(tuple(line))) for name, line in measured.items()}
    load = hvd.broadcast_object(_load(agreed["bucket"], subject, min(everybody)))
    return Rates(hvd.size(), local, hvd.cross_size() == 1, agreed, load, tuple(everybody))


def _line(prepare: Callable[[int], Callable[[], Any]], ranks: int = 1) -> Line:
    """Through the medians of two sizes. ranks: the result is so many times as large, and the sizes less by that."""
    took = []
    for size in SIZES:
        call = prepare(size // ranks)
        call()
        times = []
        for _ in range(REPEATS):
            hvd.barrier()
            begun_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun_s)
        took.append(statistics.median(times))
    small, large = (size // ranks for size in SIZES)
    slope = max(1e-15, (took[1] - took[0]) / (large - small))
    return Line(max(1e-6, took[0] - slope * small), slope)


def _plain(size: int, call: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    rows = max(1, size // 4 // hvd.size()) * hvd.size()
    tensor = torch.ones(rows)
    return lambda: call(tensor)


def _reducer(size: int, dtype: torch.dtype) -> Any:
    """An optimizer whose one gradient fills a bucket of that size, which lies in the bucket from now on."""
    parameter = torch.nn.Parameter(torch.zeros(size // dtype.itemsize, dtype=dtype))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.0), [("plan.bucket", parameter)]
    )
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    return optimizer


def _bucket(size: int, dtype: torch.dtype) -> Callable[[], Any]:
    optimizer = _reducer(size, dtype)

    def reduce() -> None:
        optimizer._reducer.reduced = False
        optimizer._synchronize()

    return reduce


def _load(line: Line, subject: Subject, compute_s: float) -> float:
    """Extra computing time per second of a reduction, between 0 and 1: of the model's own forward and backward, beside
    a reduction that takes most of that time."""
    size = min(LARGEST, max(SMALLEST, int((MOST * compute_s - line.fixed_s) / line.per_byte_s) & ~4095))
    size = int(hvd.broadcast_object(size))
    optimizer = _reducer(size, torch.float32)
    reducer = optimizer._reducer
    extra = []
    for _ in range(REPEATS):
        hvd.barrier()
        alone_s = _computing(subject)
        hvd.barrier()
        reducer.reduced = False
        with torch.no_grad():
            reducer._begin()
            for bucket in reducer.buckets:
                reducer._submit(bucket)
        beside_s = _computing(subject)
        optimizer._synchronize()
        extra.append((beside_s - alone_s) / line.of(size))
    return min(1.0, max(0.0, statistics.median(extra)))


def _computing(subject: Subject) -> float:
    begun_s = subject.now_s()
    subject.loss().backward()  # type: ignore[no-untyped-call]
    took = subject.now_s() - begun_s
    for parameter in subject.parameters:
        parameter.grad = None
    return took
