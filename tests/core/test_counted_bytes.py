"""hvd.metrics()["bytes"]: every way that an operation can take is counted, once."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from world import ranks

import horoclone as hvd

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
TCP = {"HOROCLONE_SHARED_MEMORY": "0"}


def counted() -> int:
    return int(hvd.metrics()["bytes"])


def check_blocking_calls() -> None:
    for count in (1, 1000, 1 << 16):  # 4 B to 256 KiB
        tensor = np.ones(count, np.float32)
        for _ in range(5):
            hvd.allreduce_(tensor, op=hvd.Max, name="repeats")
        before = counted()
        for _ in range(
            50
        ):  # small ones: in rounds that bypass the negotiation, most of them without the engine
            hvd.allreduce_(tensor, op=hvd.Max, name="repeats")
        assert counted() - before == 50 * 4 * count, count
        hvd.barrier()


@ranks(2)
def test_blocking_calls_that_repeat_are_counted() -> None:
    bypassed = hvd.metrics()["bypassed"]
    check_blocking_calls()
    assert hvd.metrics()["bypassed"] > bypassed, "no call took the bypass: nothing was tested"


@ranks(2, env=TCP)
def test_blocking_calls_over_tcp_are_counted_alike() -> None:
    check_blocking_calls()


def train() -> None:
    import torch

    import horoclone.torch as torch_hvd
    from horoclone.comparison import PLACES

    model = torch.nn.Linear(1000, 10, bias=False)
    optimizer = torch_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters()
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    before = counted()
    for _ in range(10):
        step()
    grown = counted() - before
    # A bucket's end is aligned to 64 bytes; a check of the weights may travel behind it.
    assert 10 * 40_000 <= grown <= 10 * (40_064 + PLACES * 4), grown


@needs_torch
@ranks(2)
def test_buckets_of_an_optimizer_are_counted() -> None:
    persistent = hvd.metrics()["persistent"]
    train()
    assert hvd.metrics()["persistent"] >= persistent + 10


@needs_torch
@ranks(2, env=TCP)
def test_buckets_of_an_optimizer_over_tcp_are_counted_alike() -> None:
    train()
