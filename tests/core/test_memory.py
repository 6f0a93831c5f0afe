"""Memory under ever new names and tags: what comes once leaves nothing behind, whatever size its result has."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from world import ranks

import horoclone

ELEMENTS = 1 << 18  # 1 MiB of float32: memory that the allocator keeps once it has been freed
CALLS = 100  # a leak of one result in each would be 100 MiB
NOISE_MIB = 24

NO_TORCH = importlib.util.find_spec("torch") is None
OPERATIONS = [
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "allgather",
    "uneven_allgather",
    "broadcast",
    "reducescatter",
    "alltoall",
    "alltoall_splits",
    "gather",
    "tags",
    "objects",
]
WITHOUT_TORCH = pytest.mark.skipif(NO_TORCH, reason="torch is not installed")
CASES = [
    *(("numpy", operation) for operation in ("allreduce", "allgather", "tags")),
    *(pytest.param("torch", operation, marks=WITHOUT_TORCH) for operation in OPERATIONS),
]


def resident_mib() -> float:
    gc.collect()
    with open(
        "/proc/self/smaps_rollup"
    ) as rollup:  # of it what is no shared memory, whose pages come when used first
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")) / 1024


def call(hvd: Any, operation: str, x: Any, splits: Any) -> Callable[[int], Any]:
    """One call, by its number, which is in its name or tag."""
    other = 1 - hvd.rank()

    def tags(number: int) -> None:
        handle = hvd.isend(x, dst=other, tag=number)
        hvd.recv(src=other, tag=number)
        hvd.synchronize(handle)

    calls: dict[str, Callable[[int], Any]] = {
        "allreduce": lambda number: hvd.allreduce(x, name=f"m{number}"),
        "allreduce_": lambda number: hvd.allreduce_(x, name=f"m{number}"),
        "grouped_allreduce": lambda number: hvd.grouped_allreduce([x, x], name=f"m{number}"),
        "allgather": lambda number: hvd.allgather(x, name=f"m{number}"),
        "uneven_allgather": lambda number: hvd.allgather(
            x[: ELEMENTS - number % 7 * (hvd.rank() + 1)], name=f"m{number}"
        ),
        "broadcast": lambda number: hvd.broadcast(x, 0, name=f"m{number}"),
        "reducescatter": lambda number: hvd.reducescatter(x, name=f"m{number}"),
        "alltoall": lambda number: hvd.alltoall(x, name=f"m{number}"),
        "alltoall_splits": lambda number: hvd.alltoall(x, splits=splits, name=f"m{number}"),
        "gather": lambda number: hvd.gather(x, 0, name=f"m{number}"),
        "tags": tags,
        "objects": lambda number: hvd.broadcast_object(bytes(4 * ELEMENTS), name=f"m{number}"),
    }
    return calls[operation]


@pytest.mark.parametrize(("kind", "operation"), CASES)
@ranks(2)
def test_results_under_ever_new_names_leave_no_memory_behind(kind: str, operation: str) -> None:
    if kind == "torch":
        import torch

        import horoclone.torch as hvd

        x, splits = torch.ones(ELEMENTS), torch.tensor([1, ELEMENTS - 1], dtype=torch.int32)
    else:
        hvd, x, splits = horoclone, np.ones(ELEMENTS, np.float32), np.array([1, ELEMENTS - 1])
    once = call(hvd, operation, x, splits)
    for number in range(30):
        once(number)
    before = resident_mib()
    for number in range(30, 30 + CALLS):
        once(number)
    assert resident_mib() - before < NOISE_MIB


@ranks(2)
def test_many_new_names_at_once_are_all_held_until_they_are_done() -> None:
    for _ in range(2):
        handles = [
            horoclone.allreduce_async(np.full(3, number, np.float32), name=f"n{number}", op=horoclone.Sum)
            for number in range(200)
        ]
        with pytest.raises(ValueError, match="already pending"):
            for number in (0, 199):
                horoclone.allreduce_async(np.ones(3, np.float32), name=f"n{number}")
        got = [horoclone.synchronize(handle).tolist() for handle in handles]
        assert got == [[2.0 * number] * 3 for number in range(200)]
