"""The ranks' parameters and the optimizer's state are compared, inside and outside of programs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, load, ranks

jax = later("jax")
optax = later("optax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


compared = load(Path(__file__).parents[1] / "told.py", "told")
told = compared.told


def _loss(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(jnp.tanh(x @ p["w"] + p["b"]) @ p["out"]))


@functools.cache
def _gradients() -> Any:
    return jax.jit(jax.grad(_loss))


class Training:
    """A small model, and its step as a program or not."""

    def __init__(self, program: bool, seed: int = 0, passes_params: bool = True, **options: Any) -> None:
        chance = np.random.default_rng(seed)
        self.params = {
            name: jnp.asarray(chance.normal(size=shape), jnp.float32)
            for name, shape in {"w": (4, 3), "b": (3,), "out": (3, 2)}.items()
        }
        tx = hvd.DistributedOptimizer(optax.sgd(0.01, momentum=0.9), **options)
        self.state = tx.init(self.params)

        def step(params: Any, state: Any, x: Any) -> Any:
            changes, state = tx.update(_gradients()(params, x), state, params if passes_params else None)
            return optax.apply_updates(params, changes), state

        self._step = jax.jit(step) if program else step

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = jnp.asarray(np.random.normal(size=(5, 4)), jnp.float32)
            self.params, self.state = self._step(self.params, self.state, x)
        jax.block_until_ready(self.params)

    def broadcast(self) -> None:
        self.params, self.state = hvd.broadcast((self.params, self.state), 0)

    def flip(self) -> None:
        value = np.array(self.params["out"])
        value.reshape(-1).view(np.uint8)[1] ^= 8
        self.params["out"] = jnp.asarray(value)

    def flip_state(self) -> None:
        def flipped(path: Any, leaf: Any) -> Any:
            if jax.tree_util.keystr(path) != ".inner[0].trace['w']":
                return leaf
            value = np.array(leaf)
            value.reshape(-1).view(np.uint8)[0] ^= 1
            return jnp.asarray(value)

        self.state = jax.tree_util.tree_map_with_path(flipped, self.state)


@ranks(2, limit_s=180)
def test_a_forgotten_broadcast_is_found_and_one_after_the_first_step_is_none() -> None:
    error = r"not yet after step 3, the ranks .* the parameter \['out'\]"
    compared.finds_a_forgotten_broadcast(Training, hvd.rank(), "", error)
    for program in (False, True):
        with told("repair"):
            training = Training(program)
            training.steps(3)
            if hvd.rank() == 1:
                training.flip()
            with pytest.raises(Exception, match="cannot be repaired"):
                training.steps(1)


@ranks(2, limit_s=180)
def test_with_fewer_comparisons_a_forgotten_broadcast_is_found_after_the_tenth_step() -> None:
    compared.finds_one_forgotten_after_the_tenth_step(Training, hvd.rank())


@ranks(3, limit_s=180)
def test_a_flipped_bit_is_found_at_the_next_check() -> None:
    for program, options in (
        (False, {}),
        (True, {"compression": hvd.Compression.bf16}),
        (True, {"backward_passes_per_step": 2}),
    ):
        with told("warn") as lines:
            training = Training(program, **options)
            training.steps(4)
            assert not lines
            if hvd.rank() == 1:
                training.flip()
            training.steps(2)
            assert len(lines) == (hvd.rank() == 0), (options, lines)
            assert all("the parameter ['out']" in line and "rank 1 (against" in line for line in lines)


@ranks(2, limit_s=180)
def test_an_ensemble_and_one_optimizer_for_two_trees_are_no_difference() -> None:
    """Under vmap a program takes every branch."""
    with told("error"):
        tx = hvd.DistributedOptimizer(optax.adam(0.01))

    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(lambda p: jnp.mean(jnp.square(sum(jnp.sum(x * one) for one in p.values()))))(
            params
        )
        changes, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4))}
    state, each = jax.vmap(tx.init)(params), jax.jit(jax.vmap(step))
    for _ in range(4):
        params, state = each(params, state, jnp.full((3, 4), hvd.rank() + 1.0))
    trees = [{"a": jnp.ones(4), "b": jnp.ones(4), "c": jnp.ones(4)}, {"d": jnp.ones(4), "e": jnp.ones(4)}]
    states, step = [tx.init(tree) for tree in trees], jax.jit(step)
    for _ in range(4):
        for i in range(2):
            trees[i], states[i] = step(trees[i], states[i], jnp.ones(4))
    trees[0]["c"] += hvd.rank()
    with pytest.raises(Exception, match=r"the parameter \['c'\]"):
        jax.block_until_ready(step(trees[0], states[0], jnp.ones(4)))


@ranks(2, limit_s=180)
def test_state_is_compared_also_where_update_is_given_no_parameters() -> None:
    with told("warn") as lines:
        training = Training(True, passes_params=False)
        training.steps(4)
        if hvd.rank() == 1:
            training.flip_state()
        training.steps(1)
        assert len(lines) == (hvd.rank() == 0), lines
        assert all("the optimizer's state [0].trace['w']" in line for line in lines), lines


@ranks(2, limit_s=180)
def test_a_rank_on_a_gpu_and_one_on_a_cpu_train_together_and_compare_nothing() -> None:
    backend = jax.default_backend
    if hvd.rank() == 1:
        jax.default_backend = lambda: "gpu"
    try:
        for program in (False, True):
            with told("error"):
                training = Training(program, hvd.rank())
                training.steps(4)
    finally:
        jax.default_backend = backend


@ranks(2, limit_s=180)
def test_after_its_one_warning_a_program_exchanges_nothing_until_ranks_are_new() -> None:
    from horoclone.arrays.compared import ArrayComparison
    from horoclone.runtime import steps

    calls, settle = [], ArrayComparison.settle
    ArrayComparison.settle = lambda self, *args: (calls.append(args), settle(self, *args))[1]
    try:
        with told("warn") as lines:
            training = Training(True, hvd.rank())
            training.steps(5)
            assert len(calls) == 1 and len(lines) == (hvd.rank() == 0), (calls, lines)
            steps.restart()  # as init() does
            training.steps(3)
            assert len(calls) == 2 and len(lines) == 2 * (hvd.rank() == 0), (calls, lines)
    finally:
        ArrayComparison.settle = settle


@ranks(2, limit_s=180)
def test_two_trees_of_a_program_that_both_differ_do_not_mix() -> None:
    """One optimizer for two trees: what tells them apart is in the name of the exchange."""
    from horoclone.arrays.compared import ArrayComparison

    names, settle = set(), ArrayComparison.settle
    ArrayComparison.settle = lambda self, *args: (names.add(self._name), settle(self, *args))[1]
    trees = [dict.fromkeys(names, jnp.full(3, hvd.rank() + 1.0)) for names in ("ab", "cde")]
    with told("warn") as lines:
        tx = hvd.DistributedOptimizer(optax.sgd(0.0))
        states = [tx.init(tree) for tree in trees]

        @jax.jit
        def step(states: Any) -> Any:
            each = zip(trees, states, strict=True)
            changed = [tx.update(tree, state, tree) for tree, state in each]
            return [one for one, _ in changed], [state for _, state in changed]

        try:
            for _ in range(3):
                changes, states = step(states)
            jax.block_until_ready(changes)
        finally:
            ArrayComparison.settle = settle
        assert len(names) == 2, names
        assert len(lines) == 2 * (hvd.rank() == 0), lines
