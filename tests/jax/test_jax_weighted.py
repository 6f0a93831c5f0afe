"""Weighted means of JAX arrays and gradients, inside and outside of programs: tests/weighted.py, and what JAX alone has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, load, ranks

import horoclone
from horoclone.errors import Mismatch

jax = later("jax")
optax = later("optax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")

weighted = load(Path(__file__).parents[1] / "weighted.py", "weighted")


def eager(x: Any, name: Any, weight: Any) -> Any:
    return jax.block_until_ready(hvd.allreduce(x, name=name, weight=weight))


@functools.cache
def compiled(name: Any) -> Any:
    return jax.jit(lambda x, w: hvd.allreduce({"x": x, "y": x[:1]}, name=name, weight=w)["x"])


def program(x: Any, name: Any, weight: Any) -> Any:
    """Unnamed it is traced anew: its name counts the traces, of which the ranks had better have equally many."""
    run = compiled(name) if name else compiled.__wrapped__(name)
    return jax.block_until_ready(run(x, weight))


def gradient(form: Any, x: Any, scale: float, weight: Any) -> Any:
    call = compiled("x") if form is program else lambda x, w: hvd.allreduce(x, weight=w)
    return jax.grad(lambda x: (call(x, weight) * scale).sum())(x)


def _loss(p: Any, x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ p[0]) @ p[1] - y) ** 2).mean()


@functools.cache
def slope() -> Any:
    return jax.jit(jax.grad(_loss))


def trained(is_program: bool) -> Any:
    tx = hvd.DistributedOptimizer(optax.sgd(1.0))

    def step(p: Any, x: Any, y: Any, weight: Any) -> Any:
        return tx.update(slope()(p, x, y), tx.init(p), p, weight=weight)[0]

    run = jax.jit(step) if is_program else step

    def gradients(p: Any, x: Any, y: Any, weight: Any) -> Any:
        with jax.enable_x64(True):
            return [-np.asarray(change) for change in jax.block_until_ready(run(p, x, y, weight))]

    return gradients


@pytest.mark.parametrize("question", weighted.NAMES)
@ranks(3, limit_s=180)
def test_as_any_binding(question: str) -> None:
    calls = weighted.Calls(
        hvd, horoclone.join, lambda values, dtype: jnp.asarray(values, dtype), np.asarray, [eager, program], gradient,
        (ValueError, jax.errors.JaxRuntimeError), (Mismatch, jax.errors.JaxRuntimeError),
        [hvd.allreduce, jax.jit(lambda pair, weight: hvd.allreduce(pair, weight=weight))],
        [trained(False), trained(True)], lambda: jax.enable_x64(True),
    )  # fmt: skip
    weighted.ask(question, calls)


@ranks(2)
def test_bfloat16_halves_the_bytes_of_a_weighted_mean_and_vectors_are_no_weights() -> None:
    x = jnp.full(3, hvd.rank() + 1.0)
    close = hvd.allreduce(x, compression=hvd.Compression.bf16, weight=(1.0, 3.0)[hvd.rank()])
    assert close.dtype == jnp.float32 and np.allclose(close, 1.75, rtol=2**-7)
    with pytest.raises(TypeError, match="weight"):
        jax.jit(lambda w: hvd.allreduce(x, weight=w))(jnp.ones(2))


@ranks(2)
def test_an_update_says_what_weights_do_not_work_with() -> None:
    for options in {"backward_passes_per_step": 2}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Sum}:
        tx = hvd.DistributedOptimizer(optax.sgd(0.1), **options)
        p = {"a": jnp.ones(2)}
        with pytest.raises(ValueError, match="weight="):
            tx.update(p, tx.init(p), p, weight=1.0)
