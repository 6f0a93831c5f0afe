"""Adasum on NumPy arrays against a float64 model of the tree of pairs; the optimizer that uses it is torch's business."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from world import ranks

import horoclone as hvd

FLOATS = {
    "float16": (np.dtype("float16"), 2e-3),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), 1.6e-2),
    "float32": (np.dtype("float32"), 1e-6),
    "float64": (np.dtype("float64"), 1e-13),
}


def pair(a, b):
    a_dot_b, a_norm, b_norm = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    of_a = 1 - a_dot_b / (2 * a_norm) if a_norm else 1
    of_b = 1 - a_dot_b / (2 * b_norm) if b_norm else 1
    return of_a * a + of_b * b


def model(vectors):
    """Ranks beyond a power of two are folded in first, then neighbours combine."""
    vectors = [np.asarray(v, np.float64) for v in vectors]
    extra = len(vectors) - 2 ** (len(vectors).bit_length() - 1)
    vectors = [pair(*vectors[2 * i : 2 * i + 2]) for i in range(extra)] + vectors[2 * extra :]
    while len(vectors) > 1:
        vectors = [pair(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return vectors[0]


def data(shape, rank, seed=0):
    return np.random.default_rng([seed, rank, *shape]).normal(0.3, 1.0, shape)


def close(result, vectors, tolerance, scale=1.0):
    expected = scale * model(vectors)
    assert np.abs(result.astype(np.float64) - expected).max(initial=0) <= tolerance * np.abs(expected).max(
        initial=1e-30
    )


@ranks(1, 2, 3, 4)
def test_adasum_equals_the_model_for_every_float_dtype_and_form():
    for dtype, tolerance in FLOATS.values():
        for shape in [(), (1,), (7,), (3, 5), (2, 0), (30_011,)]:
            everybody = [data(shape, rank).astype(dtype) for rank in range(hvd.size())]
            mine = everybody[hvd.rank()]
            result = hvd.allreduce(mine, op=hvd.Adasum)
            assert result.dtype == dtype and result.shape == shape
            close(result, everybody, tolerance)
            later = hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum))
            target = mine.copy()
            assert hvd.allreduce_(target, op=hvd.Adasum) is target
            hvd.synchronize(hvd.allreduce_async_(second := mine.copy(), op=hvd.Adasum))
            for again in (later, target, second):
                assert again.shape == shape and again.tobytes() == result.tobytes()
            everywhere = hvd.allgather(result.reshape(1, -1))
            assert all(row.tobytes() == result.tobytes() for row in everywhere), "the same bits on every rank"


@ranks(2)
def test_integers_are_refused_and_the_runtime_goes_on():
    for dtype in (np.int32, np.uint8, np.bool_):
        with pytest.raises(ValueError, match="Adasum needs floating-point tensors"):
            hvd.allreduce(np.ones(3, dtype), op=hvd.Adasum)
    with pytest.raises(ValueError, match="AVERAGE and SUM"):
        hvd.reducescatter(np.ones(4), op=hvd.Adasum)
    op = hvd.Adasum if hvd.rank() == 0 else hvd.Sum
    with pytest.raises(hvd.Mismatch, match="reduce operation Adasum"):
        hvd.allreduce(np.ones(3), name="differs", op=op)
    close(hvd.allreduce(np.ones(3), op=hvd.Adasum), [np.ones(3)] * hvd.size(), 0)
