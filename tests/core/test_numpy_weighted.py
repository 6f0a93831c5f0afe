"""Weighted means of NumPy arrays: what every binding is asked (tests/weighted.py), and how weights travel."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import load, ranks

import horoclone as hvd
from horoclone import weights
from horoclone.errors import InvalidArgument

shared = load(Path(__file__).parents[1] / "weighted.py", "weighted")


def _in_place(call: Callable[..., Any], grouped: bool = False) -> Callable[..., Any]:
    """What it gives back is the array that it was given."""

    def form(x: Any, **more: Any) -> Any:
        own = np.array(x)
        found = call([own] if grouped else own, **more)
        assert (found[0] if grouped else found) is own
        return own

    return form


FORMS = [
    hvd.allreduce,
    lambda x, **more: hvd.synchronize(hvd.allreduce_async(x, **more)),
    lambda x, **more: hvd.grouped_allreduce([2 * x, x], **more)[1],
    lambda x, **more: hvd.synchronize(hvd.grouped_allreduce_async([2 * x, x], **more))[1],
    _in_place(hvd.allreduce_),
    _in_place(lambda x, **more: hvd.synchronize(hvd.allreduce_async_(x, **more))),
    _in_place(hvd.grouped_allreduce_, grouped=True),
    _in_place(lambda x, **more: hvd.synchronize(hvd.grouped_allreduce_async_(x, **more)), grouped=True),
]


@pytest.mark.parametrize("question", shared.NAMES)
@ranks(3)
def test_as_any_binding(question: str) -> None:
    calls = shared.Calls(
        hvd, hvd.join, lambda values, dtype: np.asarray(values).astype(dtype), np.asarray, FORMS, None,
        InvalidArgument, hvd.Mismatch, pairs=[hvd.grouped_allreduce],
    )  # fmt: skip
    shared.ask(question, calls)


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
    with pytest.raises(
        InvalidArgument, match="rank 3 gave the weight -1, which is negative, and 3 more ranks."
    ) as error:
        weights.total([-1.0] * 6 + [weights.MISSING], "float64", "x", range(7))
    assert "set_weight()" in str(error.value)
