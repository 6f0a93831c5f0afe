"""An optimizer that goes away while other ranks are in its reductions, or it owes some itself: nobody waits for it, and
its memory is not given to anybody else before it is over."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from world import ranks

import horoclone.torch as hvd
from horoclone.runtime import native

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cross_barrier": {"cross_barrier": True},
    "zero": {"shard_optimizer_state": True},
    "adasum": {"op": hvd.Adasum},
    "passes": {"backward_passes_per_step": 2},
}


def _made(kind: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    options = KINDS[kind] | ({"cross_barrier": model} if kind == "cross_barrier" else {})
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def _backward(model: torch.nn.Module) -> None:
    model(torch.ones(4, 5)).square().mean().backward()


def _train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(optimizer.backward_passes_per_step):
            _backward(model)
        optimizer.step()


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"zero"}))  # whose updates no joined rank can receive
@ranks(2, limit_s=90)
def test_whoever_waits_goes_on_where_others_have_dropped_theirs_and_joined(kind: str) -> None:
    for _ in range(2):
        model, optimizer = _made(kind)
        # Rank 1 is out of data first, and leaves its function
        _train(model, optimizer, 3 if hvd.rank() else 5)
        del model, optimizer
        gc.collect()
        assert hvd.join() == 0


@pytest.mark.parametrize("kind", KINDS)
@ranks(2, limit_s=90)
def test_what_a_dropped_optimizer_owes_holds_up_no_join_and_no_other_optimizer(kind: str) -> None:
    for number in range(4):  # odd or not, divisible by three or not
        model, optimizer = _made(kind)
        _train(model, optimizer, 3)
        optimizer.zero_grad()
        _backward(model)  # and no step, or with cross_barrier
        if number % 2 and kind == "cross_barrier":
            optimizer.step()  # one whose updates are owed
        del model, optimizer
        gc.collect()
        if number % 3:
            _train(*_made(kind), 3)
        hvd.join()


@ranks(2, limit_s=60)
def test_the_memory_of_a_reduction_under_way_is_given_to_nobody_else() -> None:
    model, optimizer = _made("cross_barrier")
    _train(model, optimizer, 3)
    optimizer.synchronize()
    if hvd.rank() == 0:
        [size] = {bucket.flat.nbytes for bucket in optimizer._reducer.buckets}
        _backward(model)  # sent, and rank 1 is late
        del model, optimizer
        gc.collect()
        others = [torch.frombuffer(native().allocate(size), dtype=torch.float32) for _ in range(4)]
        for memory in others:
            memory.fill_(7)
        hvd.barrier()
        hvd.barrier()
        assert all(bool((memory == 7).all()) for memory in others)
    else:
        hvd.barrier()
        _train(model, optimizer, 1)
        optimizer.synchronize()
        hvd.barrier()
