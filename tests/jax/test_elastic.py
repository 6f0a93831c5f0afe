"""hvd.elastic of JAX: pytrees that are committed, restored and synchronised, and programs that fail in the loop."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from world import later, ranks

jax = later("jax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


@ranks(2)
def test_pytrees_keys_and_attributes_are_restored_and_synchronised() -> None:
    me = hvd.rank()
    tree = {"w": jnp.full((2, 3), float(me)), "b": (jnp.zeros((), jnp.bfloat16), jnp.zeros((0, 2)))}
    state = hvd.elastic.JaxState(params=tree, key=jax.random.key(me), epoch=me, log=[])
    assert state.params is tree
    state.sync()
    assert float(state.params["w"].sum()) == 0.0 and state.epoch == 0
    assert state.params["b"][0].dtype == jnp.bfloat16 and state.params["b"][1].shape == (0, 2)
    assert jax.random.uniform(state.key) == jax.random.uniform(jax.random.key(0))
    state.params = jax.tree_util.tree_map(lambda leaf: leaf + 1, state.params)
    state.epoch = 1
    state.commit()
    state.params = jax.tree_util.tree_map(lambda leaf: leaf * 5, state.params)
    state.log.append("x")
    state.restore()
    assert float(state.params["w"][0, 0]) == 1.0 and state.log == [] and state.epoch == 1
    state._step_back(1)
    assert float(state.params["w"][0, 0]) == 0.0 and state.epoch == 0


@ranks(1)
def test_a_commit_brings_its_trees_back_in_their_form() -> None:
    """Leaves were once matched by their places, so that values came into other leaves of trees that had changed."""
    state = hvd.elastic.JaxState(params={"a": jnp.ones(2), "c": jnp.full(2, 3.0)}, count=(jnp.int32(7), 1))
    named = hvd.elastic.JaxState(model={"w": jnp.ones(2), "kind": "conv", "depth": 3, "bias": True})
    named.restore()
    assert [type(named.model[key]) for key in ("kind", "depth", "bias")] == [str, int, bool]
    assert named.model["kind"] == "conv"
    state.commit()
    state.params = {"b": jnp.full(2, 2.0), **state.params}
    state.restore()
    assert {name: float(leaf[0]) for name, leaf in state.params.items()} == {"a": 1.0, "c": 3.0}
    assert jax.tree_util.tree_map(int, state.count) == (7, 1)
    state.params, state.count = {"c": jnp.zeros(2)}, [jnp.zeros(2)]
    state.restore()
    assert {name: float(leaf[0]) for name, leaf in state.params.items()} == {"a": 1.0, "c": 3.0}
    assert type(state.count) is tuple and jax.tree_util.tree_map(int, state.count) == (7, 1)


@ranks(2)
def test_ranks_with_other_trees_all_hear_of_it() -> None:
    state = hvd.elastic.JaxState(params=jnp.zeros(3 + hvd.rank()))
    with pytest.raises(ValueError, match=r"the variables of ranks \[1\] differ from those of rank 0"):
        state.sync()
    state.params = {"bias": jnp.zeros(3)} if hvd.rank() else {"scale": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"params\['bias'\].* here and .*params\['scale'\].* there"):
        state.sync()


@ranks(1)
def test_a_commit_from_another_rank_needs_leaves_of_the_same_names() -> None:
    state = hvd.elastic.JaxState(params={"a": jnp.ones(2)}, epoch=0)
    came = pickle.loads(pickle.dumps(state._content()))
    assert state._accepts(came)
    state._set_content(came)
    state.params = {"b": jnp.zeros(2), "c": jnp.zeros(3)}
    state.restore()
    assert list(state.params) == ["a"] and float(state.params["a"][0]) == 1.0
    state.params = {"b": jnp.zeros(2)}
    assert not state._accepts(came), "its values would come into another leaf"


@ranks(2)
def test_training_goes_on_after_a_failure() -> None:
    state = hvd.elastic.JaxState(w=jnp.ones(3), steps=0)
    failures = [RuntimeError("INTERNAL: PeerLost: rank 7 is gone"), RuntimeError("INTERNAL: Aborted: x")]
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)

    @hvd.elastic.run
    def train(state: object) -> int:
        step = jax.jit(lambda w, x: w - 0.1 * hvd.allreduce(w * x))
        while state.steps < 4:
            state.w = step(state.w, jnp.float32(hvd.rank()))
            if state.steps == 2 and failures:
                raise failures.pop()
            state.steps += 1
            state.commit()
        return state.steps

    assert train(state) == 4 and not failures and len(sampler) == 4
    assert np.allclose(state.w, 0.95**4)
    with pytest.raises(RuntimeError, match="other"):
        hvd.elastic.run(lambda state: (_ for _ in ()).throw(RuntimeError("other")))(state)
