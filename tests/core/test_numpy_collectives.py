"""Collectives on NumPy arrays against NumPy itself: every dtype and reduction, odd shapes, in place, asynchronous."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from world import load, ranks, until

import horoclone as hvd
from horoclone import ops
from horoclone.arrays import host_memory as memory

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {name: BFLOAT16 if name == "bfloat16" else np.dtype(name) for name in ops.DTYPES}
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (1025,), (3, 257, 5)]


def data(dtype, shape, rank, low=0, high=5):
    """Small whole numbers, different on each rank, exact in every dtype and in every order of summing."""
    random = np.random.default_rng([rank, len(shape), *shape])
    return np.asarray(random.integers(low, high, shape)).astype(DTYPES[dtype])


def everybody(dtype, shape, **bounds):
    return np.stack([data(dtype, shape, rank, **bounds).astype(np.float64) for rank in range(hvd.size())])


def same(result, expected, dtype, shape):
    assert isinstance(result, np.ndarray)
    assert result.dtype == DTYPES[dtype] and result.shape == shape
    np.testing.assert_array_equal(result.astype(np.float64), expected)


@ranks(3)
def test_allreduce_equals_numpy_for_every_dtype_shape_and_reduction():
    for dtype in (*INTEGERS, *FLOATS):
        for shape in SHAPES:
            mine, stacked = data(dtype, shape, hvd.rank()), everybody(dtype, shape)
            before = mine.copy()
            for op, expected in (
                (hvd.Sum, stacked.sum(0)),
                (hvd.Min, stacked.min(0)),
                (hvd.Max, stacked.max(0)),
                (hvd.Product, stacked.prod(0)),
            ):
                same(hvd.allreduce(mine, op=op), expected, dtype, shape)
            np.testing.assert_array_equal(mine, before, "the input is not touched")
            if dtype in INTEGERS:
                same(hvd.allreduce(mine), np.trunc(stacked.sum(0) / hvd.size()), dtype, shape)
            else:
                tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-15}[dtype]
                result = hvd.allreduce(mine, op=hvd.Average).astype(np.float64)
                np.testing.assert_allclose(result, stacked.mean(0), rtol=tolerance)


@ranks(3)
def test_bool_reduces_with_or_and_and():
    mine = np.array([True, False, hvd.rank() == 0, hvd.rank() == 1])
    both = [True, False, True, True]
    for op, expected in ((hvd.Sum, both), (hvd.Max, both), (hvd.Product, [True, False, False, False]),
                         (hvd.Min, [True, False, False, False])):  # fmt: skip
        result = hvd.allreduce(mine, op=op)
        assert result.dtype == np.bool_ and result.tolist() == expected, op
    with pytest.raises(ValueError, match=r"(?i)average"):
        hvd.allreduce(mine)
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == both, "a refused call leaves the runtime usable"
    bits = {hvd.And: 0, hvd.Or: 2 ** hvd.size() - 1, hvd.Xor: 2 ** hvd.size() - 1}
    assert {op: int(hvd.allreduce(np.int32(1 << hvd.rank()), op=op)) for op in bits} == bits


@ranks(3)
def test_scale_factors_multiply_before_and_after():
    mine = np.full(5, hvd.rank() + 1, np.float32)
    total = sum(range(1, hvd.size() + 1))
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    np.testing.assert_array_equal(result, np.full(5, total, np.float32))
    result = hvd.allreduce(mine, prescale_factor=hvd.size())
    np.testing.assert_allclose(result, np.full(5, total), rtol=1e-6)


@ranks(2)
def test_lists_scalars_strided_and_foreign_byte_order_are_converted():
    assert hvd.allreduce([1, 2, 3], op=hvd.Sum).tolist() == [2, 4, 6]
    scalar = hvd.allreduce(1.5, op=hvd.Sum)
    assert scalar.shape == () and float(scalar) == 3.0
    base = np.arange(24.0).reshape(4, 6)
    for view in (base[:, ::2], base.T, base[::-1], np.asfortranarray(base)):
        np.testing.assert_array_equal(hvd.allreduce(view, op=hvd.Sum), 2 * view)
    big_endian = np.arange(5).astype(">i4")
    result = hvd.allreduce(big_endian, op=hvd.Sum)
    assert result.tolist() == [0, 2, 4, 6, 8] and result.dtype.isnative
    read_only = np.frombuffer(b"\x01\x02", np.uint8)
    assert hvd.allreduce(read_only, op=hvd.Sum).tolist() == [2, 4]


@ranks(2)
def test_in_place_operations_write_into_the_array_and_refuse_what_they_cannot():
    mine = np.full(9, hvd.rank() + 1.0)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine and (mine == 3).all()
    mine = np.full(9, float(hvd.rank()))
    assert hvd.broadcast_(mine, 1) is mine and (mine == 1).all()
    pair = [np.full(3, hvd.rank() + 1), np.full((), hvd.rank() + 1.0)]
    result = hvd.grouped_allreduce_(pair, op=hvd.Sum)
    assert result[0] is pair[0] and result[1] is pair[1] and pair[0].tolist() == [3, 3, 3] and pair[1] == 3
    for wrong, text in (
        (np.zeros((4, 4))[:, 1], r"Tensor is required to be contiguous\."),
        (np.zeros(3, ">f4"), "byte order, not >f4"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "its mask would be lost"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.allreduce_(wrong)
    with pytest.raises(ValueError, match="read-only"):
        hvd.broadcast_(np.frombuffer(b"1234", np.uint8), 0)
    with pytest.raises(ValueError, match="needs a NumPy array"):
        hvd.allreduce_([1, 2])


@ranks(2)
def test_a_mask_is_not_lost_in_silence():
    hvd.allreduce(np.ones(2))
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    for call in (
        hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda x: hvd.broadcast(x, 0),
        lambda x: hvd.grouped_allreduce([x]), lambda x: hvd.gather(x, 0), lambda x: hvd.allreduce_async(x, name="a"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"array\.filled\(value\)"):
            call(masked)
    kept = hvd.broadcast_object(masked if hvd.rank() == 0 else None, 0)
    assert kept.mask.tolist() == [True, False]


@ranks(2)
def test_unknown_dtypes_are_refused_on_the_spot():
    for wrong in (np.zeros(2, np.complex64), np.zeros(2, np.uint32), np.array(["a"]), np.array([None])):
        with pytest.raises(ValueError, match=r"Tensor type .* is not supported"):
            hvd.allreduce(wrong)
    with pytest.raises(ValueError, match="op="):
        hvd.allreduce(np.zeros(1), op=17)


@ranks(3)
def test_broadcast_from_every_root():
    for dtype in DTYPES:
        for root in range(hvd.size()):
            for shape in SHAPES:
                mine = data(dtype, shape, hvd.rank(), high=2)
                expected = data(dtype, shape, root, high=2).astype(np.float64)
                same(hvd.broadcast(mine, root), expected, dtype, shape)


@ranks(3)
def test_allgather_of_unequal_first_dimensions():
    for dtype in DTYPES:
        for rest in ((), (3,), (2, 5)):
            pieces = [data(dtype, ((rank * 2) % 3, *rest), rank, high=2) for rank in range(hvd.size())]
            result = hvd.allgather(pieces[hvd.rank()])
            expected = np.concatenate(pieces)
            same(result, expected.astype(np.float64), dtype, expected.shape)
            if result.size:
                result[...] = 0  # the result is the caller's
        empty = hvd.allgather(np.empty((0, 4), DTYPES[dtype]))
        assert empty.shape == (0, 4) and empty.dtype == DTYPES[dtype]


@ranks(2)
def test_a_result_outlives_its_handle_and_the_runtime():
    kept = hvd.allgather(np.arange(1000, dtype=np.int64) + hvd.rank())
    expected = kept.copy()
    for _ in range(20):
        hvd.allgather(np.full(1000, -1, np.int64))
    hvd.shutdown()
    gc.collect()
    np.testing.assert_array_equal(kept, expected)


@ranks(3)
def test_groups_are_one_operation():
    arrays = [np.full(shape, hvd.rank() + index, np.float32) for index, shape in enumerate(SHAPES)]
    total = sum(range(hvd.size()))
    for index, result in enumerate(hvd.grouped_allreduce(arrays, op=hvd.Sum)):
        np.testing.assert_array_equal(result, np.full(SHAPES[index], total + index * hvd.size(), np.float32))
    rows = [np.full((hvd.rank() + 1, 2), index) for index in range(3)]
    for index, result in enumerate(hvd.grouped_allgather(rows)):
        assert result.shape == (sum(range(1, hvd.size() + 1)), 2) and (result == index).all()
    mixed = hvd.grouped_allreduce([np.ones(2, np.float16), np.ones(3, np.int64)], op=hvd.Sum)
    assert [one.dtype.name for one in mixed] == ["float16", "int64"] and mixed[1].tolist() == [hvd.size()] * 3
    assert hvd.grouped_allreduce([]) == [] and hvd.grouped_allgather([]) == []
    twice = np.full(200_000, hvd.rank() + 1.0)  # more than is reduced at once
    hvd.grouped_allreduce_([twice, twice[:9], twice], op=hvd.Sum)
    assert set(twice.tolist()) == {sum(range(1, hvd.size() + 1))}, "what is in a group twice is reduced once"
    shifted = np.full(200_000, hvd.rank() + 1.0)
    hvd.grouped_allreduce_([shifted[50_000:], shifted[:150_000]], op=hvd.Sum)
    assert set(shifted.tolist()) == {sum(range(1, hvd.size() + 1))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_addresses_and_numbers_of_what_numpy_has(dtype):
    shared = np.zeros((3, 4), DTYPES[dtype])
    frozen = shared.copy()
    frozen.flags.writeable = False
    for array in (shared, shared[1:], shared[1, 2:3], shared[:, 1], shared[0, 0, ...], shared[:0], frozen):
        assert memory.address(array) == array.ctypes.data
        assert memory.dtype_of(array) == ops.DTYPES[dtype]
    if dtype == "float32":
        with pytest.raises(ValueError, match="datetime64"):
            memory.dtype_of(np.zeros(2, "M8[s]"))


@ranks(2)
def test_poll_turns_true_without_anybody_waiting():
    handle = hvd.broadcast_async(np.full(4, hvd.rank()), 1)
    until(lambda: hvd.poll(handle), 20)
    assert hvd.synchronize(handle).tolist() == [1] * 4
    gathered = hvd.allgather_async([hvd.rank()])
    grouped = hvd.grouped_allreduce_async([np.ones(1), np.ones(2)], op=hvd.Sum)
    inside = np.ones(3)
    placed = hvd.allreduce_async_(inside, op=hvd.Sum)
    assert hvd.synchronize(placed) is inside and inside.tolist() == [2, 2, 2]
    assert [one.tolist() for one in hvd.synchronize(grouped)] == [[2], [2, 2]]
    assert hvd.synchronize(gathered).tolist() == [0, 1]


@ranks(1)
def test_a_process_alone_computes_what_it_has():
    mine = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(hvd.allreduce(mine), mine)
    np.testing.assert_array_equal(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2), 2 * mine)
    np.testing.assert_array_equal(hvd.allgather(mine), mine)
    np.testing.assert_array_equal(hvd.broadcast(mine, 0), mine)
    hvd.barrier()
    assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size()) == (0, 1, 1, 1)


@ranks(3)
def test_alltoall_with_and_without_splits():
    size, rank = hvd.size(), hvd.rank()
    equal = hvd.alltoall(np.arange(2 * size) + 100 * rank)
    expected = [100 * other + 2 * rank + step for other in range(size) for step in range(2)]
    assert equal.tolist() == expected
    splits = [other + rank for other in range(size)]
    rows = np.repeat(np.arange(size, dtype=np.float32), splits)[:, None] * np.ones((1, 3), np.float32)
    received, counts = hvd.alltoall(rows, splits)
    assert counts.dtype == np.int32 and counts.tolist() == splits
    assert received.shape == (sum(splits), 3) and (received == rank).all()
    for wrong in ([[1, 1]], [0.5, 0.5]):
        with pytest.raises(ValueError, match="splits is a 1-d array of integers"):
            hvd.alltoall(rows, wrong)
    with pytest.raises(ValueError, match=r"(?i)split"):
        hvd.alltoall(rows, [1] * (size + 1))
    many = (1 << 31) + 5  # more rows than an int32 says, and no memory
    _, counts = hvd.alltoall(np.empty((many, 0), np.float32), [many] + [0] * (size - 1))
    assert counts.tolist() == ([many] * size if rank == 0 else [0] * size)
    assert hvd.alltoall(np.arange(size)).shape == (size,)


@ranks(3)
def test_reducescatter_gives_the_first_ranks_one_row_more():
    size, rank = hvd.size(), hvd.rank()
    rows = 2 * size + 1
    mine = np.arange(rows * 2, dtype=np.float64).reshape(rows, 2) * (rank + 1)
    total = sum(range(1, size + 1)) * np.arange(rows * 2, dtype=np.float64).reshape(rows, 2)
    own = np.array_split(total, size)[rank]
    np.testing.assert_array_equal(hvd.reducescatter(mine, op=hvd.Sum), own)
    np.testing.assert_allclose(hvd.reducescatter(mine), own / size)
    for result in hvd.grouped_reducescatter([mine, mine], op=hvd.Sum):
        np.testing.assert_array_equal(result, own)
    with pytest.raises(ValueError, match="0-d"):
        hvd.reducescatter(1.0)


@ranks(3, init=False)
def test_process_sets_reduce_among_themselves():
    ends, middle = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
    hvd.init(process_sets=[ends, middle])
    rank = hvd.rank()
    assert hvd.global_process_set.ranks == [0, 1, 2] and hvd.global_process_set.size() == 3
    assert (ends.size(), middle.size()) == (2, 1) and ends.process_set_id != middle.process_set_id
    assert ends.included() is (rank != 1) and middle.included() is (rank == 1)
    mine = ends if rank != 1 else middle
    assert mine.rank() == (rank // 2 if rank != 1 else 0)
    assert hvd.allreduce(np.array([rank]), op=hvd.Sum, process_set=mine).tolist() == [2 if rank != 1 else 1]
    assert hvd.allgather([rank], process_set=mine).tolist() == mine.ranks
    assert hvd.broadcast_object(rank, root_rank=mine.ranks[-1], process_set=mine) == mine.ranks[-1]
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    hvd.shutdown()
    assert ends.process_set_id is None and middle.process_set_id is None


@ranks(2, init=False)
def test_wrong_process_sets_are_named_by_their_index():
    for wrong, text in (
        ([hvd.ProcessSet([0]), [1]], r"process_sets\[1\] is \[1\]"),
        ("static", "only word allowed"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.init(process_sets=wrong)
        assert not hvd.is_initialized()


@ranks(2, init=False)
def test_the_world_is_up_after_an_init_that_was_refused_for_its_process_sets():
    """As in Horovod, where scripts ask for size() after catching the ValueError."""
    one = hvd.ProcessSet([0])
    for wrong, text in (
        ([one, hvd.ProcessSet([0])], r"process_sets\[1\] has the same ranks as process_sets\[0\]"),
        ([one, one], r"process_sets\[1\] has the same ranks as process_sets\[0\]"),
        ([one, hvd.ProcessSet([1, 2])], r"process_sets\[1\]: .*outside the world of 2"),
        ([hvd.ProcessSet([0, 1])], r"process_sets\[0\]: .*exists already"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.init(process_sets=wrong)
        assert hvd.is_initialized() and hvd.size() == 2 and hvd.rank() in (0, 1)
        hvd.init()  # up already: nothing happens
        assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
        assert [entry.process_set_id for entry in wrong[1:]] == ([1] if wrong[-1] is one else [None])[
            : len(wrong) - 1
        ]
        if one in wrong:  # what was registered before the refusal serves
            assert one.process_set_id == 1 and one.included() is (hvd.rank() == 0)
        hvd.shutdown()
        assert not hvd.is_initialized() and one.process_set_id is None
    hvd.init(process_sets=[one])
    assert one.size() == 1


@ranks(2, init=False)
def test_the_world_is_up_after_the_ranks_passed_different_process_sets():
    mine = hvd.ProcessSet([int(os.environ["HOROCLONE_RANK"])])
    with pytest.raises(
        hvd.Mismatch, match=r"process_sets\[0\]: .*rank 0 passed ranks \[0\], rank 1 passed ranks \[1\]"
    ):
        hvd.init(process_sets=[mine])
    assert hvd.size() == 2 and hvd.allreduce(np.ones(1), op=hvd.Sum).tolist() == [2]


@ranks(2)
def test_arrays_live_until_their_operation_has_been_waited_for():
    """Also those that the caller has forgotten: the core reads and writes their memory."""
    mine = np.full(100_000, float(hvd.rank() + 1))
    alive = weakref.ref(mine)
    handle = hvd.allreduce_async_(mine, name="kept", op=hvd.Sum)
    del mine
    gc.collect()
    assert alive() is not None
    assert (hvd.synchronize(handle) == 3.0).all()


shared = load(Path(__file__).parents[1] / "argument_types.py", "argument_types")


@ranks(2)
def test_operations_on_arrays() -> None:
    def array() -> dict[str, Any]:
        return {"array": np.ones(4, np.float32)}

    def arrays() -> dict[str, Any]:
        return {"arrays": [np.ones(4, np.float32), np.ones(2)]}

    def rooted() -> dict[str, Any]:
        return {**array(), "root_rank": hvd.rank()}

    given = {
        "": dict, "allreduce": array, "allgather": array, "alltoall": array, "reducescatter": array, "grouped": arrays,
        "broadcast": rooted, "reduce": rooted, "reducescatter_": array, "gather": rooted, "scatter": rooted, "recv": array,
        "irecv": array, "send": lambda: {**array(), "dst": 0}, "isend": lambda: {**array(), "dst": 0},
        "broadcast_object": lambda: {"obj": 1, "root_rank": hvd.rank()}, "allgather_object": lambda: {"obj": 1},
    }  # fmt: skip
    shared.check(hvd, shared.ARRAYS, given)
    for call in (hvd.allreduce_, hvd.broadcast_):
        with pytest.raises(ValueError, match=r"not \[1.0\] \(a list\): np.asarray"):
            call([1.0], **({"root_rank": 0} if call is hvd.broadcast_ else {}))
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2.0] * 3, "the ranks have counted alike"
