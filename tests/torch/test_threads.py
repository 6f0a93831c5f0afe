"""Several threads of one process use the runtime at once: operations in any order, and an optimizer in each thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from world import ranks

import horoclone.torch as hvd

THREADS, CALLS = 4, 30


def in_threads(bodies: list[Callable[[], None]]) -> None:
    """Runs them at the same time. Raises the first error."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def talk(number: int) -> None:
    """Named operations of every form; each thread of each rank has an order of its own, and all are in flight at once."""
    order = torch.randperm(CALLS, generator=torch.Generator().manual_seed(100 * number + hvd.rank())).tolist()
    size, total = hvd.size(), sum(range(hvd.size()))
    handles: dict[int, Any] = {}
    for i in order:
        name, value = f"{number}.{i}", float(hvd.rank() + 10 * i + number)
        if i % 4 == 0:
            handles[i] = hvd.allreduce_async(torch.full((i + 1,), value), name=name, op=hvd.Sum)
        elif i % 4 == 1:
            tensors = [torch.full((3,), value), torch.full((2, 2), int(value), dtype=torch.int64)]
            handles[i] = hvd.grouped_allreduce_async(tensors, name=name, op=hvd.Sum)
        elif i % 4 == 2:
            handles[i] = hvd.allgather_async(torch.full((1 + hvd.rank(), 2), value), name=name)
        else:
            handles[i] = hvd.broadcast_async(torch.full((5,), value), i % size, name=name)
    for i in reversed(order):
        result, sum_of_values = hvd.synchronize(handles[i]), float(total + size * (10 * i + number))
        if i % 4 == 0:
            assert torch.equal(result, torch.full((i + 1,), sum_of_values)), (number, i, result)
        elif i % 4 == 1:
            assert torch.equal(result[0], torch.full((3,), sum_of_values)), (number, i, result)
            assert torch.equal(result[1], torch.full((2, 2), int(sum_of_values))), (number, i, result)
        elif i % 4 == 2:
            rows = [torch.full((1 + r, 2), float(r + 10 * i + number)) for r in range(size)]
            assert torch.equal(result, torch.cat(rows)), (number, i, result)
        else:
            assert torch.equal(result, torch.full((5,), float(i % size + 10 * i + number))), (
                number,
                i,
                result,
            )


@ranks(3)
def test_operations_of_several_threads_in_any_order() -> None:
    in_threads([lambda number=number: talk(number) for number in range(THREADS)])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@ranks(2, env={"HOROCLONE_SHARED_MEMORY": "0"})
def test_operations_of_several_threads_over_tcp() -> None:
    in_threads([lambda number=number: talk(number) for number in range(THREADS)])


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).double()


@ranks(2)
def test_two_optimizers_each_trained_by_a_thread_of_its_own() -> None:
    """Their first steps come one after the other: in them the ranks agree on what each optimizer has."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(6, 6 + i).double() for i in range(3)]
    references = copy.deepcopy(models)
    ops = [hvd.Average, hvd.Average, hvd.Adasum]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), m.named_parameters(), op=op)
        for m, op in zip(models, ops, strict=True)
    ]

    def step(which: int, number: int) -> None:
        optimizers[which].zero_grad()
        models[which](inputs(number, hvd.rank())).square().mean().backward()
        optimizers[which].step()

    def train(which: int) -> None:
        for number in range(1, 12):
            step(which, number)

    for which in range(3):
        step(which, 0)
    in_threads([lambda which=which: train(which) for which in range(3)])
    for model, reference in zip(models[:2], references[:2], strict=True):
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        for number in range(12):
            plain.zero_grad()
            for rank in range(hvd.size()):
                (reference(inputs(number, rank)).square().mean() / hvd.size()).backward()
            plain.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-10)
    rows = hvd.allgather(models[2].weight.detach().flatten().unsqueeze(0))
    assert torch.equal(rows[0], rows[1])
