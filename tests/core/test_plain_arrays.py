"""The fast path of an allreduce of NumPy's arrays (_core.FastPath, the buffer protocol): what takes it, and the rest."""

from __future__ import annotations

import gc
import inspect
import pickle
from contextlib import AbstractContextManager

import numpy as np
import pytest
from world import ranks, starts_counted

import horoclone as hvd
from horoclone import arrays
from horoclone.arrays.handles import table

SHORT = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64")


def counted() -> AbstractContextManager[dict[str, int]]:
    """How many submissions took the fast path, and how many were offered to it."""
    # A life's first takes the slow path and opens the fast one
    hvd.synchronize(hvd.allreduce_async_(np.ones(1)))
    return starts_counted(table)


def sample(dtype: str) -> np.ndarray:
    return (np.arange(6).reshape(2, 3) % 2 + hvd.rank()).astype(dtype)


@ranks(2)
def test_every_dtype_takes_the_fast_path_and_gives_what_a_blocking_call_gives():
    before = set(table.pending)  # another test in these processes may have dropped a handle
    for dtype in SHORT:
        with counted() as seen:
            mine = sample(dtype)
            handle = hvd.allreduce_async_(mine, op=hvd.Sum, name="in place")
            assert hvd.synchronize(handle) is mine and hvd.poll(handle) and hvd.synchronize(handle) is None
            fixed = sample(dtype)
            fixed.flags.writeable = False
            other = hvd.synchronize(hvd.allreduce_async(fixed, op=hvd.Sum))
            pair = [sample(dtype), np.float32(2.0).reshape(())]
            group = hvd.synchronize(hvd.grouped_allreduce_async(pair, op=hvd.Max, name="group"))
            kept = hvd.synchronize(hvd.grouped_allreduce_async_([sample(dtype), np.ones(1)], op=hvd.Max))
        assert seen == {"short": 4, "offered": 4}, (dtype, seen)
        want = hvd.allreduce(sample(dtype), op=hvd.Sum)
        assert mine.dtype == want.dtype and np.array_equal(mine, want) and np.array_equal(other, want)
        assert np.array_equal(group[0], kept[0]) and group[1].shape == () and group[1] == 2
    scaled = np.full(3, 4.0)
    with counted() as seen:
        hvd.synchronize(hvd.allreduce_async_(scaled, None, "s", hvd.Average, 0.5, 3.0, priority=7))
    assert seen["short"] == 1 and scaled.tolist() == [6.0] * 3
    assert set(table.pending) <= before


@ranks(2)
def test_what_is_not_plain_takes_the_slow_path():
    before = set(table.pending)  # another test in these processes may have dropped a handle
    fixed = np.ones(3)
    fixed.flags.writeable = False
    with counted() as seen:
        assert hvd.synchronize(hvd.allreduce_async_(np.ones((0, 3)))).shape == (0, 3)
        assert hvd.synchronize(hvd.allreduce_async_(np.ones(2), prescale_factor=2)).tolist() == [2.0] * 2
        for wrong in (
            fixed, np.ones((3, 4)).T, np.ones(3, ">f4"), np.ones(2, "complex64"), np.ones(2, "uint64"), [1.0]
        ):  # fmt: skip
            with pytest.raises(ValueError):
                hvd.allreduce_async_(wrong, op=hvd.Sum)
        for arguments in ({"op": 77}, {"name": ""}, {"process_set": hvd.ProcessSet([0])}):
            with pytest.raises(ValueError):
                hvd.allreduce_async_(np.ones(2), **arguments)
    assert seen == {"short": 0, "offered": 11}
    with counted() as seen:  # copied first where they must be, then plain
        assert hvd.synchronize(hvd.allreduce_async(np.ones((3, 4)).T, op=hvd.Sum)).tolist() == [[2.0] * 3] * 4
        assert hvd.synchronize(hvd.allreduce_async([1, 2], op=hvd.Sum)).tolist() == [2, 4]
    assert seen == {"short": 2, "offered": 2}
    assert set(table.pending) <= before


@ranks(2)
def test_blocking_calls_take_the_fast_path_too():
    hvd.allreduce(np.ones(1))  # a life's first takes the slow path and opens the fast one
    before, real, seen = set(table.pending), table.call_plain, []
    table.call_plain = lambda *args: seen.append(real(*args)) or seen[-1]
    try:
        for dtype in SHORT:
            for call in range(20):
                want = sum((np.arange(6).reshape(2, 3) % 2 + rank for rank in (0, 1)), np.zeros((2, 3)))
                mine = sample(dtype)
                assert hvd.allreduce_(mine, op=hvd.Sum, name=dtype) is mine
                assert np.array_equal(mine, want.astype(dtype)), (dtype, call)
                assert np.array_equal(hvd.allreduce(sample(dtype), op=hvd.Sum), want.astype(dtype))
        assert len(seen) == 2 * 20 * len(SHORT) and all(taken is not None for taken in seen)
        assert any(isinstance(taken, np.ndarray) for taken in seen)  # over without a handle
        with pytest.raises(hvd.Mismatch, match="differs"):
            hvd.allreduce_(np.ones(2 + hvd.rank()), name="differs")
        for wrong in (np.ones((3, 4)).T, np.ones(2, "complex64")):
            with pytest.raises(ValueError):
                hvd.allreduce_(wrong, op=hvd.Sum)
        assert seen[-2:] == [None, None]
    finally:
        table.call_plain = real
    assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [2, 2]
    assert set(table.pending) <= before


@ranks(2)
def test_errors_and_arrays_in_flight():
    before = set(table.pending)  # another test in these processes may have dropped a handle
    with counted() as seen:
        if hvd.rank() == 0:
            first = hvd.allreduce_async_(np.ones(2), name="twice")
            with pytest.raises(ValueError, match="already pending on rank 0 .Duplicate tensor name"):
                hvd.allreduce_async_(np.ones(2), name="twice")
            hvd.barrier()
        else:
            hvd.barrier()
            first = hvd.allreduce_async_(np.ones(2), name="twice")
        hvd.synchronize(first)
        handle = hvd.allreduce_async_(np.ones(2 + hvd.rank()), name="differs")
        with pytest.raises(hvd.Mismatch, match="differs"):
            hvd.synchronize(handle)
        started = []
        for index in range(200):
            start = hvd.allreduce_async_ if index % 2 else hvd.allreduce_async
            started.append(start(np.full(256, float(index)), op=hvd.Sum, name=f"n{index}"))
        gc.collect()
        noise = [np.full(256, -1.0) for _ in range(400)]
        for index, handle in enumerate(started):
            assert hvd.synchronize(handle).tolist() == [2.0 * index] * 256
    assert seen["short"] == 202 and len(noise) == 400 and set(table.pending) <= before


@ranks(2, init=False)
def test_a_handle_of_one_life_is_never_taken_for_one_of_the_next():
    left = []
    for _ in range(2):
        hvd.init()
        with counted() as seen:
            assert hvd.synchronize(hvd.allreduce_async_(np.ones(2), op=hvd.Sum)).tolist() == [2.0] * 2
            left.append(hvd.allreduce_async_(np.ones(2), op=hvd.Sum, name="left"))
        assert seen["short"] == 2
        hvd.shutdown()
    assert left[0] != left[1]
    hvd.init()
    handle = hvd.allreduce_async_(np.ones(2), op=hvd.Sum, name="left")
    for old in left:  # of a runtime that has ended: done before that, or broken off by it
        try:
            assert hvd.synchronize(old).tolist() == [2.0] * 2
        except hvd.HorovodInternalError as error:
            assert "shut down" in str(error)
        assert hvd.synchronize(old) is None
    assert hvd.synchronize(handle).tolist() == [2.0] * 2


def test_every_function_has_its_own_name_and_text_and_can_be_pickled():
    for name in arrays.__all__:
        function = getattr(hvd, name)
        assert function is getattr(arrays, name) and function.__name__ == name and function.__doc__, name
        again = pickle.loads(pickle.dumps(function))
        assert again.__name__ == name and inspect.signature(again) == inspect.signature(function), name
    assert {"reduce_", "reduce_async_", "grouped_allreduce_", "grouped_allreduce_async_"} <= set(
        arrays.__all__
    )
