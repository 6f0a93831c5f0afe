"""What scripts do between gradient and step, at random on two ranks, against NumPy in float64 after every step.

One model with one list of actions; a wrong order (clipped, then averaged), a gradient that is not reduced, or ranks
that drift apart show at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

On = Callable[..., list[Any]]
BACKENDS = [("tensorflow", "new"), ("jax", "new"), ("torch", "new"), ("legacy", "new"), ("legacy", "legacy")]
SHAPES = [(3,), (2, 2), ()]
SECONDS = 12.0


class Reference:
    """SGD with momentum as Keras has it, on gradients that are averaged first."""

    def __init__(self, options: dict[str, Any], factor: float) -> None:
        self.options, self.factor = options, factor
        self.values = [np.zeros(shape) for shape in SHAPES]
        self.momenta = [np.zeros(shape) for shape in SHAPES]
        self.sums: list[Any] = [None] * len(SHAPES)
        self.passes = 0

    def clipped(self, grads: list[Any]) -> list[Any]:
        there = [g for g in grads if g is not None]
        if (norm := self.options.get("global_clipnorm")) is not None:
            whole = np.sqrt(sum((g**2).sum() for g in there))
            return [g if g is None else g * min(1.0, norm / max(whole, 1e-30)) for g in grads]
        if (norm := self.options.get("clipnorm")) is not None:
            own = [g if g is None else max(np.sqrt((g**2).sum()), 1e-30) for g in grads]
            return [g if g is None else g * min(1.0, norm / n) for g, n in zip(grads, own, strict=True)]
        if (most := self.options.get("clipvalue")) is not None:
            return [g if g is None else np.clip(g, -most, most) for g in grads]
        return grads

    def step(self, everybody: list[list[Any]], passes: int) -> None:
        """everybody: each rank's gradients, as they are when the optimizer gets them."""
        self.passes += 1
        for i, of_all in enumerate(zip(*everybody, strict=True)):
            if of_all[0] is not None:
                mean = sum(np.asarray(g, np.float64) for g in of_all) * self.factor
                self.sums[i] = mean if self.sums[i] is None else self.sums[i] + mean
        if self.passes < passes:
            return
        grads, self.sums, self.passes = self.clipped(self.sums), [None] * len(SHAPES), 0
        for i, gradient in enumerate(grads):
            if gradient is not None:
                self.momenta[i] = 0.5 * self.momenta[i] - 0.25 * gradient
                self.values[i] = self.values[i] + self.momenta[i]


ACTIONS = ["scaled", "clipped by hand", "mask", "missing", "through minimize", "function", "copied"]


def programs() -> Any:
    from hypothesis import strategies as st

    option = st.sampled_from([
        {}, {"clipnorm": 0.5}, {"global_clipnorm": 0.7}, {"clipvalue": 0.3}
    ])  # fmt: skip
    wrapper = st.sampled_from([
        {}, {"sum": True}, {"groups": 2}, {"backward_passes_per_step": 2}, {"gradient_predivide_factor": 2.0}
    ])  # fmt: skip
    steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**16)), min_size=2, max_size=5)
    return st.tuples(option, wrapper, steps)


# --- what the ranks run ----------------------------------------------------------------------------------------------


def drawn(seed: int, rank: int, action: str) -> list[Any]:
    """A rank's gradients after what its script did to them."""
    chance = np.random.default_rng([seed, rank])
    grads: list[Any] = [np.asarray(chance.normal(size=shape), np.float32) for shape in SHAPES]
    if action == "scaled":
        return [np.asarray(g * np.float32(0.5), np.float32) for g in grads]
    if action == "clipped by hand":
        whole = np.sqrt(sum((g**2).sum() for g in grads))
        return [np.asarray(g / max(whole, np.float32(1)), np.float32) for g in grads]
    if action == "mask":
        return [np.asarray(np.where(g > 0, g, 0), np.float32) for g in grads]
    if action == "missing":
        return [None if i == seed % len(SHAPES) else g for i, g in enumerate(grads)]
    return grads


def runs(kind: str, program: Any) -> None:
    """One program: the same on all ranks, with gradients of each rank's own."""
    import copy

    import horoclone.keras as hvd
    from horoclone.keras.flavor import LEGACY, keras, to_numpy

    options, wrapper, steps = program
    if kind == "legacy" and "global_clipnorm" in options:
        options = {"clipvalue": 0.3}
    wrapper = dict(wrapper)
    op = hvd.Sum if wrapper.pop("sum", False) else hvd.Average
    passes = wrapper.get("backward_passes_per_step", 1)
    if passes > 1:
        steps = [("", seed) for _, seed in steps]  # a gradient is there in every pass, and no copy in between
    reference = Reference(options, 1.0 if op == hvd.Sum else 1.0 / hvd.size())
    optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.25, momentum=0.5, **options), op=op, **wrapper)
    variables = [made_variable(shape) for shape in SHAPES]
    getattr(optimizer, "build", lambda _: None)(variables)
    for action, seed in steps:
        if action == "copied":
            optimizer = copy.deepcopy(optimizer)
            getattr(optimizer, "build", lambda _: None)(variables)
        everybody = [drawn(seed, rank, action) for rank in range(hvd.size())]
        apply(optimizer, everybody[hvd.rank()], variables, action, LEGACY)
        reference.step(everybody, passes)
        repr(optimizer), float(np.asarray(to_numpy(optimizer.learning_rate))), optimizer.get_config()
        for mine, right in zip(variables, reference.values, strict=True):
            np.testing.assert_allclose(to_numpy(mine), right, rtol=2e-5, atol=2e-6, err_msg=str(program))


def made_variable(shape: Any) -> Any:
    from horoclone.keras.flavor import LEGACY, keras

    if not LEGACY:
        return keras.Variable(np.zeros(shape, np.float32))
    import tensorflow as tf

    return tf.Variable(np.zeros(shape, np.float32))


def apply(optimizer: Any, grads: list[Any], variables: list[Any], action: str, legacy: bool) -> None:
    from horoclone.keras.flavor import backend, to_tensor

    tensors = [None if g is None else to_tensor(g) for g in grads]
    if backend() != "tensorflow":
        optimizer.apply(tensors, variables)
        return
    import tensorflow as tf

    pairs = list(zip(tensors, variables, strict=True))
    if action == "through minimize" and legacy:
        native = [(g, getattr(v, "value", v) if not isinstance(v, tf.Variable) else v) for g, v in pairs]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(g * v) for g, v in native])
        optimizer.minimize(loss, variables, tape=tape)
    elif action == "function":
        tf.function(lambda: optimizer.apply_gradients(pairs) is None)()
    else:
        optimizer.apply_gradients(pairs)


def does_what_scripts_do(kind: str, seconds: float) -> int:
    from hypothesis import HealthCheck, given, settings

    import horoclone.keras as hvd

    end, count = time.monotonic() + seconds, 0

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def every(program: Any) -> None:
        nonlocal count
        if all(hvd.allgather_object(time.monotonic() < end)):  # all ranks stop at the same one
            runs(kind, program)
            count += 1

    every()
    return count


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend, kind", BACKENDS)
def test_every_program_gives_what_numpy_gives(on: On, backend: str, kind: str) -> None:
    counts = on(backend, does_what_scripts_do, kind=kind, seconds=SECONDS * (2.5 if backend == "jax" else 1))
    assert len(set(counts)) == 1 and counts[0] >= 1  # JAX compiles each operation
