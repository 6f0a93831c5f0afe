"""Weighted means of NumPy arrays, and what is said of weights that are none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from world import ranks

import horoclone as hvd
from horoclone import weights
from horoclone.errors import InvalidArgument

WEIGHTS = [(3, 5, 2), (1000003, 1, 0), (0.1, 0.7, 0.25)]


def _error(call: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@ranks(2, 3)
def test_every_form_is_numpys_mean_to_an_ulp() -> None:
    for seed, all_weights in enumerate(WEIGHTS):
        random = np.random.default_rng(seed)
        parts = [random.standard_normal((3, 4)) for _ in range(hvd.size())]
        total = math.fsum(all_weights[: hvd.size()])
        wanted = sum(w * x for w, x in zip(all_weights, parts, strict=False)) / total
        own, x = all_weights[hvd.rank()], parts[hvd.rank()]
        found = [
            hvd.allreduce(x, name="x", weight=own),
            hvd.allreduce(x, op=hvd.Average, weight=np.float64(own)),
            hvd.allreduce(x, weight=np.array(own)),
            hvd.synchronize(hvd.allreduce_async(x, name="x", weight=own)),
            hvd.grouped_allreduce([x, x[0]], name="g", weight=own)[0],
            hvd.synchronize(hvd.grouped_allreduce_async([x], weight=own))[0],
        ]
        places = [x.copy() for _ in range(4)]
        assert hvd.allreduce_(places[0], weight=own) is places[0]
        assert hvd.synchronize(hvd.allreduce_async_(places[1], weight=own)) is places[1]
        assert hvd.grouped_allreduce_([places[2]], weight=own)[0] is places[2]
        hvd.synchronize(hvd.grouped_allreduce_async_([places[3]], weight=own))
        for mean in [*found, *places]:
            assert mean.dtype == np.float64
            # Terms of both signs cancel: an ulp of what was added up.
            assert np.all(np.abs(mean - wanted) <= np.spacing(np.maximum(np.abs(wanted), 1.0)))


@ranks(2, 3)
def test_narrow_dtypes_do_not_round_the_weights() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    all_weights = (1000003.0, 999.0, 17.0)[: hvd.size()]
    wanted = sum(w * (r + 1) for r, w in enumerate(all_weights)) / sum(all_weights)
    for dtype in np.float32, np.float16, bfloat16:
        found = hvd.allreduce(np.full(3, hvd.rank() + 1, dtype), weight=all_weights[hvd.rank()])
        assert found.dtype == dtype and np.array_equal(found, np.full(3, wanted).astype(dtype))
    mixed = [np.full(2, hvd.rank() + 1, dtype) for dtype in (np.float32, bfloat16, np.float64)]
    for one in hvd.grouped_allreduce(mixed, weight=all_weights[hvd.rank()]):
        assert np.allclose(one.astype(np.float64), wanted, rtol=2**-8)


@ranks(2, 3)
def test_wrong_weights_are_named_on_every_rank_and_leave_the_array_alone() -> None:
    for value, why in (math.nan, "not a number"), (math.inf, "infinite"), (-2, "negative"):
        x = np.ones(3, np.float32)
        own = value if hvd.rank() == 1 else 1
        text = _error(lambda x=x, w=own: hvd.allreduce_(x, name="loss", weight=w), InvalidArgument)
        assert (
            "allreduce 'loss': rank 1 gave the weight" in text
            and why in text
            and np.array_equal(x, np.ones(3))
        )
    assert "all ranks gave the weight 0" in _error(lambda: hvd.allreduce(1.0, weight=0), InvalidArgument)
    more = {"weight": 2} if hvd.rank() == 1 else {}
    text = _error(lambda: hvd.allreduce(np.ones(3), name="x", **more), hvd.Mismatch)
    assert "give weight= where the others do" in text
    for wrong in "3", [1], np.ones(1), True, 1j:
        with pytest.raises(TypeError, match="weight"):
            hvd.allreduce(x, weight=wrong)
    with pytest.raises(ValueError, match="floating-point"):
        hvd.allreduce(np.ones(3, int), weight=1)
    with pytest.raises(ValueError, match="Average only"):
        hvd.allreduce(x, op=hvd.Sum, weight=1)
    assert hvd.allreduce(np.float64(hvd.rank()), name="loss", weight=hvd.rank()) > 0


@ranks(3)
def test_a_rank_without_samples_or_that_has_joined_has_no_part() -> None:
    if hvd.rank() == 2:
        hvd.join()
        return
    x = np.full(2, math.nan if hvd.rank() else 5.0)
    assert np.array_equal(hvd.allreduce(x, weight=int(hvd.rank() == 0)), [5.0, 5.0])
    hvd.join()


@ranks(3)
def test_the_mean_is_over_those_who_have_not_joined_and_a_plain_one_over_all() -> None:
    if hvd.rank() == 2:
        assert hvd.join() in (0, 1)
        return
    random = np.random.default_rng(5)
    parts = [random.standard_normal((3, 4)) for _ in range(2)]
    wanted = (3 * parts[0] + 5 * parts[1]) / 8
    own, x = (3, 5)[hvd.rank()], parts[hvd.rank()]
    for _ in range(3):
        found = [
            hvd.allreduce(x, name="x", weight=own),
            *hvd.grouped_allreduce([x, x], name="g", weight=own),
            hvd.synchronize(hvd.allreduce_async(x, weight=own)),
            hvd.allreduce_(x.copy(), weight=own),
        ]
        assert all(np.all(np.abs(mean - wanted) <= np.spacing(1.0 + np.abs(wanted))) for mean in found)
        for wrong, why in (math.nan, "not a number"), (-1, "negative"):
            gave = wrong if hvd.rank() else 1
            text = _error(lambda w=gave: hvd.grouped_allreduce([x, x], name="g", weight=w), InvalidArgument)
            assert "rank 1 gave the weight" in text and why in text and "rank 2" not in text
        assert "all ranks gave" in _error(lambda: hvd.allreduce(x, name="x", weight=0), InvalidArgument)
        assert np.allclose(hvd.allreduce(x, name="x"), (parts[0] + parts[1]) / 3)
    hvd.join()


def test_a_weight_travels_exactly_in_every_dtype() -> None:
    for weight in (1.0, 1000003.0, 0.1, 3e-20, 1e30, 0.0, math.inf, 16777217.0):
        for wire in ("float64", "float32", "bfloat16"):
            own = weights.rounded(weight, wire)
            whole = [weights.tail(own, wire, r, 3) for r in range(3)]
            sums = [sum(column) for column in zip(*whole, strict=True)]
            if weight in (0.0, math.inf):
                continue
            assert weights.total(sums, wire, "x", range(3)) == weights.rounded(3 * own, wire)
            if wire == "bfloat16":
                for part in weights.parts(own, wire):
                    assert part == 0 or abs(np.float32(part)).view(np.uint32) & 0xFFFF == 0


def test_many_wrong_ranks_are_counted() -> None:
    text = _error(
        lambda: weights.total([-1.0] * 6 + [weights.MISSING], "float64", "x", range(7)), InvalidArgument
    )
    assert (
        "rank 3 gave the weight -1, which is negative, and 3 more ranks." in text and "set_weight()" in text
    )
