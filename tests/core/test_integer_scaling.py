"""Integers with prescale and postscale factors: results that the real Horovod gave.

csrc/tests/arithmetic/test_integer_scaling.cc compares every dtype, reduction and path with a model.
"""

from __future__ import annotations

import numpy as np
import pytest
from world import ranks

import horoclone as hvd


def tensor(dtype: str, count: int, rank: int, k: int = 0) -> np.ndarray:
    """Whole numbers from -4 to 4, of unsigned types from 0 to 8."""
    values = (3 * np.arange(count) + 5 * rank + 7 * k) % 9
    return (values if dtype.startswith("u") else values - 4).astype(dtype)


# (operation, dtype, prescale, postscale): rank 0's result with 2 ranks, with 3 ranks. Recorded with Horovod.
RECORDED = {
    ("Sum", "uint8", -1.5, 1.0): ([249, 240, 244, 249, 240, 244, 249], [248, 234, 234, 248, 234, 234, 248]),
    ("Sum", "uint8", 1.0, -0.3): ([255, 253, 254, 255, 253, 254, 255], [255, 252, 252, 255, 252, 252, 255]),
    ("Sum", "uint8", 0.3, 1.0): ([1, 2, 1, 1, 2, 1, 1], [1, 3, 3, 1, 3, 3, 1]),
    ("Sum", "uint8", 0.5, 3.0): ([6, 15, 12, 6, 15, 12, 6], [6, 21, 21, 6, 21, 21, 6]),
    ("Sum", "int8", 0.5, 1.0): ([-2, 2, 0, -2, 2, 0, -2], [-3, 2, 1, -3, 2, 1, -3]),
    ("Sum", "int32", 0.5, 1.0): ([-2, 2, 0, -2, 2, 0, -2], [-3, 2, 1, -3, 2, 1, -3]),
    ("Sum", "int32", -1.5, 1.0): ([5, -5, 0, 5, -5, 0, 5], [9, -5, -4, 9, -5, -4, 9]),
    ("Sum", "int64", 0.5, 3.0): ([-6, 6, 0, -6, 6, 0, -6], [-9, 6, 3, -9, 6, 3, -9]),
    ("Sum", "int64", 0.3, 1.0): ([-1, 1, 0, -1, 1, 0, -1], [-1, 1, 0, -1, 1, 0, -1]),
    ("Average", "int32", 0.5, 1.0): ([-1, 1, 0, -1, 1, 0, -1], [-1, 0, 0, -1, 0, 0, -1]),
    ("Average", "int32", 1.0, 3.0): ([-4, 4, 0, -4, 4, 0, -4], [-6, 3, 3, -6, 3, 3, -6]),
    ("Average", "int64", 1.0, 1.0): ([-1, 1, 0, -1, 1, 0, -1], [-2, 1, 1, -2, 1, 1, -2]),
    ("Min", "int32", 0.5, 1.0): ([-2, 0, -1, -2, 0, -1, -2], [-2, 0, -1, -2, 0, -1, -2]),
    ("Product", "int32", 0.5, 1.0): ([0, 0, -1, 0, 0, -1, 0], [0, 0, -1, 0, 0, -1, 0]),
    ("Product", "int32", 2.0, 0.5): ([-8, -8, -8, -8, -8, -8, -8], [48, 0, -48, 48, 0, -48, 48]),
}


@ranks(2, 3)
def test_integers_with_factors_have_the_numbers_of_horovod():
    for (op, dtype, pre, post), recorded in RECORDED.items():
        factors = {"op": getattr(hvd, op), "prescale_factor": pre, "postscale_factor": post}
        mine, expected = tensor(dtype, 7, hvd.rank()), recorded[hvd.size() - 2]
        found = hvd.allreduce(mine, **factors)
        assert found.dtype == mine.dtype and found.tolist() == expected, (op, dtype, pre, post)
        name = f"{op}.{dtype}.{pre}.{post}"
        assert hvd.allreduce(mine, name=name, **factors).tolist() == expected
        reduced = hvd.reduce(mine, 0, **factors)
        assert hvd.rank() != 0 or reduced.tolist() == expected
        assert hvd.allreduce_(mine, **factors).tolist() == expected


@ranks(2, 3)
def test_grouped_and_scattered_results_are_horovods_too():
    factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
    me = hvd.rank()
    found = hvd.grouped_allreduce([tensor("int32", 7, me), tensor("int32", 4, me, k=1)], **factors)
    expected = [[[-6, 6, 0, -6, 6, 0, -6], [3, 0, -6, 3]], [[-9, 6, 3, -9, 6, 3, -9], [9, -3, -6, 9]]]
    assert [one.tolist() for one in found] == expected[hvd.size() - 2]
    rows = {2: [[-6, 6, 0], [-6, 6]], 3: [[-9, 6], [3, -9], [6]]}[hvd.size()][me]
    assert hvd.reducescatter(tensor("int32", 5, me), **factors).tolist() == rows
    averages = {2: [[-3, 3, 0], [-3, 3]], 3: [[-3, 2], [1, -3], [2]]}[hvd.size()][me]
    average = hvd.reducescatter(tensor("int32", 5, me), **{**factors, "op": hvd.Average})
    assert average.tolist() == averages


@ranks(2)
def test_what_a_dtype_cannot_hold_wraps_and_what_int64_cannot_hold_is_its_nearest():
    def one(values: list[int], dtype: str, factor: float) -> list[int]:
        mine = np.array(values, dtype) * (hvd.rank() == 0)
        result: list[int] = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=factor).tolist()
        return result

    assert one([1, 200], "uint8", -1.0) == [255, 56]
    assert one([100, -100], "int8", 2.0) == [-56, 56]
    assert one([2**31 - 1, -(2**31)], "int32", 2.0) == [-2, 0]
    assert one([2**62, -(2**62), 3], "int64", 4.0) == [2**63 - 1, -(2**63), 12]
    assert one([2**53 + 1], "int64", 1.0) == [2**53 + 1]  # no factor, no float64
    with pytest.raises(TypeError, match="prescale_factor=nan"):
        one([5, 0], "int32", float("nan"))


@ranks(2, 3)
def test_the_identity_element_of_a_joined_rank_is_not_scaled():
    me, size = hvd.rank(), hvd.size()
    if me < size - 1:  # the last one has no data at all
        others = size - 1
        for dtype in ("float32", "float64", "int32"):
            mine = np.array([4, 10]).astype(dtype)
            for count in (1, 20_000):
                many = np.tile(mine, count)
                product = hvd.allreduce(many, op=hvd.Product, prescale_factor=0.5)
                np.testing.assert_array_equal(product, np.tile(np.array([2, 5]) ** others, count))
                for op in (hvd.Min, hvd.Max):
                    for factor in (0.0, -1.0, 0.5):
                        found = hvd.allreduce(many, op=op, prescale_factor=factor, postscale_factor=2.0)
                        np.testing.assert_array_equal(found, many * factor * 2)
                found = hvd.allreduce(many, op=hvd.Sum, prescale_factor=0.5)
                np.testing.assert_array_equal(found, many // 2 * others)
                np.testing.assert_array_equal(many, np.tile(mine, count), "the input is not touched")
    hvd.join()
    scaled_by_all = hvd.allreduce(np.array([4.0, 10.0]), op=hvd.Product, prescale_factor=0.5)
    assert scaled_by_all.tolist() == [2.0**size, 5.0**size]
