"""Operations inside functions that torch.compile turns into one graph.

A compiled model in an optimizer is in test_torch_around_a_step.py.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from world import distributed, ranks

import horoclone.torch as hvd


def compiled(function: Any, backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def every_operation(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = hvd.allreduce(x * w, name="y")
    pending = hvd.allreduce_async(y + 1, name="pending", op=hvd.Sum)
    largest = hvd.allreduce(x.detach(), op=hvd.Max)
    everybody = hvd.allgather(y.sin())
    share = hvd.reducescatter(everybody[1:], op=hvd.Sum, prescale_factor=0.5)  # 3 rows: 2 and 1
    turned = hvd.alltoall(everybody)
    root = hvd.broadcast(w * 2, hvd_size - 1)
    group = hvd.grouped_allreduce([y, w], name="group", op=hvd.Sum)
    rows = hvd.grouped_allgather([y, w * 3])
    shares = hvd.grouped_reducescatter([everybody, turned], op=hvd.Average)
    half = hvd.allreduce(y, compression=hvd.Compression.fp16)
    place = torch.zeros(3) + w.detach()
    hvd.allreduce_(place, op=hvd.Sum)
    hvd.allreduce(x)  # without a use: it must still be made, the other ranks wait for it
    return (
        hvd.synchronize(pending), largest, everybody, share, turned, root, *group, *rows, *shares, half, place,
    )  # fmt: skip


hvd_size = 1


def both_ways(backend: str, size: int) -> None:
    global hvd_size
    hvd_size = size
    outcome = []
    for function in (every_operation, compiled(every_operation, backend)):
        w = torch.linspace(0.5, 1.5, 3, requires_grad=True)
        x = torch.arange(6.0).view(2, 3) + hvd.rank()
        results = function(x, w)
        sum((r * r).sum() for r in results if r.requires_grad).backward()
        outcome.append(([r.detach() for r in results], w.grad))
    close(outcome[1], outcome[0])


@ranks(2)
def test_every_operation_and_its_gradient_are_the_same_as_without_compiling() -> None:
    both_ways("aot_eager", hvd.size())


@pytest.mark.long(40)
@ranks(2, limit_s=150)  # it compiles C++
def test_with_inductor() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = hvd.allreduce_async(x * 3, op=hvd.Sum, name="first")
        second = hvd.allgather(x + 1, name="second")
        return hvd.synchronize(first).sum() + second.sum()

    x = torch.arange(5.0) + hvd.rank()
    close(compiled(function, "inductor")(x), function(x))


if shutil.which("g++") is None and shutil.which("clang++") is None:
    test_with_inductor = pytest.mark.skip(reason="inductor needs a C++ compiler")(test_with_inductor)


@ranks(2)
def test_ranks_may_start_named_operations_in_different_orders() -> None:
    first, second = ("a", "b") if hvd.rank() == 0 else ("b", "a")

    def function(x: torch.Tensor) -> torch.Tensor:
        handles = {
            name: hvd.allreduce_async(x * len(name), name=name, op=hvd.Sum) for name in (first, second)
        }
        return hvd.synchronize(handles["a"]) + 10 * hvd.synchronize(handles["b"])

    assert compiled(function)(torch.ones(2)).tolist() == [22.0, 22.0]


@ranks(3)
def test_within_a_process_set() -> None:
    everyone = hvd.ProcessSet([0, 2])
    hvd.shutdown()
    hvd.init(process_sets=[everyone])

    def function(x: torch.Tensor) -> torch.Tensor:
        whole = hvd.allgather(x, process_set=everyone)
        return hvd.allreduce(whole, op=hvd.Sum, process_set=everyone) + hvd.broadcast(
            x[:1], 2, process_set=everyone
        )

    if hvd.rank() != 1:
        x = torch.full((2,), float(hvd.rank()), requires_grad=True)
        result = compiled(function)(x)
        assert result.tolist() == [2.0, 2.0, 6.0, 6.0]
        result.sum().backward()
        wanted = torch.full((2,), float(hvd.rank()), requires_grad=True)
        function(wanted).sum().backward()
        close(x.grad, wanted.grad)
    hvd.barrier()


@ranks(2)
def test_different_first_dimensions_are_an_error_that_says_so() -> None:
    gather = compiled(lambda x: hvd.allgather(x, name="rows") * 2)
    with pytest.raises(ValueError, match="(?s)(?=.*rows)(?=.*first dimensions)"):
        gather(torch.ones(2 + hvd.rank(), 3))
    assert gather(torch.ones(2, 3)).shape == (4, 3)
    double = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum") * 2)
    with pytest.raises(hvd.Mismatch, match="sum"):
        double(torch.ones(2 + hvd.rank()))
    assert double(torch.ones(1)).item() == 4.0


@ranks(2)
def test_ddp_of_torch_can_be_compiled_on_horoclones_backend() -> None:
    with distributed() as (rank, _):
        torch._dynamo.reset()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        step = torch.compile(model, backend="eager")
        for value in (rank + 1.0, rank + 5.0):  # in the second forward pass DDP makes its buckets anew
            model.zero_grad()
            step(torch.full((1, 2), value)).sum().backward()
        assert model.module.weight.grad.tolist() == [[5.5, 5.5]]
