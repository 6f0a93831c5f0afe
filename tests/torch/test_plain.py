"""The fast path of an allreduce (_core.FastPath): what takes it, that it does the same, and what takes the slow path."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from world import ranks, starts_counted

import horoclone.torch as hvd
from horoclone import ops
from horoclone.torch.operations.handles import table
from horoclone.torch.operations.tensors import NUMBER_OF

REDUCED = [dtype for dtype, number in NUMBER_OF.items() if number < ops.FIRST_MOVED]


def needs_exchange() -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} has no table of DLPack's functions")


def counted() -> AbstractContextManager[dict[str, int]]:
    """How many submissions took the fast path, and how many were offered to it."""
    # A life's first takes the slow path and opens the fast one
    hvd.synchronize(hvd.allreduce_async_(torch.ones(1)))
    return starts_counted(table)


def slow_path(call: Callable[[], Any]) -> Any:
    real = table.start_plain, table.start_plain_group
    table.start_plain = table.start_plain_group = lambda *_: None
    try:
        return call()
    finally:
        table.start_plain, table.start_plain_group = real


def sample(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) % 2 + hvd.rank()).to(dtype)


@ranks(2)
def test_every_dtype_takes_the_short_way_and_gives_what_the_long_one_gives() -> None:
    before = set(table.pending)  # another test in these processes may have dropped a handle
    needs_exchange()
    for dtype in REDUCED:
        for shape in ((2, 3), (6,), (3, 1, 2)):
            with counted() as seen:
                short = sample(dtype).reshape(shape)
                handle = hvd.allreduce_async_(short, op=hvd.Sum, name="in place")
                assert hvd.synchronize(handle) is short
                assert hvd.synchronize(handle) is None  # known no more
                other = hvd.synchronize(hvd.allreduce_async(sample(dtype).reshape(shape), op=hvd.Sum))
                pair = [sample(dtype).reshape(shape), torch.full((1,), 2.0)]
                group = hvd.synchronize(hvd.grouped_allreduce_async(pair, op=hvd.Max, name="group"))
                assert hvd.synchronize(hvd.grouped_allreduce_async_(pair, op=hvd.Max)) is not None
            assert seen == {"short": 4, "offered": 4}, (dtype, seen)
            want = sample(dtype).reshape(shape)
            slow_path(lambda want=want: hvd.synchronize(hvd.allreduce_async_(want, op=hvd.Sum)))
            assert torch.equal(short, want) and torch.equal(other, want) and short.dtype == dtype
            assert torch.equal(group[0], pair[0]) and group[1].tolist() == [2.0]
    scaled = torch.full((3,), 4.0)
    with counted() as seen:
        hvd.synchronize(hvd.allreduce_async_(scaled, None, "s", hvd.Average, 0.5, 3.0, priority=7))
    assert seen["short"] == 1 and scaled.tolist() == [6.0] * 3
    assert set(table.pending) <= before


@ranks(2)
def test_what_is_not_plain_takes_the_slow_path() -> None:
    before = set(table.pending)  # another test in these processes may have dropped a handle
    needs_exchange()
    ok = torch.ones(4)
    parameter = torch.nn.Parameter(torch.ones(4))
    with counted() as seen:
        hvd.synchronize(hvd.allreduce_async_(parameter, op=hvd.Sum))  # as plain as any
        hvd.synchronize(hvd.allreduce_async_(ok[1:3], op=hvd.Sum, process_set=hvd.global_process_set))
    assert (
        seen == {"short": 2, "offered": 2} and parameter.tolist() == [2.0] * 4 and ok.tolist() == [1, 2, 2, 1]
    )
    with counted() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert hvd.synchronize(hvd.allreduce_async_(torch.ones(0, 3))).shape == (0, 3)
        assert hvd.synchronize(hvd.allreduce_async_(torch.ones(2), average=False)).tolist() == [2.0] * 2
        assert hvd.synchronize(hvd.allreduce_async_(torch.ones(2), prescale_factor=2)).tolist() == [2.0] * 2
        for wrong in (
            torch.ones(3, 4).t(),
            torch.ones(1).expand(4),
            torch.ones(4).to_sparse(),
            torch.ones(4, device="meta"),
            torch.ones(4, dtype=torch.complex64),
            torch.ones(4, dtype=torch.float8_e4m3fn),
        ):
            with pytest.raises((ValueError, hvd.Unsupported)):
                hvd.allreduce_async_(wrong, op=hvd.Sum)
            with pytest.raises((ValueError, hvd.Unsupported)):
                hvd.grouped_allreduce_async_([ok, wrong], op=hvd.Sum)
        for arguments in (
            {"op": 77}, {"op": True}, {"op": 2**80}, {"name": ""}, {"name": "a\udc80"},
            {"average": True, "op": hvd.Sum}, {"priority": 2**40}, {"process_set": hvd.ProcessSet([0])}
        ):  # fmt: skip
            with pytest.raises((ValueError, TypeError, UnicodeEncodeError)):
                hvd.allreduce_async_(ok, **arguments)
        with pytest.raises(ValueError, match="Average of bool"):
            hvd.allreduce_async_(torch.ones(2, dtype=torch.bool))
    assert seen["short"] == 0 and seen["offered"] == 3 + 2 * 6 + 8 + 1
    assert set(table.pending) <= before
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3  # unnamed ones still match


@ranks(2)
def test_blocking_calls_take_the_fast_path_too() -> None:
    needs_exchange()
    hvd.allreduce(torch.ones(1))  # a life's first takes the slow path and opens the fast one
    before, real, seen = set(table.pending), table.call_plain, []
    table.call_plain = lambda *args: seen.append(real(*args)) or seen[-1]
    try:
        for dtype in REDUCED:
            want = sample(dtype)
            slow_path(lambda want=want: hvd.synchronize(hvd.allreduce_async_(want, op=hvd.Sum)))
            for call in range(20):
                mine = sample(dtype)
                assert hvd.allreduce_(mine, op=hvd.Sum, name=str(dtype)) is mine
                assert torch.equal(mine, want), (dtype, call)
                assert torch.equal(hvd.allreduce(sample(dtype), op=hvd.Sum), want)
        assert len(seen) == 2 * 20 * len(REDUCED) and all(taken is not None for taken in seen)
        assert any(isinstance(taken, torch.Tensor) for taken in seen)  # over without a handle
        with pytest.raises(hvd.Mismatch, match="differs"):
            hvd.allreduce_(torch.ones(2 + hvd.rank()), name="differs")
        with pytest.raises(ValueError):
            hvd.allreduce_(torch.ones(3, 4).t(), op=hvd.Sum)
        assert seen[-1] is None
    finally:
        table.call_plain = real
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]
    assert set(table.pending) <= before


@ranks(2)
def test_tensors_of_an_operation_in_flight_live_though_nobody_holds_them() -> None:
    before = set(table.pending)  # another test in these processes may have dropped a handle
    needs_exchange()
    with counted() as seen:
        started = []
        for index in range(200):
            start = hvd.allreduce_async_ if index % 2 else hvd.allreduce_async
            started.append(start(torch.full((256,), float(index)), op=hvd.Sum, name=f"n{index}"))
        gc.collect()
        noise = [torch.full((256,), -1.0) for _ in range(400)]
        for index, handle in enumerate(started):
            assert hvd.synchronize(handle).tolist() == [2.0 * index] * 256
    assert seen["short"] == 200 and len(noise) == 400 and set(table.pending) <= before
