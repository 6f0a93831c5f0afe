"""The fast path of an allreduce (_core.FastPath), of NumPy's arrays and torch's tensors: what takes it, that it does the
same, and what takes the slow path."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from world import ranks, starts_counted

import horoclone
import horoclone.torch as hvd
from horoclone import ops
from horoclone.arrays.handles import table as table_of_arrays
from horoclone.torch.operations.handles import table
from horoclone.torch.operations.tensors import NUMBER_OF

both = pytest.mark.parametrize("binding", ["numpy", "torch"])


class Binding:
    """One of the two, and what differs between them. made(): values of a dtype."""

    def __init__(self, name: str) -> None:
        if name == "numpy":
            self.hvd, self.table, self.kind = horoclone, table_of_arrays, np.ndarray
            self.dtypes = [np.dtype(one) for one in ops.DTYPES if one != "bfloat16"]
            self.made: Callable[..., Any] = np.asarray
            self.strided: Any = np.ones((3, 4)).T
            return
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            pytest.skip(f"torch {torch.__version__} has no table of DLPack's functions")
        self.hvd, self.table, self.kind = hvd, table, torch.Tensor
        self.dtypes = [dtype for dtype, number in NUMBER_OF.items() if number < ops.FIRST_MOVED]
        self.made, self.strided = torch.tensor, torch.ones(3, 4).t()

    def sample(self, dtype: Any, shape: tuple[int, ...] = (2, 3)) -> Any:
        return self.made((np.arange(6).reshape(shape) % 2 + horoclone.rank()).tolist(), dtype=dtype)

    def now(self, call: str, /, *args: Any, **more: Any) -> Any:
        """What an asynchronous call ends with."""
        return self.hvd.synchronize(getattr(self.hvd, call)(*args, **more))

    def counted(self) -> AbstractContextManager[dict[str, int]]:
        """How many submissions took the fast path, and how many were offered to it."""
        self.now(
            "allreduce_async_", self.made([1.0])
        )  # a life's first takes the slow path and opens the fast one
        return starts_counted(self.table)

    def slowly(self, mine: Any) -> Any:
        real = self.table.start_plain
        self.table.start_plain = lambda *_: None
        try:
            return self.now("allreduce_async_", mine, op=hvd.Sum)
        finally:
            self.table.start_plain = real


@both
@ranks(2)
def test_every_dtype_takes_the_fast_path_and_gives_what_the_slow_one_gives(binding: str) -> None:
    b = Binding(binding)
    before = set(b.table.pending)  # another test in these processes may have dropped a handle
    for dtype in b.dtypes:
        for shape in ((2, 3), (6,), (3, 1, 2)):
            with b.counted() as seen:
                mine, fixed = b.sample(dtype, shape), b.sample(dtype, shape)
                if binding == "numpy":
                    fixed.flags.writeable = False
                handle = b.hvd.allreduce_async_(mine, op=hvd.Sum, name="in place")
                assert (
                    b.hvd.synchronize(handle) is mine and b.hvd.synchronize(handle) is None
                )  # known no more
                other = b.now("allreduce_async", fixed, op=hvd.Sum)
                group = [b.sample(dtype, shape), b.made(2.0)]
                apart = b.now("grouped_allreduce_async", group, op=hvd.Max, name="group")
                kept = b.now("grouped_allreduce_async_", group, op=hvd.Max)
            assert seen == {"short": 4, "offered": 4}, (dtype, seen)
            want = b.slowly(b.sample(dtype, shape))
            assert mine.dtype == want.dtype == dtype and mine.shape == shape
            assert mine.tolist() == other.tolist() == want.tolist(), dtype
            assert apart[0].tolist() == kept[0].tolist() and apart[1].shape == () and apart[1] == 2
    scaled = b.made([4.0] * 3)
    with b.counted() as seen:
        b.now("allreduce_async_", scaled, None, "s", hvd.Average, 0.5, 3.0, priority=7)
    assert seen["short"] == 1 and scaled.tolist() == [6.0] * 3
    assert set(b.table.pending) <= before


@ranks(2)
def test_tensors_that_are_not_plain_take_the_slow_path() -> None:
    b = Binding("torch")
    before, ok, parameter = set(table.pending), torch.ones(4), torch.nn.Parameter(torch.ones(4))
    with b.counted() as seen:
        b.now("allreduce_async_", parameter, op=hvd.Sum)  # as plain as any
        b.now("allreduce_async_", ok[1:3], op=hvd.Sum, process_set=hvd.global_process_set)
    assert seen == {"short": 2, "offered": 2} and parameter.tolist() == [2.0] * 4
    assert ok.tolist() == [1, 2, 2, 1]
    with b.counted() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert b.now("allreduce_async_", torch.ones(0, 3)).shape == (0, 3)
        assert b.now("allreduce_async_", torch.ones(2), average=False).tolist() == [2.0] * 2
        assert b.now("allreduce_async_", torch.ones(2), prescale_factor=2).tolist() == [2.0] * 2
        for wrong in (
            b.strided, torch.ones(1).expand(4), torch.ones(4).to_sparse(), torch.ones(4, device="meta"),
            torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.float8_e4m3fn),
        ):  # fmt: skip
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
def test_arrays_that_are_not_plain_take_the_slow_path() -> None:
    b = Binding("numpy")
    before, fixed = set(b.table.pending), np.ones(3)
    fixed.flags.writeable = False
    with b.counted() as seen:
        assert b.now("allreduce_async_", np.ones((0, 3))).shape == (0, 3)
        assert b.now("allreduce_async_", np.ones(2), prescale_factor=2).tolist() == [2.0] * 2
        for wrong in (
            fixed, b.strided, np.ones(3, ">f4"), np.ones(2, "complex64"), np.ones(2, "uint64"), [1.0]
        ):  # fmt: skip
            with pytest.raises(ValueError):
                horoclone.allreduce_async_(wrong, op=hvd.Sum)
        for arguments in ({"op": 77}, {"name": ""}, {"process_set": hvd.ProcessSet([0])}):
            with pytest.raises(ValueError):
                horoclone.allreduce_async_(np.ones(2), **arguments)
    assert seen == {"short": 0, "offered": 11}
    with b.counted() as seen:  # copied first where they must be, then plain
        assert b.now("allreduce_async", b.strided, op=hvd.Sum).tolist() == [[2.0] * 3] * 4
        assert b.now("allreduce_async", [1, 2], op=hvd.Sum).tolist() == [2, 4]
    assert seen == {"short": 2, "offered": 2} and set(b.table.pending) <= before


@both
@ranks(2)
def test_blocking_calls_take_the_fast_path_too(binding: str) -> None:
    b = Binding(binding)
    b.hvd.allreduce(b.made([1.0]))  # a life's first takes the slow path and opens the fast one
    before, real, seen = set(b.table.pending), b.table.call_plain, []
    b.table.call_plain = lambda *args: seen.append(real(*args)) or seen[-1]
    try:
        for dtype in b.dtypes:
            want = b.slowly(b.sample(dtype)).tolist()
            for call in range(20):
                mine = b.sample(dtype)
                assert b.hvd.allreduce_(mine, op=hvd.Sum, name=str(dtype)) is mine
                assert mine.tolist() == want, (dtype, call)
                assert b.hvd.allreduce(b.sample(dtype), op=hvd.Sum).tolist() == want
        assert len(seen) == 2 * 20 * len(b.dtypes) and all(taken is not None for taken in seen)
        assert any(isinstance(taken, b.kind) for taken in seen)  # over without a handle
        with pytest.raises(hvd.Mismatch, match="differs"):
            b.hvd.allreduce_(b.made([1.0] * (2 + hvd.rank())), name="differs")
        with pytest.raises(ValueError):
            b.hvd.allreduce_(b.strided, op=hvd.Sum)
        assert seen[-1] is None
    finally:
        b.table.call_plain = real
    assert b.hvd.allreduce(b.made([1.0, 1.0]), op=hvd.Sum).tolist() == [2, 2]
    assert set(b.table.pending) <= before


@both
@ranks(2)
def test_what_is_in_flight_lives_though_nobody_holds_it_and_errors_are_told(binding: str) -> None:
    b = Binding(binding)
    before, two = set(b.table.pending), b.made([1.0, 1.0])
    with b.counted() as seen:
        if hvd.rank() == 0:
            first = b.hvd.allreduce_async_(two, name="twice")
            with pytest.raises(ValueError, match="already pending on rank 0 .Duplicate tensor name"):
                b.hvd.allreduce_async_(b.made([1.0, 1.0]), name="twice")
        b.hvd.barrier()
        b.hvd.synchronize(first if hvd.rank() == 0 else b.hvd.allreduce_async_(two, name="twice"))
        with pytest.raises(hvd.Mismatch, match="differs"):
            b.now("allreduce_async_", b.made([1.0] * (2 + hvd.rank())), name="differs")
        started = []
        for index in range(200):
            start = b.hvd.allreduce_async_ if index % 2 else b.hvd.allreduce_async
            started.append(start(b.made([float(index)] * 256), op=hvd.Sum, name=f"n{index}"))
        gc.collect()
        noise = [b.made([-1.0] * 256) for _ in range(400)]
        for index, handle in enumerate(started):
            assert b.hvd.synchronize(handle).tolist() == [2.0 * index] * 256
    assert seen["short"] == 202 and len(noise) == 400 and set(b.table.pending) <= before


@ranks(2, init=False)
def test_a_handle_of_one_life_is_never_taken_for_one_of_the_next() -> None:
    b, left = Binding("numpy"), []
    for _ in range(2):
        hvd.init()
        with b.counted() as seen:
            assert b.now("allreduce_async_", np.ones(2), op=hvd.Sum).tolist() == [2.0] * 2
            left.append(horoclone.allreduce_async_(np.ones(2), op=hvd.Sum, name="left"))
        assert seen["short"] == 2
        hvd.shutdown()
    assert left[0] != left[1]
    hvd.init()
    handle = horoclone.allreduce_async_(np.ones(2), op=hvd.Sum, name="left")
    for old in left:  # of a runtime that has ended: done before that, or broken off by it
        try:
            assert horoclone.synchronize(old).tolist() == [2.0] * 2
        except hvd.HorovodInternalError as error:
            assert "shut down" in str(error)
        assert horoclone.synchronize(old) is None
    assert horoclone.synchronize(handle).tolist() == [2.0] * 2
