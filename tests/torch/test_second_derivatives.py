"""Second derivatives through every differentiable operation, against the same computed in one process.

The first derivative of an operation is its adjoint times a factor of Horovod's; the second is that of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from world import ranks

import horoclone.torch as hvd

Tensors = Sequence[torch.Tensor]
EVEN, UNEVEN = (4, 4, 4), (2, 3, 1)  # rows by rank


def inputs(rows: Sequence[int], size: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randn(rows[r], 2, dtype=torch.float64, generator=chance) for r in range(size)]


def cut(whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    """As reducescatter and scatter share rows: the first ranks get one more."""
    rows = [len(whole) // size + (r < len(whole) % size) for r in range(size)]
    return list(whole.split(rows))


def on_root(value: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [value if r == 1 else value[:0] for r in range(size)]


def exchanged(xs: Tensors, size: int) -> list[torch.Tensor]:
    """Rank r gives r % 2 + 1 rows to each rank; what is left goes nowhere."""
    return [torch.cat([xs[r][to * (r % 2 + 1) :][: r % 2 + 1] for r in range(size)]) for to in range(size)]


# Name -> call on one rank's tensor, the same on the list of everybody's, factor of the gradient, rows by rank.
Case = tuple[Callable[..., Any], Callable[[Tensors, int], list[torch.Tensor]], Callable[[int], float], Any]
CASES: dict[str, Case] = {
    "allreduce": (
        lambda x, **k: hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3.0, **k),
        lambda xs, n: [1.5 * sum(xs) / n] * n, lambda n: 1, EVEN,
    ),
    "allreduce sum": (
        lambda x, **k: hvd.allreduce(x, op=hvd.Sum, **k), lambda xs, n: [sum(xs)] * n, lambda n: 1, EVEN,
    ),
    "grouped_allreduce": (
        lambda x, **k: hvd.grouped_allreduce([x, 2 * x], **k),
        lambda xs, n: [torch.stack([sum(xs) / n, 2 * sum(xs) / n])] * n, lambda n: 1, EVEN,
    ),
    "allgather": (hvd.allgather, lambda xs, n: [torch.cat(list(xs))] * n, lambda n: 1 / n, UNEVEN),
    "grouped_allgather": (
        lambda x, **k: hvd.grouped_allgather([x, 2 * x], **k),
        lambda xs, n: [torch.stack([torch.cat(list(xs)), 2 * torch.cat(list(xs))])] * n, lambda n: 1 / n, UNEVEN,
    ),
    "broadcast": (lambda x, **k: hvd.broadcast(x, 1, **k), lambda xs, n: [xs[1]] * n, lambda n: 1 / n, EVEN),
    "reducescatter": (hvd.reducescatter, lambda xs, n: cut(sum(xs) / n, n), lambda n: n, (5, 5, 5)),
    "reducescatter sum": (
        lambda x, **k: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=2.0, **k),
        lambda xs, n: cut(2 * sum(xs), n), lambda n: n, (5, 5, 5),
    ),
    "grouped_reducescatter": (
        lambda x, **k: hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum, **k),
        lambda xs, n: [torch.stack([s, 2 * s]) for s in cut(sum(xs), n)], lambda n: n, (5, 5, 5),
    ),
    "alltoall": (
        lambda x, **k: hvd.alltoall(x, torch.full((k["process_set"].size(),), hvd.rank() % 2 + 1).int(), **k)[0],
        exchanged, lambda n: 1, (7, 7, 7),
    ),
    "reduce": (
        lambda x, **k: hvd.reduce(x, 1, op=hvd.Average, prescale_factor=3.0, postscale_factor=0.5, **k),
        lambda xs, n: on_root(1.5 * sum(xs) / n, n), lambda n: 1, EVEN,
    ),
    "reduce sum": (
        lambda x, **k: hvd.reduce(x, 1, op=hvd.Sum, **k), lambda xs, n: on_root(sum(xs), n), lambda n: 1, EVEN,
    ),
    "gather": (
        lambda x, **k: hvd.gather(x, 1, **k), lambda xs, n: on_root(torch.cat(list(xs)), n), lambda n: 1, UNEVEN,
    ),
    "scatter": (lambda x, **k: hvd.scatter(x, 1, **k), lambda xs, n: cut(xs[1], n), lambda n: 1, (5, 5, 5)),
}  # fmt: skip


def loss(y: torch.Tensor, rank: int, linear: bool) -> torch.Tensor:
    """Of a rank, from its result; each rank has weights of its own."""
    weights = torch.linspace(1, 2 + rank, y.numel(), dtype=torch.float64).view_as(y)
    return (weights * (y if linear else y.pow(3))).sum()


def expected(case: Case, size: int, linear: Sequence[bool]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    _, everybody, factor, rows = case
    xs = [x.requires_grad_() for x in inputs(rows, size)]
    ys = everybody(xs, size)

    def backward(grads: Tensors) -> list[torch.Tensor]:
        found = torch.autograd.grad(ys, xs, list(grads), create_graph=True, allow_unused=True)
        return [x * 0.0 if grad is None else grad * factor(size) for x, grad in zip(xs, found, strict=True)]

    leaves = [y.detach().requires_grad_() for y in ys]
    losses = [loss(y, r, linear[r]) for r, y in enumerate(leaves)]
    by_y = torch.autograd.grad(losses, leaves, create_graph=True)
    points = [g.detach().requires_grad_() for g in by_y]
    first = backward(points)
    to_points = torch.autograd.grad(sum(g.pow(2).sum() for g in first), points, allow_unused=True)
    to_y = [
        torch.autograd.grad(g, y, v)[0] if g.requires_grad and v is not None else torch.zeros_like(y)
        for g, y, v in zip(by_y, leaves, to_points, strict=True)
    ]
    return [g.detach() for g in first], [g.detach() for g in backward(to_y)]


def check(name: str, group: hvd.ProcessSet, named: bool, linear: Sequence[bool]) -> None:
    call, _, _, rows = CASES[name]
    size, place = group.size(), group.rank()
    x = inputs(rows, size)[place].requires_grad_()
    y = call(x, process_set=group, name=f"second.{name}" if named else None)
    if not isinstance(y, torch.Tensor):
        y = torch.stack(list(y))
    (first,) = torch.autograd.grad(loss(y, place, linear[place]), x, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), x, allow_unused=True)
    firsts, seconds = expected(CASES[name], size, linear)
    assert torch.allclose(first, firsts[place]), (name, first, firsts[place])
    second = torch.zeros_like(x) if second is None else second
    assert torch.allclose(second, seconds[place]), (name, linear, second, seconds[place])


@ranks(3)
def test_they_are_those_of_one_process() -> None:
    for name in CASES:
        for named in (True, False):
            check(name, hvd.global_process_set, named, [False] * hvd.size())


@ranks(2)
def test_a_rank_whose_loss_is_linear_takes_part() -> None:
    for name in CASES:
        check(name, hvd.global_process_set, True, [True, False])
        check(name, hvd.global_process_set, True, [False, True])


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_so_they_are_in_a_process_set() -> None:
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        for name in CASES:
            check(name, pair, True, [False, False])
    hvd.barrier()


@ranks(2)
def test_a_reduction_that_is_not_linear_has_none() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        y = hvd.allreduce(torch.ones(2, requires_grad=True), op=op)
        with pytest.raises(hvd.Unsupported, match="no gradient"):
            y.sum().backward()


@ranks(2)
def test_a_third_derivative_and_a_graph_that_is_kept() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = hvd.reducescatter(x, op=hvd.Sum).pow(4).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (again,) = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(first, again)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    whole = x.detach() * 2  # each rank's element of the sum is reduced from two equal ones
    assert torch.allclose(first, 2 * 4 * whole**3)
    assert torch.allclose(second, 2 * 2 * 2 * 12 * whole**2)
    assert torch.allclose(third, 2 * 2 * 2 * 2 * 2 * 24 * whole)


# --- batch normalisation ---


def penalties(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of the gradient: derivatives of its square, for the rows, the weight and the bias."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((layer(x) + 0.5).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.pow(2).sum() + grad.pow(3).sum(), [x, layer.weight, layer.bias])


@ranks(3)
def test_a_penalty_on_the_gradient_through_sync_batch_norm() -> None:
    for rows in ((4, 4, 4), (5, 1, 2), (6, 0, 0)):
        for shape in ((3,), (3, 2, 2)):
            chance = torch.Generator().manual_seed(0)
            batches = [
                torch.randn(rows[r], *shape, dtype=torch.float64, generator=chance) for r in range(hvd.size())
            ]
            plain = (torch.nn.BatchNorm1d if len(shape) == 1 else torch.nn.BatchNorm2d)(3).double()
            layer = hvd.SyncBatchNorm(3).double()
            with torch.no_grad():
                for one in (plain, layer):
                    one.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
                    one.bias.copy_(torch.tensor([0.0, 1.0, 3.0]))
            of_x, of_weight, of_bias = penalties(plain, torch.cat(batches))
            mine, *own = penalties(layer, batches[hvd.rank()])
            first = sum(rows[: hvd.rank()])
            assert torch.allclose(mine, of_x[first : first + len(mine)], rtol=1e-9, atol=1e-9)
            for total, reference in zip(own, (of_weight, of_bias), strict=True):
                assert torch.allclose(hvd.allreduce(total, op=hvd.Sum), reference, rtol=1e-9, atol=1e-9)


@ranks(2)
def test_a_third_derivative_through_sync_batch_norm() -> None:
    x = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def by_hand(
        rows: torch.Tensor,
    ) -> torch.Tensor:  # torch's own third derivative takes the mean for a constant
        return (rows - rows.mean(0)) * torch.rsqrt(rows.var(0, unbiased=False) + 1e-5)

    def third(layer: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone().requires_grad_()
        value = layer(rows).pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, rows, create_graph=True)
            value = grad.pow(2).sum()
        return grad.detach()

    plain = third(by_hand, x)
    here = slice(0, 2) if hvd.rank() == 0 else slice(2, 6)
    assert torch.allclose(third(hvd.SyncBatchNorm(2).double(), x[here]), plain[here], rtol=1e-8)
