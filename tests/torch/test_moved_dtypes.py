"""Dtypes without arithmetic in the core: everything that only moves data takes them, bit for bit, and nothing else does."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from world import ranks

import horoclone
import horoclone.torch as hvd
from horoclone import ops
from horoclone.torch.operations.tensors import NUMBER_OF

NAMES_ONLY = ("torch.int4", "torch.uint4", "torch.int2", "torch.uint2")  # torch has few operations on them
MOVED = [
    dtype for dtype, number in NUMBER_OF.items() if number >= ops.FIRST_MOVED and str(dtype) not in NAMES_ONLY
]


ARRAYS = [
    np.dtype(getattr(ml_dtypes, name, name))
    for name in ops.MOVED
    if hasattr(ml_dtypes, name) or hasattr(np, name)
]


def bits(rank: int, rows: int, dtype: Any, columns: int = 3) -> Any:
    """Any bits, NaNs included; the same for the same arguments."""
    data = np.random.default_rng([rank, rows]).bytes(rows * columns * dtype.itemsize)
    if isinstance(dtype, np.dtype):
        return np.frombuffer(data, dtype).reshape(rows, columns).copy()
    return torch.frombuffer(bytearray(data), dtype=dtype).view(rows, columns)


def raw(part: Any) -> bytes:
    return (
        part.tobytes() if isinstance(part, np.ndarray) else bytes(part.contiguous().view(torch.uint8).numpy())
    )


def same(found: Any, *parts: Any) -> None:
    assert found.dtype == parts[0].dtype and found.shape[1:] == parts[0].shape[1:], found.dtype
    assert raw(found) == b"".join(map(raw, parts)), found.dtype


def test_the_lists_have_what_torch_numpy_and_ml_dtypes_have() -> None:
    assert {torch.complex64, torch.complex128, torch.uint32, torch.uint64, torch.float8_e4m3fn} <= set(MOVED)
    assert not [n for n in dir(torch) if n.startswith("float8") and getattr(torch, n) not in MOVED]
    names = {dtype.name for dtype in ARRAYS}
    assert {"uint32", "uint64", "complex64", "complex128"} <= names
    assert {name for name in dir(ml_dtypes) if name.startswith("float8")} <= names


@pytest.mark.parametrize("binding", ["numpy", "torch"])
@ranks(2)
def test_every_operation_that_moves_data(binding: str) -> None:
    lib, dtypes, of = (horoclone, ARRAYS, np.array) if binding == "numpy" else (hvd, MOVED, torch.tensor)
    me = hvd.rank()
    for tag, dtype in enumerate(dtypes):
        both = [bits(rank, 2 + 3 * rank, dtype) for rank in (0, 1)]  # other rows on the other rank
        mine, root, whole = both[me], bits(1, 5, dtype), bits(7, 5, dtype)
        for result in (lib.allgather(mine), lib.synchronize(lib.allgather_async(mine))):
            same(result, *both)
        same(lib.grouped_allgather([mine, mine[:1]])[0], *both)
        same(lib.allgather(mine[: 0 if me else 2]), both[0])
        same(lib.allgather(bits(me, 70_000, dtype)), bits(0, 70_000, dtype), bits(1, 70_000, dtype))
        splits = of([1, 1 + 3 * me])
        found, counts = lib.alltoall(mine, splits if lib is horoclone else splits.int())
        same(found, both[0][1:] if me else both[0][:1], both[1][1:] if me else both[1][:1])
        assert counts.tolist() == ([1, 4] if me else [1, 1])
        same(lib.alltoall(bits(me, 4, dtype)), *(bits(r, 4, dtype)[2 * me : 2 * me + 2] for r in (0, 1)))
        same(lib.broadcast(bits(me, 5, dtype), 1), root)
        same(lib.synchronize(lib.broadcast_async(bits(me, 5, dtype), 1, name="later")), root)
        place, later = bits(me, 5, dtype), bits(me, 5, dtype)
        assert lib.broadcast_(place, 1) is place and lib.synchronize(lib.broadcast_async_(later, 1)) is later
        same(place, root)
        same(later, root)
        found = lib.gather(mine, 1)
        if me:
            same(found, *both)
        else:
            assert found is None or found.shape == (0, 3)
        same(lib.scatter(whole if me else None, 1), whole[3:] if me else whole[:3])
        same(lib.scatter(whole if me else None, 1, of([4, 1])), whole[4:] if me else whole[:4])
        for rows in (5, 70_000):
            sent = bits(9, rows, dtype)
            if me:
                lib.send(sent, 0, tag)
                lib.send(sent, 0, tag)
            else:
                same(lib.recv(None, 1, tag), sent)
                place = bits(0, rows, dtype)
                assert lib.recv(place, 1, tag) is place
                same(place, sent)
            same(lib.broadcast_(bits(me, rows, dtype), 1), bits(1, rows, dtype))


@ranks(2)
def test_odd_layouts_and_parameters_are_broadcast_and_dtypes_that_differ_are_named() -> None:
    me = hvd.rank()
    # Neither contiguous nor in this machine's byte order
    array = np.arange(12, dtype=">c8").reshape(3, 4).T + me
    assert np.array_equal(horoclone.broadcast(array, 1), array + 1 - me)
    state: dict[str, Any] = {str(dtype): bits(me, 5, dtype) for dtype in MOVED}
    hvd.broadcast_parameters(state, 1)
    for dtype in MOVED:
        same(state[str(dtype)], bits(1, 5, dtype))
    turned = {"w": torch.view_as_complex(torch.arange(12.0).view(2, 3, 2) + me).t()}
    hvd.broadcast_parameters(turned, 1)
    assert torch.equal(turned["w"], torch.view_as_complex(torch.arange(12.0).view(2, 3, 2) + 1).t())
    conjugated = {"w": torch.tensor([1j + me, 2 - 1j * me]).conj()}
    hvd.broadcast_parameters(conjugated, 1)
    assert conjugated["w"].tolist() == [1 - 1j, 2 + 1j]
    with pytest.raises(hvd.Mismatch, match="complex64.*uint64"):
        if me:
            hvd.send(bits(9, 5, torch.complex64), 0)
        else:
            hvd.recv(bits(0, 5, torch.uint64), 1)


@ranks(2)
def test_reductions_are_refused_by_name_and_the_runtime_goes_on() -> None:
    for dtype in MOVED:
        name = str(dtype).removeprefix("torch.")
        mine = bits(hvd.rank(), 4, dtype)
        for call in (
            lambda mine=mine: hvd.allreduce(mine, op=hvd.Sum),
            lambda mine=mine: hvd.allreduce(mine),
            lambda mine=mine: hvd.allreduce_(mine, op=hvd.Max),
            lambda mine=mine: hvd.synchronize(hvd.allreduce_async(mine, name="mine")),
            lambda mine=mine: hvd.allreduce_async_(mine, op=hvd.Sum, prescale_factor=0.5),
            lambda mine=mine: hvd.allreduce(mine, op=hvd.Adasum),
            lambda mine=mine: hvd.allreduce(mine, op=hvd.Xor),
            lambda mine=mine: hvd.grouped_allreduce([torch.ones(3), mine], op=hvd.Sum),
            lambda mine=mine: hvd.reducescatter(mine, op=hvd.Sum),
            lambda mine=mine: hvd.grouped_reducescatter([torch.ones(3), mine], op=hvd.Sum),
            lambda mine=mine: hvd.reduce(mine, 1, op=hvd.Sum),
        ):
            with pytest.raises(ValueError, match=f"{name} is not supported by .*Convert it first"):
                call()
            same(mine, bits(hvd.rank(), 4, dtype))
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


@ranks(2)
def test_a_gradient_that_would_be_a_reduction_says_so() -> None:
    mine = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    for call in (lambda: hvd.broadcast(mine, 0), lambda: hvd.allgather(mine)):
        result = call()
        assert result.dtype == torch.complex64
        with pytest.raises(ValueError, match="complex64 is not supported by allreduce"):
            torch.view_as_real(result).sum().backward()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


@ranks(2)
def test_an_optimizer_with_a_complex_parameter_says_so_on_every_rank() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex64 is not supported"):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
        torch.view_as_real(weight).sum().backward()
        optimizer.step()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


@ranks(2, init=False)
def test_torch_distributed_does_not_add_them_up_and_goes_on() -> None:
    """That it moves them is shown by test_c10d_layouts.py."""
    dist.init_process_group("horoclone")
    with pytest.raises(ValueError, match="uint32 is not supported by allreduce"):
        dist.all_reduce(torch.ones(2).to(torch.uint32))
    one = torch.ones(2)
    dist.all_reduce(one)
    assert one.tolist() == [2, 2]
    dist.destroy_process_group()


@ranks(2)
def test_what_numpy_has_not_arrives_there_with_its_name() -> None:
    if hvd.rank():
        hvd.send(torch.empty(4, dtype=torch.float4_e2m1fn_x2), 0)
    else:
        with pytest.raises(ValueError, match="float4_e2m1fn_x2"):
            horoclone.recv(None, 1)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
