"""Weighted means of JAX arrays and gradients, inside and outside of programs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from world import ranks

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

import horoclone  # noqa: E402
import horoclone.jax as hvd  # noqa: E402
from horoclone.errors import InvalidArgument, Mismatch  # noqa: E402

WEIGHTS = [(3, 5, 2), (1000003, 1, 0), (0.1, 0.7, 0.25)]


def _error(call: Any, *kinds: type[BaseException]) -> str:
    with pytest.raises(kinds) as caught:
        jax.block_until_ready(call())
    return str(caught.value)


@ranks(3)
def test_a_tree_has_the_mean_that_numpy_has_to_an_ulp() -> None:
    with jax.enable_x64(True):
        for compiled in False, True:
            for seed, weights in enumerate(WEIGHTS):
                random = np.random.default_rng(seed)
                parts = [random.standard_normal((3, 4)) for _ in range(hvd.size())]
                total = math.fsum(weights[: hvd.size()])
                wanted = sum(w * x for w, x in zip(weights, parts, strict=False)) / total

                def mean(x: Any, w: Any) -> Any:
                    return hvd.allreduce({"a": x, "b": x[0]}, weight=w)

                call = jax.jit(mean) if compiled else mean
                x, own = jnp.asarray(parts[hvd.rank()]), weights[hvd.rank()]
                for found in call(x, float(own)), call(x, jnp.asarray(own, jnp.float64)):
                    for one, like in (found["a"], wanted), (found["b"], wanted[0]):
                        assert one.dtype == jnp.float64
                        off = np.abs(np.asarray(one) - like)
                        assert np.all(off <= np.spacing(np.maximum(np.abs(like), 1.0)))


@ranks(3)
def test_narrow_dtypes_do_not_round_the_weights() -> None:
    weights = (1000003.0, 999.0, 17.0)[: hvd.size()]
    wanted = sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)
    for dtype in jnp.float32, jnp.bfloat16, jnp.float16:
        x = jnp.full(3, hvd.rank() + 1, dtype)
        for call in hvd.allreduce, jax.jit(hvd.allreduce):
            found = call(x, weight=weights[hvd.rank()])
            assert found.dtype == dtype and np.array_equal(found, jnp.full(3, wanted).astype(dtype))
    x = jnp.full(3, hvd.rank() + 1.0)
    close = hvd.allreduce(x, compression=hvd.Compression.bf16, weight=weights[hvd.rank()])
    assert close.dtype == jnp.float32 and np.allclose(close, wanted, rtol=2**-7)


@ranks(3)
def test_wrong_weights_are_named_on_every_rank_and_the_runtime_goes_on() -> None:
    x = jnp.ones(3)
    program = jax.jit(lambda x, w: hvd.allreduce(x, name="loss", weight=w))
    for call, kind in (
        (lambda w: hvd.allreduce(x, name="loss", weight=w), InvalidArgument),
        (lambda w: program(x, w), jax.errors.JaxRuntimeError),
    ):
        for value, why in (math.nan, "not a number"), (math.inf, "infinite"), (-2.0, "negative"):
            text = _error(lambda v=value, c=call: c(v if hvd.rank() == 1 else 1.0), kind)
            assert "allreduce 'loss': rank 1 gave the weight" in text and why in text
        assert "all ranks gave the weight 0" in _error(lambda c=call: c(0.0), kind)
        assert call(float(hvd.rank() + 1))[0] == 1
    for more in {"op": hvd.Sum}, {"prescale_factor": 2.0}, {"compression": hvd.Compression.fp16}:
        with pytest.raises(ValueError, match="weight="):
            hvd.allreduce(x, weight=1, **more)
    with pytest.raises(ValueError, match="floating-point"):
        hvd.allreduce(jnp.ones(3, int), weight=1)
    for wrong in "3", [1], jnp.ones(1), True:
        with pytest.raises(TypeError, match="weight"):
            hvd.allreduce(x, weight=wrong)
    with pytest.raises(TypeError, match="weight"):
        jax.jit(lambda w: hvd.allreduce(x, weight=w))(jnp.ones(2))


@ranks(2)
def test_a_weight_on_one_rank_only_is_a_mismatch() -> None:
    x = jnp.ones(3)
    more = {"weight": 2.0} if hvd.rank() else {}
    for name in "x", None:
        for call in (
            lambda n=name: hvd.allreduce(x, name=n, **more),
            lambda n=name: jax.jit(lambda x: hvd.allreduce(x, name=n, **more))(x),
        ):
            assert "give weight= where the others do" in _error(call, Mismatch, jax.errors.JaxRuntimeError)
    assert hvd.allreduce(x, name="x")[0] == 1


@ranks(2)
def test_a_rank_without_samples_has_no_part_and_the_gradient_is_its_share() -> None:
    x = jnp.full(2, math.nan if hvd.rank() else 5.0)
    assert np.array_equal(hvd.allreduce(x, weight=1 - hvd.rank()), [5.0, 5.0])
    scale = hvd.rank() + 1.0
    for wrap in jax.jit, lambda f: f:
        found = wrap(jax.grad(lambda x, w: (hvd.allreduce(x, weight=w) * scale).sum()))(
            jnp.ones(2), 1.0 + 2 * hvd.rank()
        )
        assert np.allclose(found, 3 * (1 + 2 * hvd.rank()) / 4)


def _loss(p: Any, x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2).mean()


@ranks(3, limit_s=180)
def test_the_mean_is_over_those_who_have_not_joined() -> None:
    """As one process has it on the batches of those who took part, also where a weight is wrong in between."""
    with jax.enable_x64(True):
        for program in True, False:
            tx, plain = hvd.DistributedOptimizer(optax.adam(0.05)), optax.adam(0.05)

            def step(p: Any, state: Any, x: Any, y: Any, weight: Any, tx: Any = tx) -> Any:
                changes, state = tx.update(jax.grad(_loss)(p, x, y), state, p, weight=weight)
                return optax.apply_updates(p, changes), state

            call = jax.jit(step) if program else step
            random = np.random.default_rng(4)
            ours = {"a": random.standard_normal((5, 7)), "b": random.standard_normal((7, 1))}
            alone, state, single = ours, tx.init(ours), plain.init(ours)
            for i in range(4):
                there = range(3 if i < 2 else 2)
                counts = [0 if (i, r) == (1, 1) else 2 + r for r in there]  # NaN is the loss of no samples
                parts = [(random.standard_normal((n, 5)), random.standard_normal((n, 1))) for n in counts]
                if hvd.rank() in there:
                    mine = parts[hvd.rank()]
                    if i == 3:
                        for wrong, why in (
                            ((-1.0, 1.0), "rank 0 gave the weight -1"),
                            ((0.0, 0.0), "all ranks"),
                        ):
                            again = partial(call, ours, state, *mine, wrong[hvd.rank()])
                            assert why in _error(again, ValueError, jax.errors.JaxRuntimeError)
                    ours, state = call(ours, state, *mine, float(len(mine[0])))
                whole = [np.concatenate(both) for both in zip(*parts, strict=True)]
                changes, single = plain.update(jax.grad(_loss)(alone, *whole), single)
                alone = optax.apply_updates(alone, changes)
            x = jnp.asarray([hvd.rank() + 1.0])
            if hvd.rank() < 2:
                for key, wanted in alone.items():
                    assert np.allclose(ours[key], wanted, rtol=1e-13, atol=1e-14)
                tree = hvd.allreduce({"x": x, "y": (2 * x).astype(jnp.bfloat16)}, weight=1 + 2 * hvd.rank())
                assert (tree["x"][0], tree["y"][0]) == (7 / 4, 7 / 2)
            horoclone.join()
            if hvd.rank() < 2:
                assert hvd.allreduce(x)[0] == 1  # without a weight, all of them count
            horoclone.join()


@ranks(2)
def test_an_update_says_what_weights_do_not_work_with() -> None:
    for options in {"backward_passes_per_step": 2}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Sum}:
        tx = hvd.DistributedOptimizer(optax.sgd(0.1), **options)
        p = {"a": jnp.ones(2)}
        with pytest.raises(ValueError, match="weight="):
            tx.update(p, tx.init(p), p, weight=1.0)
