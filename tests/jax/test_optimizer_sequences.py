"""Sequences of what scripts do with DistributedOptimizer, on two ranks, compared with NumPy in 64 bits after each step.

No rank may drift, and no option, dtype or copy may change what is computed.
"""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from world import later, ranks

jax = later("jax")
optax = later("optax")
jnp = later("jax.numpy")
hvd = later("horoclone.jax")


RATE, MOMENTUM, LIMIT = 0.125, 0.5, 1.0
SHAPES = {"w": (3, 2), "b": (2,), "n": (), "empty": (0, 4), "frozen": (2,)}
TOLERANCE = {"bfloat16": 4e-2, "float16": 6e-3, "float32": 1e-5, "float64": 1e-13}


@dataclass(frozen=True)
class Case:
    passes: int
    op: str
    predivide: float
    compression: str
    params: str
    grads: str
    clips_before: bool
    clips_after: bool
    frozen: str  # what its gradient is: "array", "None"
    how: str  # the wrapped transformation
    around: str  # what is put around the distributed one
    actions: tuple[str, ...]


CASES = st.builds(
    Case,
    passes=st.sampled_from([1, 2, 3]),
    op=st.sampled_from(["Average", "Sum", "Average", "Min", "Max", "Adasum"]),
    predivide=st.sampled_from([1.0, 4.0]),
    compression=st.sampled_from(["none", "none", "bf16"]),
    params=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    grads=st.sampled_from(["float32", "bfloat16", "float32", "float64"]),
    clips_before=st.booleans(),
    clips_after=st.booleans(),
    frozen=st.sampled_from(["array", "None"]),
    how=st.sampled_from(["plain", "inject", "finite", "multi"]),
    around=st.sampled_from(["nothing", "MultiSteps"]),
    actions=st.lists(
        st.sampled_from(
            [
                "jit",
                "eager",
                "deepcopy",
                "pickle",
                "copy optimizer",
                "broadcast",
                "weak",
                "another tree",
                "donated",
            ]
        ),
        min_size=4,
        max_size=6,
    ).map(tuple),
)


def gradient(rank: int, step: int, dtype: str) -> dict[str, Any]:
    """Of multiples of 1/8, which 16-bit floats hold."""
    chance = np.random.default_rng([rank, step])
    raw = {name: chance.integers(-8, 9, shape) / 8 for name, shape in SHAPES.items()}
    return {name: np.asarray(jnp.asarray(value, dtype), np.float64) for name, value in raw.items()}


def clipped(grads: dict[str, Any]) -> dict[str, Any]:
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    return grads if norm < LIMIT else {name: g / norm * LIMIT for name, g in grads.items()}


def adasum(a: Any, b: Any) -> Any:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa if aa else 1)) * a + (1 - dot / (2 * bb if bb else 1)) * b


REDUCED: dict[str, Any] = {
    "Average": lambda a, b: (a + b) / 2, "Sum": np.add, "Min": np.minimum, "Max": np.maximum, "Adasum": adasum,
}  # fmt: skip


class Reference:
    def __init__(self, case: Case) -> None:
        self.case, self.pass_number = case, 0
        self.passes = case.passes * (2 if has_multi_steps(case) else 1)
        self.names = [n for n in SHAPES if n != "frozen" or case.frozen == "array"]
        self.p = {name: np.full(shape, 0.5) for name, shape in SHAPES.items()}
        self.trace = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.sums = [{name: np.zeros(SHAPES[name]) for name in self.names} for _ in range(2)]

    def step(self, number: int) -> None:
        for rank, gathered in enumerate(self.sums):
            mine = {n: g for n, g in gradient(rank, number, self.case.grads).items() if n in self.names}
            mine = clipped(mine) if self.case.clips_before else mine
            for name in self.names:
                gathered[name] = gathered[name] + mine[name] / self.passes
        self.pass_number += 1
        if self.pass_number % self.passes:
            return
        g = {n: REDUCED[self.case.op](self.sums[0][n], self.sums[1][n]) for n in self.names}
        self.sums = [{name: np.zeros(SHAPES[name]) for name in self.names} for _ in range(2)]
        g = clipped(g) if self.case.clips_after else g
        for name in self.names:
            momentum = 0 if self.case.how == "multi" and name == "b" else MOMENTUM
            self.trace[name] = g[name] + momentum * self.trace[name]
            self.p[name] = self.p[name] - RATE * self.trace[name]


def has_multi_steps(case: Case) -> bool:
    """Where Optax's own sums have the form of the parameters, and nothing is clipped between them and ours."""
    alike = case.params == case.grads and case.frozen == "array"
    return case.around == "MultiSteps" and alike and not case.clips_before


def optimizer(case: Case) -> Any:
    inner: Any = optax.sgd(RATE, MOMENTUM)
    if case.how == "inject":
        inner = optax.inject_hyperparams(optax.sgd)(learning_rate=RATE, momentum=MOMENTUM)
    elif case.how == "finite" and case.params == case.grads and case.frozen == "array":
        # else Optax's own branches differ, in dtype or in what momentum they have
        inner = optax.apply_if_finite(inner, 3)
    elif case.how == "multi":
        labels = {name: "flat" if name == "b" else "heavy" for name in SHAPES}
        inner = optax.multi_transform({"heavy": inner, "flat": optax.sgd(RATE)}, labels)
    if case.clips_after:
        inner = optax.chain(optax.clip_by_global_norm(LIMIT), inner)
    wrapped = hvd.DistributedOptimizer(
        inner, op=getattr(hvd, case.op), backward_passes_per_step=case.passes,
        compression=getattr(hvd.Compression, case.compression),
        gradient_predivide_factor=case.predivide if case.op == "Average" else 1.0,
    )  # fmt: skip
    if has_multi_steps(case):
        return optax.MultiSteps(wrapped, 2)
    return optax.chain(optax.clip_by_global_norm(LIMIT), wrapped) if case.clips_before else wrapped


def steps_of_another_tree(tx: Any, case: Case) -> None:
    """The same optimizer for a tree of another structure, in between, with a state of its own."""
    p = {
        "w": jnp.zeros(2, case.params),
        "more": [jnp.zeros((), case.params), {"b": jnp.zeros(3, case.params)}],
    }
    g = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.125, case.grads), p)
    state, update = tx.init(p), jax.jit(tx.update)
    for _ in range(case.passes * (2 if has_multi_steps(case) else 1)):
        changes, state = update(g, state, p)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(changes)]
    assert all(np.allclose(leaf, leaves[0].flat[0]) and leaf.flat[0] < 0 for leaf in leaves), changes


def run(case: Case) -> None:
    tx, reference = optimizer(case), Reference(case)
    p = {name: jnp.full(shape, 0.5, case.params) for name, shape in SHAPES.items()}
    state = tx.init(p)

    def update(p: Any, state: Any, g: Any) -> Any:
        changes, state = tx.update(g, state, p)
        if case.frozen == "None":
            changes = {**changes, "frozen": jnp.zeros_like(p["frozen"])}
        return optax.apply_updates(p, changes), state

    program, giving_away = jax.jit(update), jax.jit(update, donate_argnums=(0, 1))
    for number, action in enumerate(case.actions):
        g: dict[str, Any] = {
            n: jnp.asarray(v, case.grads) for n, v in gradient(hvd.rank(), number, case.grads).items()
        }
        if case.frozen == "None":
            g["frozen"] = None
        if action == "deepcopy":
            state, p = copy.deepcopy((state, p))
        elif action == "pickle":
            state, p = pickle.loads(pickle.dumps((state, p)))
        elif action == "broadcast":
            state, p = hvd.broadcast((state, p), 0)
            reference.sums[1] = dict(reference.sums[0])  # what was gathered is a part of the state
        elif action == "copy optimizer":
            tx = copy.deepcopy(tx)
        elif action == "weak" and case.grads == "float32":
            g["n"] = jnp.asarray(float(g["n"]))
            assert g["n"].weak_type
        elif action == "another tree" and case.how == "plain":
            steps_of_another_tree(tx, case)
        if action == "donated":
            p, state = giving_away(*jax.tree.map(jnp.copy, (p, state)), g)
        else:
            p, state = update(p, state, g) if action in ("eager", "copy optimizer") else program(p, state, g)
        reference.step(number)
        dtypes = [case.params, case.grads, *["bfloat16"] * (case.compression == "bf16")]
        tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
        for name in SHAPES:
            got, wanted = np.asarray(p[name], np.float64), reference.p[name]
            assert p[name].dtype == case.params
            assert np.allclose(got, wanted, rtol=tolerance, atol=tolerance), (case, number, name, got, wanted)
        mine = (
            [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves((p, state))]
            if reference.passes == 1
            else [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(p)]
        )
        assert all(other == mine for other in hvd.allgather_object(mine)), (case, number, "the ranks differ")


@pytest.mark.long(90)
@ranks(2, limit_s=300)
def test_sequences_compute_what_numpy_does() -> None:
    @settings(
        max_examples=int(os.environ.get("HOROCLONE_TEST_EXAMPLES", "12")),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
    )
    @given(CASES)
    def sequences(case: Case) -> None:
        with jax.enable_x64("float64" in (case.params, case.grads)):
            run(case)

    sequences()
