"""Weighted means: the questions that are the same for each binding, asked by what runs on every rank of three.

A binding is `Calls`; its test file runs the functions of BODIES on ranks that have its framework.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 by name
import numpy as np
import pytest

WEIGHTS = [(3, 5, 2), (1000003, 1, 0), (0.1, 0.7, 0.25)]


@dataclass
class Calls:
    """hvd: the binding. array(values, dtype) makes its tensor; plain(tensor) is NumPy's array, of the dtype that it has.

    forms: its ways to call, each form(x, name=..., weight=...). gradient(form, x, scale, weight=...): that of
    sum(form(x, weight)) * scale, where there is one. invalid, mismatch: the classes of its errors. wide: within it there are 64 bits.
    pairs: each pair([x, y], weight=...) takes tensors of two dtypes at once.
    trained: each trained(parameters, x, y, weight) gives the distributed gradients of `loss`, as NumPy's arrays.
    """

    hvd: Any
    join: Callable[[], Any]
    array: Callable[[Any, str], Any]
    plain: Callable[[Any], Any]
    forms: Sequence[Callable[..., Any]]
    gradient: Callable[..., Any] | None
    invalid: Any
    mismatch: Any
    pairs: Sequence[Callable[..., Any]] = ()
    trained: Sequence[Callable[..., Any]] = ()
    wide: Callable[[], Any] = contextlib.nullcontext


def _error(kinds: Any, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(kinds) as caught:
        call(*args, **options)
    return str(caught.value)


def the_mean_is_numpys_to_an_ulp(calls: Calls) -> None:
    rank, size = calls.hvd.rank(), calls.hvd.size()
    with calls.wide():
        for seed, weights in enumerate(WEIGHTS):
            random = np.random.default_rng(seed)
            parts = [random.standard_normal((3, 4)) for _ in range(size)]
            wanted = sum(w * x for w, x in zip(weights, parts, strict=True)) / math.fsum(weights)
            x, own = calls.array(parts[rank], "float64"), float(weights[rank])
            for form in calls.forms:
                for weight in own, calls.array(own, "float64"):
                    mean = calls.plain(form(x, name="x", weight=weight))
                    assert mean.dtype == np.float64
                    # Terms of both signs cancel: an ulp of what was added up.
                    assert np.all(np.abs(mean - wanted) <= np.spacing(np.maximum(np.abs(wanted), 1.0)))
        assert np.array_equal(calls.plain(x), parts[rank])


def narrow_dtypes_do_not_round_the_weights(calls: Calls) -> None:
    weights = (1000003.0, 999.0, 17.0)
    wanted = sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)
    for dtype in "float32", "bfloat16", "float16":
        x = calls.array(np.full(3, calls.hvd.rank() + 1.0), dtype)
        for form in calls.forms:
            mean = calls.plain(form(x, name=None, weight=weights[calls.hvd.rank()]))
            # In bfloat16 a sum of weights that was rounded there would be off by more than its neighbour.
            assert np.array_equal(mean, np.full(3, wanted).astype(dtype)) and mean.dtype == np.dtype(dtype)
        for pair in calls.pairs:
            found = pair([calls.array(np.ones(2), "float16"), x], weight=weights[calls.hvd.rank()])
            assert [calls.plain(one).dtype for one in found] == [np.float16, np.dtype(dtype)]
            assert calls.plain(found[0]).tolist() == [1.0, 1.0]
            assert np.array_equal(calls.plain(found[1]), np.full(3, wanted).astype(dtype))


def wrong_weights_are_named_on_every_rank_and_the_runtime_goes_on(calls: Calls) -> None:
    hvd, x = calls.hvd, calls.array(np.ones(3), "float32")
    for form in calls.forms:
        for value, why in (math.nan, "not a number"), (math.inf, "infinite"), (-2.0, "negative"):
            text = _error(calls.invalid, form, x, name="loss", weight=value if hvd.rank() == 1 else 1.0)
            assert "allreduce 'loss" in text and "rank 1 gave the weight" in text and why in text, text
        assert "all ranks gave the weight 0" in _error(calls.invalid, form, x, name="loss", weight=0.0)
        assert calls.plain(form(x, name="loss", weight=hvd.rank() + 1.0))[0] == 1
    compressed = [{"compression": hvd.Compression.fp16}] if hasattr(hvd, "Compression") else []
    for more in {"op": hvd.Sum}, {"prescale_factor": 2.0}, *compressed:
        assert "weight=" in _error(ValueError, hvd.allreduce, x, weight=1, **more)
    assert "floating-point" in _error(ValueError, hvd.allreduce, calls.array(np.ones(3), "int32"), weight=1)
    for wrong in "3", [1], calls.array(np.ones(1), "float32"), True, 1j:
        assert "weight" in _error(TypeError, hvd.allreduce, x, weight=wrong)


def a_weight_on_one_rank_only_is_a_mismatch(calls: Calls) -> None:
    x, weight = calls.array(np.ones(3), "float32"), 2.0 if calls.hvd.rank() == 1 else None
    for form in calls.forms:
        for name in "x", None:
            text = _error(calls.mismatch, form, x, name=name, weight=weight)
            assert "give weight= where the others do" in text
    assert calls.plain(calls.hvd.allreduce(x, name="x"))[0] == 1


def a_rank_without_samples_has_no_part_and_the_gradient_is_its_share(calls: Calls) -> None:
    rank = calls.hvd.rank()
    x, weights = calls.array(np.full(2, math.nan if rank else 5.0), "float32"), (1.0, 3.0, 4.0)
    for form in calls.forms:
        assert calls.plain(form(x, name="x", weight=int(rank == 0))).tolist() == [5.0, 5.0]
        if calls.gradient is not None:
            found = calls.gradient(form, calls.array(np.ones(2), "float32"), rank + 1.0, weight=weights[rank])
            assert np.allclose(calls.plain(found), (1 + 2 + 3) * weights[rank] / 8)


def loss_gradients(parameters: Sequence[Any], x: Any, y: Any) -> list[Any]:
    """Of the mean of (tanh(x a) b - y)^2."""
    a, b = parameters
    hidden = np.tanh(x @ a)
    by_guess = 2 * (hidden @ b - y) / len(x)
    return [x.T @ (by_guess @ b.T * (1 - hidden**2)), hidden.T @ by_guess]


def the_mean_is_over_those_who_have_not_joined(calls: Calls) -> None:
    """As one process has it on the batches of those who took part, also where a weight is wrong in between."""
    rank = calls.hvd.rank()
    for trained in calls.trained:
        random = np.random.default_rng(4)
        ours = alone = [random.standard_normal((5, 7)), random.standard_normal((7, 1))]
        for step in range(4):
            there = range(3 if step < 2 else 2)
            counts = [0 if (step, r) == (1, 1) else 2 + r for r in there]  # NaN is the loss of no samples
            parts = [(random.standard_normal((n, 5)), random.standard_normal((n, 1))) for n in counts]
            if rank not in there:
                continue
            if step == 3:
                for wrong, why in ((-1.0, 1.0), "rank 0 gave the weight -1"), ((0.0, 0.0), "all ranks gave"):
                    assert why in _error(calls.invalid, trained, ours, *parts[rank], wrong[rank])
            found = trained(ours, *parts[rank], float(counts[rank]))
            ours = [p - 0.5 * np.asarray(g) for p, g in zip(ours, found, strict=True)]
            whole = [np.concatenate(both) for both in zip(*parts, strict=True)]
            alone = [p - 0.5 * g for p, g in zip(alone, loss_gradients(alone, *whole), strict=True)]
        if rank < 2:
            assert all(np.allclose(a, b, rtol=1e-13, atol=1e-14) for a, b in zip(ours, alone, strict=True))
        calls.join()
    x = calls.array(np.full(1, rank + 1.0), "float32")
    if rank < 2:
        for form in calls.forms:
            assert calls.plain(form(x, name=None, weight=1.0 + 2 * rank))[0] == 7 / 4
            assert "all ranks gave" in _error(calls.invalid, form, x, name="x", weight=0.0)
        assert calls.plain(calls.hvd.allreduce(x))[0] == 1  # without a weight, all of them count
    calls.join()


BODIES = [
    the_mean_is_numpys_to_an_ulp, narrow_dtypes_do_not_round_the_weights,
    wrong_weights_are_named_on_every_rank_and_the_runtime_goes_on, a_weight_on_one_rank_only_is_a_mismatch,
    a_rank_without_samples_has_no_part_and_the_gradient_is_its_share, the_mean_is_over_those_who_have_not_joined,
]  # fmt: skip
NAMES = [body.__name__ for body in BODIES]


def ask(name: str, calls: Calls) -> None:
    dict(zip(NAMES, BODIES, strict=True))[name](calls)
