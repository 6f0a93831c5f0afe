"""reduce, gather and scatter on NumPy arrays: every dtype, root and form, process sets, errors that leave it usable."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from world import ranks

import horoclone as hvd
from horoclone import ops

DTYPES = [np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name) for name in ops.DTYPES]


def data(dtype, shape, rank):
    random = np.random.default_rng([rank, *shape])
    return random.integers(0, 2 if dtype == np.bool_ else 5, shape).astype(dtype)


def same(result, expected, dtype):
    assert isinstance(result, np.ndarray) and result.dtype == dtype and result.shape == expected.shape
    np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64))


@ranks(1, 3)
def test_reduce_gives_the_root_the_reduction_and_the_others_none():
    for dtype in DTYPES:
        for shape in [(), (0,), (7,), (3, 257, 5)]:
            wide = np.stack([data(dtype, shape, rank).astype(np.float64) for rank in range(hvd.size())])
            cases = [(hvd.Min, wide.min(0)), (hvd.Max, wide.max(0)), (hvd.Product, wide.prod(0))]
            cases.append((hvd.Sum, wide.max(0) if dtype == np.bool_ else wide.sum(0)))
            if dtype == np.float64:
                cases.append((hvd.Average, wide.sum(0) * (1 / hvd.size())))
            for root, (op, expected) in enumerate(cases):
                root %= hvd.size()
                mine = data(dtype, shape, hvd.rank())
                result = hvd.reduce(mine, root, op=op)
                later = hvd.synchronize(hvd.reduce_async(mine, root, op=op))
                place, other = mine.copy(), mine.copy()
                assert hvd.reduce_(place, root, op=op) is place
                assert hvd.synchronize(hvd.reduce_async_(other, root, op=op)) is other
                if hvd.rank() == root:
                    same(result, np.asarray(expected), dtype)
                    for more in (later, place, other):
                        same(more, np.asarray(expected), dtype)
                else:
                    assert result is None and later is None
                    assert place.tobytes() == other.tobytes() == mine.tobytes()
                same(mine, data(dtype, shape, hvd.rank()), dtype)
    result = hvd.reduce(np.ones(4), 0, op=hvd.Sum, name="scaled", prescale_factor=3.0, postscale_factor=0.5)
    assert result is None if hvd.rank() else result.tolist() == [1.5 * hvd.size()] * 4


@ranks(3)
def test_many_rows_are_gathered_and_scattered_by_handles():
    rank, parts = hvd.rank(), [np.full((900 + 50 * other, 6), other, np.float32) for other in range(3)]
    gathered = hvd.synchronize(hvd.gather_async(parts[rank], 1))
    assert (gathered is None) == (rank != 1)
    whole = np.concatenate(parts)
    if rank == 1:
        same(gathered, whole, np.float32)
    splits = [len(part) for part in parts]
    mine = hvd.synchronize(hvd.scatter_async(whole if rank == 1 else None, 1, splits if rank == 1 else None))
    same(mine, parts[rank], np.float32)


@ranks(2)
def test_what_numpy_cannot_pass_is_refused_and_the_runtime_goes_on():
    """The rest is the core's: csrc/tests/engine/test_rooted.cc, and tests/torch/test_rooted.py for its texts."""
    one = np.ones(4)
    with pytest.raises(ValueError, match="needs a NumPy array"):
        hvd.reduce_([1.0, 2.0], 0)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="must pass the array"):
            hvd.scatter(None, 0)
        with pytest.raises(ValueError, match="at least one dimension"):
            hvd.scatter(np.float64(1), 0)
    assert hvd.scatter(one, 0).tolist() == [1, 1]
