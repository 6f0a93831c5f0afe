"""join() of torch programs: whoever has joined is the neutral element of every reduction, dtype and form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from world import ranks

import horoclone
import horoclone.torch as hvd

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
]  # fmt: skip


def value(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """The neutral elements are none of these: 0 and 1 are, for Sum and Product; low and high for Min and Max."""
    if dtype is torch.bool:
        return torch.tensor([rank % 2 == 0, rank % 2 == 1, True, False])
    low = [2, 3, 2, 5] if dtype is torch.uint8 else [-2, 3, -2, -5]
    return (torch.tensor(low) * torch.tensor([1, 1, rank + 1, 1])).to(dtype)


def reduced(present: list[torch.Tensor], op: int, size: int) -> torch.Tensor:
    dtype = present[0].dtype
    wide = torch.stack([p.to(torch.float64 if dtype.is_floating_point else torch.int64) for p in present])
    if dtype is torch.bool:
        return (wide.amax(0) if op in (hvd.Sum, hvd.Max) else wide.amin(0)).bool()
    if op == hvd.Average:  # the divisor stays the full size; integers go toward zero
        mode = None if dtype.is_floating_point else "trunc"
        return torch.div(wide.sum(0), size, rounding_mode=mode).to(dtype)
    return {hvd.Sum: wide.sum, hvd.Min: wide.amin, hvd.Max: wide.amax, hvd.Product: wide.prod}[op](0).to(
        dtype
    )


def same(result: torch.Tensor, expected: torch.Tensor, op: int) -> bool:
    """Averages are sum * (1/N), one rounding from the quotient."""
    if op == hvd.Average and expected.dtype.is_floating_point:
        eps = 2 * torch.finfo(expected.dtype).eps
        return result.dtype == expected.dtype and torch.allclose(result.double(), expected.double(), rtol=eps)
    return result.dtype == expected.dtype and torch.equal(result, expected)


def take_steps(steps: int) -> int:
    """Rank r takes r more steps than rank 0; in each one, every dtype and reduction in some form."""
    me, size = hvd.rank(), hvd.size()
    for step in range(steps + me):
        present = [rank for rank in range(size) if step < steps + rank]
        for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            kinds = [dtype for dtype in DTYPES if dtype is not torch.bool or op != hvd.Average]
            mine = [value(me, dtype) for dtype in kinds]
            expected = [reduced([value(rank, dtype) for rank in present], op, size) for dtype in kinds]
            forms: dict[str, Any] = {
                "grouped": lambda tensors, op: hvd.grouped_allreduce(tensors, op=op),
                "grouped, named": lambda tensors, op: hvd.grouped_allreduce(tensors, op=op, name=f"g{op}"),
                "grouped, in place": lambda tensors, op: hvd.grouped_allreduce_(
                    [t.clone() for t in tensors], op=op
                ),
                "named": lambda tensors, op: [
                    hvd.allreduce(t, op=op, name=f"{op}.{t.dtype}") for t in tensors
                ],
                "all at once": lambda tensors, op: [
                    hvd.synchronize(h) for h in [hvd.allreduce_async(t, op=op) for t in tensors]
                ],
            }
            for form, call in forms.items():
                for result, wanted in zip(call(mine, op), expected, strict=True):
                    assert same(result, wanted, op), (step, form, op, result, wanted)
    return hvd.join()


@ranks(3)
def test_joined_ranks_are_neutral_in_every_reduction_dtype_and_form() -> None:
    for _ in range(2):  # a second round: everybody is back
        assert take_steps(1) == 2
    hvd.barrier()


@ranks(2)
def test_neutral_elements_of_min_and_max_are_beyond_every_value() -> None:
    if hvd.rank() == 0:
        for dtype in DTYPES:
            if dtype is torch.bool:
                least, most = torch.tensor([False]), torch.tensor([True])
            elif dtype.is_floating_point:
                least, most = (torch.tensor([sign * math.inf], dtype=dtype) for sign in (-1, 1))
            else:
                least, most = (
                    torch.tensor([getattr(torch.iinfo(dtype), end)], dtype=dtype) for end in ("min", "max")
                )
            for _ in range(2):
                for extreme in (least, most):
                    assert torch.equal(hvd.allreduce(extreme, op=hvd.Min, name=f"min.{dtype}"), extreme), (
                        dtype
                    )
                    assert torch.equal(hvd.allreduce(extreme, op=hvd.Max, name=f"max.{dtype}"), extreme), (
                        dtype
                    )
        nan = torch.tensor([math.nan], dtype=torch.bfloat16)
        assert all(hvd.allreduce(nan, op=op).isnan().all() for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Sum))
    assert hvd.join() == 0


def _begins_anew(op: int, join: Callable[[], int]) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(3)]
    optimizers: list[Any] = []

    def make(i: int) -> None:
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(models[i].parameters(), 0.1), op=op))

    def step(i: int) -> None:
        optimizers[i].zero_grad()
        models[i](torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
        optimizers[i].step()

    make(0)
    make(1)
    if hvd.rank() == 0:
        step(0)
    join()
    make(2)
    for i in (2, 0, 1, 2):
        hvd.broadcast_(models[i].weight.data, 0)
        step(i)
        assert op == hvd.Adasum or models[i].weight.grad.tolist() == [[1.5, 1.5]]
        rows = hvd.allgather(models[i].weight.detach())
        assert torch.equal(rows[0], rows[1])


@ranks(2)
def test_an_optimizer_that_a_rank_never_began_is_not_counted_after_the_join() -> None:
    for op, join in ((hvd.Average, hvd.join), (hvd.Average, horoclone.join), (hvd.Adasum, hvd.join)):
        _begins_anew(op, join)
