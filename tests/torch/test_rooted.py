"""reduce, gather and scatter of arrays and tensors: every dtype, root and form, process sets, gradients, errors."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from world import ranks

import horoclone
import horoclone.torch as hvd
from horoclone import ops

SHAPES = [(), (0,), (7,), (3, 257, 5)]
both = pytest.mark.parametrize("binding", ["numpy", "torch"])


def values(rank: int, shape: tuple[int, ...], name: str) -> torch.Tensor:
    chance = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2 if name == "bool" else 4, shape, generator=chance).to(getattr(torch, name))


def given(tensor: torch.Tensor, name: str, binding: str) -> Any:
    """A copy for this binding."""
    if binding == "torch":
        return tensor.clone()
    return tensor.double().numpy().astype(np.dtype(getattr(ml_dtypes, name, name)))


def same(result: Any, expected: torch.Tensor, name: str) -> None:
    assert str(result.dtype).removeprefix("torch.") == name and tuple(result.shape) == tuple(expected.shape)
    found = result if isinstance(result, torch.Tensor) else torch.from_numpy(result.astype(np.float64))
    assert not found.requires_grad and torch.equal(found.double(), expected.double())


def nothing(result: Any, rows: tuple[int, ...] = ()) -> bool:
    """What others than the root are given: None of NumPy's, a tensor without rows of torch's."""
    return result is None or tuple(result.shape) == (0, *rows)


@both
@ranks(1, 3)
def test_reduce_gives_the_root_the_reduction_and_changes_nobody_else(binding: str) -> None:
    lib, me, size = horoclone if binding == "numpy" else hvd, hvd.rank(), hvd.size()
    for name in ops.DTYPES:
        for shape in SHAPES:
            wide = torch.stack([values(rank, shape, name).double() for rank in range(size)])
            cases = [(hvd.Min, wide.amin(0)), (hvd.Max, wide.amax(0)), (hvd.Product, wide.prod(0))]
            cases.append((hvd.Sum, wide.amax(0) if name == "bool" else wide.sum(0)))
            for number, (op, expected) in enumerate(cases):
                root = number % size
                mine, place, later = (given(values(me, shape, name), name, binding) for _ in range(3))
                results = [
                    lib.reduce(mine, root, op=op),
                    lib.synchronize(lib.reduce_async(mine, root, op=op, name="async")),
                    lib.reduce_(place, root, op=op),
                    lib.synchronize(lib.reduce_async_(later, root, op=op)),
                ]
                assert results[2] is place and results[3] is later
                same(mine, values(me, shape, name), name)
                for result in results if me == root else []:
                    same(result, expected, name)
                if me != root:
                    assert nothing(results[0]) and nothing(results[1])
                    same(place, values(me, shape, name), name)
                    same(later, values(me, shape, name), name)
    for name in ("float64", "bfloat16"):
        average = lib.reduce(given(torch.full((5,), 2.0 * me), name, binding), 0)
        assert me or average.tolist() == [size - 1.0] * 5
    ones = given(torch.ones(4), "float32", binding)
    scaled = lib.reduce(ones, 0, op=hvd.Sum, name="scaled", prescale_factor=3.0, postscale_factor=0.5)
    assert nothing(scaled) if me else scaled.tolist() == [1.5 * size] * 4


@both
@ranks(1, 3)
def test_gather_and_scatter_move_rows_of_every_dtype(binding: str) -> None:
    lib, me, size = horoclone if binding == "numpy" else hvd, hvd.rank(), hvd.size()
    for name in ops.DTYPES:
        for rows in (0, 1, 5, 900):
            root = rows % size
            parts = [values(rank, (rows * (rank + 1) % 1000, 2, 3), name) for rank in range(size)]
            mine = given(parts[me], name, binding)
            for result in (lib.gather(mine, root), lib.synchronize(lib.gather_async(mine, root, name="g"))):
                if me == root:
                    same(result, torch.cat(parts), name)
                else:
                    assert nothing(result, (2, 3))
            whole = values(17, (rows, 4), name)
            source = given(whole, name, binding)
            same(lib.scatter(source if me == root else None, root), torch.tensor_split(whole, size)[me], name)
            splits = [0] * (size - 1) + [rows]
            mine = lib.synchronize(lib.scatter_async(source, root, splits, name="s"))
            same(mine, whole if me == size - 1 else whole[:0], name)


@ranks(2)
def test_what_numpy_cannot_pass_is_refused_and_the_runtime_goes_on() -> None:
    """The rest is the core's: csrc/tests/engine/test_rooted.cc."""
    with pytest.raises(ValueError, match="needs a NumPy array"):
        horoclone.reduce_([1.0, 2.0], 0)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="must pass the array"):
            horoclone.scatter(None, 0)
        with pytest.raises(ValueError, match="at least one dimension"):
            horoclone.scatter(np.float64(1), 0)
    assert horoclone.scatter(np.ones(4), 0).tolist() == [1, 1]


@ranks(3, init=False)
def test_in_a_process_set_roots_are_world_ranks() -> None:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    if pair.included():
        mine = torch.full((3,), hvd.rank() + 1.0, requires_grad=True)
        reduced = hvd.reduce(mine, 2, op=hvd.Sum, process_set=pair)
        gathered = hvd.gather(mine, 2, process_set=pair)
        part = hvd.scatter(torch.tensor([[1], [2]]) if hvd.rank() == 2 else None, 2, process_set=pair)
        assert part.tolist() == [[1 + hvd.rank() // 2]]
        if hvd.rank() == 2:
            assert reduced.tolist() == [4, 4, 4] and gathered.tolist() == [1, 1, 1, 3, 3, 3]
        (reduced.sum() + (gathered * 2).sum()).backward()
        assert mine.grad.tolist() == [3, 3, 3]
        with pytest.raises(ValueError, match="root rank 1 is not a member of process set"):
            hvd.reduce(mine, 1, process_set=pair)
    else:
        with pytest.raises(ValueError, match="Rank 1 is not a member"):
            hvd.gather(torch.ones(1), 0, process_set=pair)


@ranks(1, 3)
def test_rows_that_scatter_sends_to_nobody_have_no_gradient() -> None:
    """That gradients of all three are the exact ones: test_second_derivatives.py."""
    me, size = hvd.rank(), hvd.size()
    rows = [rank + 2 for rank in range(size)]
    for root in range(size):
        whole = torch.randn(sum(rows) + 2, 3, generator=torch.Generator().manual_seed(7))
        source = whole.clone().requires_grad_() if me == root else torch.empty(0, requires_grad=True)
        part = hvd.scatter(source, root, splits=rows)
        (part**2 * (me + 1)).sum().backward()
        if me == root:
            share = torch.cat([torch.full((count, 1), 2.0 * (r + 1)) for r, count in enumerate(rows)])
            assert torch.allclose(source.grad[: sum(rows)], share * whole[: sum(rows)])
            assert source.grad[sum(rows) :].tolist() == [[0.0] * 3] * 2
        else:
            assert source.grad.shape == (0,)
    largest = hvd.reduce(torch.ones(2, requires_grad=True), 0, op=hvd.Max)
    with pytest.raises(hvd.Unsupported, match="op=Max has no gradient"):
        largest.sum().backward()
    with torch.no_grad():
        assert not hvd.gather(torch.ones(1, requires_grad=True), 0).requires_grad


@ranks(2)
def test_what_cannot_work_raises_and_the_runtime_goes_on() -> None:
    me, one = hvd.rank(), torch.ones(4)
    with pytest.raises(hvd.Mismatch, match="Mismatched reduce root ranks"):
        hvd.reduce(one, me, name="roots")
    with pytest.raises(hvd.Mismatch, match="Mismatched data types"):
        hvd.gather(one.double() if me else one, 0, name="types")
    with pytest.raises(hvd.Mismatch, match="Mismatched reduce reduce operations"):
        hvd.reduce(one, 0, op=hvd.Sum if me else hvd.Max, name="ops")
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero tensor"):
        hvd.gather(torch.tensor(3.0), 0, name="scalar")
    for call in (lambda: hvd.reduce(one, 5), lambda: hvd.gather(one, -1), lambda: hvd.scatter(one, 2)):
        with pytest.raises(ValueError, match="root rank"):
            call()
    with pytest.raises(ValueError, match="Adasum is for allreduce"):
        hvd.reduce(one, 0, op=hvd.Adasum)
    with pytest.raises(ValueError, match="Average of bool"):
        hvd.reduce(torch.ones(2, dtype=torch.bool), 0)
    if me == 0:
        for splits, text in (
            ([1], "1 entries for 2 ranks"), ([4, 1], "exceeds"), ([-1, 5], "negative"),
            ([1.0, 3.0], "integers"), (torch.ones(2, 2), "integers"), (3, "integers")
        ):  # fmt: skip
            with pytest.raises(ValueError, match=text):
                hvd.scatter(one, 0, splits=splits)
        for nothing in (None, [1, 2]):
            with pytest.raises(ValueError, match="must pass a torch.Tensor"):
                hvd.scatter(nothing, 0)
        with pytest.raises(ValueError, match="at least one dimension"):
            hvd.scatter(torch.tensor(1.0), 0)
    assert hvd.scatter(one, 0).tolist() == [1, 1]
    unregistered = hvd.ProcessSet([0, 1])
    with pytest.raises(ValueError, match="has not been registered"):
        hvd.reduce(one, 0, process_set=unregistered)


@ranks(2)
def test_large_tensors_and_pending_ones_are_kept_alive() -> None:
    me, size, count = hvd.rank(), hvd.size(), 1_000_003
    handles = [hvd.reduce_async(torch.full((count,), me + i + 1.0), i % size, op=hvd.Sum) for i in range(4)]
    pieces = [hvd.gather_async(torch.full((count,), float(me)), 0), hvd.scatter_async(torch.arange(count), 1)]
    for i, handle in enumerate(handles):
        result = hvd.synchronize(handle)
        expected = 3.0 + 2 * i if i % size == me else math.nan
        assert result.numel() == (count if i % size == me else 0) and bool((result == expected).all())
    gathered, part = (hvd.synchronize(handle) for handle in pieces)
    assert me or gathered.sum().item() == count
    first = (count + 1) // 2
    assert torch.equal(part, torch.arange(count)[me * first :][:first])


@ranks(2)
def test_a_compiled_function_may_call_them_outside_its_graphs() -> None:
    @torch.compile(backend="eager")
    def total(x: torch.Tensor) -> torch.Tensor:
        return hvd.reduce(x * 2, 0, op=hvd.Sum) + 1

    assert total(torch.ones(3)).tolist() == ([] if hvd.rank() else [5.0] * 3)
