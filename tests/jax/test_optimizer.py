"""DistributedOptimizer against one process that has the batches of all ranks, and the example."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, operations, printed_by, ranks

jax = later("jax")
optax = later("optax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


def data(rank: int, step: int) -> tuple[Any, Any]:
    chance = np.random.default_rng([rank, step])
    x = chance.normal(size=(8, 5)).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True))


def start() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(3), 2)
    return {
        "a": jax.random.normal(keys[0], (5, 7)),
        "b": {"c": jax.random.normal(keys[1], (7, 1)), "d": jnp.zeros(1)},
    }


def loss(p: dict[str, Any], x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ p["a"]) @ p["b"]["c"] + p["b"]["d"] - y) ** 2).mean()


def trained(tx: Any, steps: int, batch: Any) -> dict[str, Any]:
    def step(p: Any, state: Any, x: Any, y: Any) -> Any:
        changes, state = tx.update(jax.grad(loss)(p, x, y), state, p)
        return optax.apply_updates(p, changes), state

    run = jax.jit(step, donate_argnums=(0, 1))
    p = start()
    state = tx.init(p)
    for i in range(steps):
        p, state = run(p, state, *batch(i))
    return p


def as_one_process(p: Any, tx: Any, steps: int, batch: Any, rtol: float) -> None:
    """Alike on all ranks, and close to what tx alone makes of these batches on rank 0."""
    same_bits(p)
    if hvd.rank() == 0:
        close(p, trained(tx, steps, batch), rtol)


def of_all_ranks(step: int) -> tuple[Any, Any]:
    parts = [data(r, step) for r in range(hvd.size())]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def close(a: Any, b: Any, rtol: float) -> None:
    for x, y in zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b), strict=True):
        assert np.allclose(x, y, rtol=rtol, atol=rtol), (x, y)


def same_bits(p: Any) -> None:
    mine = [np.asarray(x).tobytes() for x in jax.tree_util.tree_leaves(p)]
    assert all(other == mine for other in hvd.allgather_object(mine))


@ranks(2)
def test_equals_one_process_with_the_whole_batch() -> None:
    """Tolerance: sums in another order, 20 Adam steps."""
    p = trained(hvd.DistributedOptimizer(optax.adamw(1e-2)), 20, lambda i: data(hvd.rank(), i))
    as_one_process(p, optax.adamw(1e-2), 20, of_all_ranks, 1e-4)
    wide = trained(
        hvd.DistributedOptimizer(optax.sgd(0.1), gradient_predivide_factor=4.0),  # Adam would hide a factor
        10,
        lambda i: data(hvd.rank(), i),
    )
    as_one_process(wide, optax.sgd(0.1), 10, of_all_ranks, 1e-4)
    short = hvd.DistributedOptimizer(optax.sgd(0.1), compression=hvd.Compression.bf16)
    p = trained(short, 10, lambda i: data(hvd.rank(), i))
    as_one_process(p, optax.sgd(0.1), 10, of_all_ranks, 3e-2)
    outside = hvd.DistributedOptimizer(optax.sgd(1.0))
    changes, _ = outside.update({"g": jnp.full(3, 1.0 + hvd.rank())}, outside.init({"g": jnp.ones(3)}))
    assert np.allclose(changes["g"], -(hvd.size() + 1) / 2)
    summed = trained(hvd.DistributedOptimizer(optax.sgd(0.01), op=hvd.Sum), 5, lambda i: data(hvd.rank(), i))
    as_one_process(summed, optax.sgd(0.01 * hvd.size()), 5, of_all_ranks, 1e-5)


def updates_in_two_worlds() -> list[float]:
    """Of one program, with a gradient of rank + 1."""
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), gradient_predivide_factor=2.0)
    update, state, out = jax.jit(tx.update), tx.init(jnp.zeros(())), []
    for ranks_there in ([0, 1, 2], [0, 1]):
        hvd.init(comm=ranks_there)
        out.append(float(update(jnp.float32(hvd.rank() + 1), state)[0]))
        is_last = hvd.rank() == 2
        hvd.shutdown()
        if is_last:
            break
    return out


def test_a_compiled_update_divides_by_the_size_of_the_world_in_which_it_runs(worlds: Any) -> None:
    assert worlds.run(3, updates_in_two_worlds, init=False) == [[-2.0, -1.5]] * 2 + [[-2.0]]


@ranks(2)
def test_backward_passes_per_step_reduces_every_kth_time_only() -> None:
    passes, steps = 3, 4
    tx = hvd.DistributedOptimizer(optax.adam(1e-2), backward_passes_per_step=passes)
    before = operations()
    p = trained(tx, passes * steps, lambda i: data(hvd.rank(), i))
    jax.block_until_ready(p)
    assert operations() - before == steps

    def long_batch(step: int) -> tuple[Any, Any]:
        parts = [of_all_ranks(passes * step + i) for i in range(passes)]
        return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])

    as_one_process(p, optax.adam(1e-2), steps, long_batch, 1e-4)
    state = tx.init(start())
    changes, state = jax.jit(tx.update)(start(), state, start())
    assert (
        all(not np.any(np.asarray(c)) for c in jax.tree_util.tree_leaves(changes)) and int(state.passes) == 1
    )


@ranks(2)
def test_inside_a_chain_and_with_extra_arguments() -> None:
    def scaled(factor: Any) -> Any:
        return optax.GradientTransformationExtraArgs(
            lambda p: optax.EmptyState(),
            lambda u, s, p=None, *, factor, **_: (jax.tree_util.tree_map(lambda g: g * factor, u), s),
        )

    tx = optax.chain(optax.clip_by_global_norm(1.0), hvd.DistributedOptimizer(scaled(1)))
    p = {"w": jnp.full(4, 3.0 * (hvd.rank() + 1))}  # clipped to 0.5 each before the reduction
    out, _ = jax.jit(lambda u: tx.update(u, tx.init(u), u, factor=2.0))(p)
    assert np.allclose(out["w"], 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(optax.sgd(1), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="op=Average only"):
        hvd.DistributedOptimizer(optax.sgd(1), op=hvd.Sum, gradient_predivide_factor=2.0)


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "jax_optax_digits.py"


def said_by_the_example(size: int) -> tuple[float, float]:
    """Loss and accuracy that it prints on rank 0, zeros elsewhere. It ends otherwise when the ranks differ."""
    said = printed_by(EXAMPLE)
    if hvd.rank() != 0:
        assert said == ""
        return 0.0, 0.0
    assert f"{size} ranks, identical parameters" in said
    found = re.search(r"test loss ([\d.]+), accuracy ([\d.]+)%", said)
    assert found is not None, said
    return float(found.group(1)), float(found.group(2))


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["jit", "eager"])
@ranks(2, env={"HOROCLONE_DEADLOCK_TIME_SECONDS": "0.5"})
def test_gradients_of_different_parameters_never_meet(how: str) -> None:
    """Each rank lacks another one; they are alike in shape and number."""
    tx, p = hvd.DistributedOptimizer(optax.sgd(1.0)), {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    update = jax.jit(tx.update) if how == "jit" else tx.update
    mine = {"a": jnp.ones(2), "b": None} if hvd.rank() == 0 else {"a": None, "b": jnp.ones(2)}
    with pytest.raises((RuntimeError, ValueError), match="each waits for a call that the other has not made"):
        jax.block_until_ready(update(mine, tx.init(p), p))
    changes, _ = update({"a": None, "b": jnp.full(2, hvd.rank() + 1.0)}, tx.init(p), p)
    assert changes["b"].tolist() == [-1.5, -1.5]


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["jit", "eager"])
@ranks(2, env={"HOROCLONE_DEADLOCK_TIME_SECONDS": "0.5"})
def test_gradients_of_optimizers_of_one_form_never_meet(how: str) -> None:
    """Ranks begin with different ones; the names of calls say so, given or not."""
    p = {"a": jnp.zeros(2)}
    for name in (None, "mine"):
        made = [hvd.DistributedOptimizer(optax.sgd(1.0), name) for _ in range(2)]
        for tx in made if hvd.rank() == 0 else made[::-1]:
            update = jax.jit(tx.update) if how == "jit" else tx.update
            with pytest.raises(
                (RuntimeError, ValueError), match="each waits for a call that the other has not made"
            ):
                jax.block_until_ready(update({"a": jnp.ones(2)}, tx.init(p), p))
    alike = [hvd.DistributedOptimizer(optax.sgd(1.0), "other") for _ in range(2)]
    for tx in (alike[1], alike[0]):
        update = jax.jit(tx.update) if how == "jit" else tx.update
        changes, _ = update({"a": jnp.full(2, hvd.rank() + 1.0)}, tx.init(p), p)
        assert changes["a"].tolist() == [-1.5, -1.5]
        with pytest.raises(ValueError, match=r"the array at \['a'\] is uint32"):
            update({"a": jnp.zeros(2, jnp.uint32)}, tx.init(p), p)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the example needs scikit-learn")
@pytest.mark.long(40)
@ranks(2, init=False, limit_s=150)
def test_example_on_two_ranks_comes_out_as_on_one() -> None:
    """Each rank alone with the whole batch, then both together."""
    hvd.init([int(os.environ["HOROCLONE_RANK"])])
    loss_one, accuracy_one = said_by_the_example(1)
    hvd.shutdown()
    hvd.init()
    loss_two, accuracy_two = said_by_the_example(2)
    if hvd.rank() == 0:
        assert accuracy_two >= 96.0 and abs(accuracy_two - accuracy_one) <= 1.0  # percentage points
        assert abs(loss_two - loss_one) <= 0.02 * loss_one + 1e-4
