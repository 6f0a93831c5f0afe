"""What scripts do between gradient and step, at random on two ranks, against NumPy in float64 after every step.

One model with one list of actions; a wrong order (clipped, then averaged), a gradient that is not reduced, or ranks
that drift apart show at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

On = Callable[..., list[Any]]
BACKENDS = [("tensorflow", "new"), ("jax", "new"), ("torch", "new"), ("legacy", "new"), ("legacy", "legacy")]
SHAPES = [(3,), (2, 2), ()]


class Reference:
    """SGD with momentum as Keras has it, on gradients that are averaged first."""

    def __init__(self, options: dict[str, Any], factor: float) -> None:
        self.options, self.factor = options, factor
        self.values = [np.zeros(shape) for shape in SHAPES]
        self.momenta = [np.zeros(shape) for shape in SHAPES]
        self.sums: list[Any] = [None] * len(SHAPES)
        self.averages = [np.zeros(shape) for shape in SHAPES]
        self.rate, self.scale, self.passes, self.steps = 0.25, 4.0, 0, 0

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
        if self.options.get("scaled"):
            if not all(np.isfinite(g).all() for grads in everybody for g in grads if g is not None):
                self.scale /= 2
                return
            everybody = [[None if g is None else g / self.scale for g in grads] for grads in everybody]
        self.passes += 1
        for i, of_all in enumerate(zip(*everybody, strict=True)):
            if of_all[0] is not None:
                mean = sum(np.asarray(g, np.float64) for g in of_all) * self.factor
                self.sums[i] = mean if self.sums[i] is None else self.sums[i] + mean
        if self.passes < passes:
            return
        if count := self.options.get("gradient_accumulation_steps"):
            self.sums = [total / count for total in self.sums]
        grads, self.sums, self.passes = self.clipped(self.sums), [None] * len(SHAPES), 0
        for i, gradient in enumerate(grads):
            if gradient is not None:
                self.momenta[i] = 0.5 * self.momenta[i] - self.rate * gradient
                self.values[i] = self.values[i] + self.momenta[i]
        if self.options.get("use_ema"):
            kept = 0.5 if self.steps else 0.0
            self.averages = [
                kept * a + (1 - kept) * v for a, v in zip(self.averages, self.values, strict=True)
            ]
            if self.steps % 2:
                self.values = list(self.averages)
        self.steps += 1


ACTIONS = [
    "scaled", "clipped by hand", "mask", "missing", "through minimize", "function", "copied", "some of them",
    "another order", "sparse", "another rate", "other weights", "infinite",
]  # fmt: skip
OF_PASSES = ["scaled", "clipped by hand", "mask", "missing", "another order", "another rate", "other weights"]


def programs() -> Any:
    from hypothesis import strategies as st

    option = st.sampled_from([
        {}, {"clipnorm": 0.5}, {"global_clipnorm": 0.7}, {"clipvalue": 0.3}, {"scaled": True},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}, {"gradient_accumulation_steps": 2},
    ])  # fmt: skip
    wrapper = st.sampled_from([
        {}, {"sum": True}, {"groups": 2}, {"backward_passes_per_step": 2}, {"gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    ])  # fmt: skip
    steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**16)), min_size=2, max_size=6)
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
    if action in ("missing", "some of them"):
        return [None if i == seed % len(SHAPES) else g for i, g in enumerate(grads)]
    if action == "infinite" and rank == seed % 2:
        grads[seed % len(SHAPES)] = grads[seed % len(SHAPES)] * np.float32(np.inf)
    return grads


def fitting(kind: str, program: Any) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, int]]]:
    """The program in what this Keras has, and without actions that are no part of a step of several passes."""
    from horoclone.keras.flavor import LEGACY

    options, wrapper, steps = program
    if kind == "legacy" and "global_clipnorm" in options:
        options = {"clipvalue": 0.3}
    if LEGACY and {"scaled", "use_ema", "gradient_accumulation_steps"} & set(options):
        options = {}  # tf_keras has them in other forms
    several = "backward_passes_per_step" in wrapper or "gradient_accumulation_steps" in options
    if several:
        allowed = (
            OF_PASSES if "gradient_accumulation_steps" not in options else ["scaled", "mask", "another rate"]
        )
        steps = [(action if action in allowed else "", seed) for action, seed in steps]
    if kind == "legacy" or any(key.startswith(("clip", "global_clip")) for key in options):
        # Keras clips rows before it adds those of one number, and its legacy SGD decays those alone that are there.
        steps = [("" if action == "sparse" else action, seed) for action, seed in steps]
    if LEGACY and steps[0][0] == "another order":  # the first step of tf_keras gives the order
        steps = [("", steps[0][1]), *steps[1:]]
    if "scaled" not in options:
        steps = [("" if action == "infinite" else action, seed) for action, seed in steps]
    elif several:
        wrapper = {}
    return options, dict(wrapper), steps


def runs(kind: str, program: Any) -> None:
    """One program: the same on all ranks, with gradients of each rank's own."""
    import copy

    import horoclone.keras as hvd
    from horoclone.keras.flavor import LEGACY, assign, keras, to_numpy
    from horoclone.keras.learning_rate import set_learning_rate

    options, wrapper, steps = fitting(kind, program)
    op = hvd.Sum if wrapper.pop("sum", False) else hvd.Average
    passes = wrapper.get("backward_passes_per_step", 1) * options.get("gradient_accumulation_steps", 1)
    averaged = wrapper.get("average_aggregated_gradients", False)
    reference = Reference(options, (1.0 if op == hvd.Sum else 1.0 / hvd.size()) / (2 if averaged else 1))
    optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    plain = optimizers.SGD(
        0.25, momentum=0.5, **{key: value for key, value in options.items() if key != "scaled"}
    )
    if options.get("scaled"):
        plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=reference.scale)
    optimizer = hvd.DistributedOptimizer(plain, op=op, **wrapper)
    variables = [made_variable(shape) for shape in SHAPES]
    getattr(optimizer, "build", lambda _: None)(variables)
    for action, seed in steps:
        if action == "copied":
            optimizer = copy.deepcopy(optimizer)
            getattr(optimizer, "build", lambda _: None)(variables)
        if action == "another rate":
            reference.rate = 0.125 + (seed % 3) / 8
            set_learning_rate(optimizer, reference.rate)
        if action == "other weights":
            for i, variable in enumerate(variables):
                reference.values[i] = np.asarray(to_numpy(variable), np.float64) / 2
                assign(variable, np.asarray(reference.values[i], np.float32))
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
    import horoclone.keras as hvd
    from horoclone.keras.flavor import backend, to_tensor

    pairs = [(None if g is None else to_tensor(g), v) for g, v in zip(grads, variables, strict=True)]
    if action == "some of them":
        pairs = [(g, v) for g, v in pairs if g is not None]
    if action == "another order" and hvd.rank() == 1:
        pairs = pairs[::-1]
    scaled = hasattr(optimizer, "inner_optimizer")
    if backend() == "jax" and scaled:
        apply_in_a_program(optimizer, grads, variables)
    elif backend() != "tensorflow":
        optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
    else:
        apply_on_tensorflow(optimizer, pairs, action, legacy)


def apply_in_a_program(optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
    """On JAX a LossScaleOptimizer knows no other form."""
    import jax

    held = [[v.value for v in group] for group in (optimizer.variables, variables)]
    after = jax.jit(optimizer.stateless_apply)(held[0], grads, held[1])
    for group, values in zip((variables, optimizer.variables), after, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


def apply_on_tensorflow(optimizer: Any, pairs: list[Any], action: str, legacy: bool) -> None:
    import tensorflow as tf

    if action == "through minimize" and legacy:
        native = [(g, getattr(v, "value", v) if not isinstance(v, tf.Variable) else v) for g, v in pairs]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(g * v) for g, v in native])
        optimizer.minimize(loss, [v for _, v in pairs], tape=tape)
    elif action == "function":
        tf.function(lambda: optimizer.apply_gradients(pairs) is None)()
    elif action == "sparse":
        rows = [(g, v) for g, v in pairs if len(g.shape)]
        halves = [(tf.concat([g / 4, g * 3 / 4], 0), tf.range(2 * g.shape[0]) % g.shape[0]) for g, _ in rows]
        slices = [
            tf.IndexedSlices(values, indices, tf.shape(g))
            for (values, indices), (g, _) in zip(halves, rows, strict=True)
        ]
        rest = [(g, v) for g, v in pairs if not len(g.shape)]
        optimizer.apply_gradients([*zip(slices, [v for _, v in rows], strict=True), *rest])
    else:
        optimizer.apply_gradients(pairs)


def does_what_scripts_do(kind: str, count: int) -> None:
    from hypothesis import HealthCheck, given, settings

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def every(program: Any) -> None:
        runs(kind, program)

    every()


def made(kind: str, count: int = 2, **options: Any) -> tuple[Any, list[Any]]:
    """A distributed SGD at rate 1, and variables that it is built for."""
    import horoclone.keras as hvd
    from horoclone.keras.flavor import keras

    optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    optimizer, variables = hvd.DistributedOptimizer(optimizers.SGD(1.0), **options), []
    for _ in range(count):
        variables.append(made_variable((2,)))
    getattr(optimizer, "build", lambda _: None)(variables)
    return optimizer, variables


def stepped(optimizer: Any, *steps: tuple[float | None, Any]) -> None:
    """One step; each gradient is its number on rank 0 and twice that on rank 1."""
    from horoclone import runtime
    from horoclone.keras.flavor import to_tensor

    factor = runtime.rank() + 1.0
    optimizer.apply_gradients([
        (None if g is None else to_tensor(np.full(2, g * factor, np.float32)), v) for g, v in steps
    ])  # fmt: skip


def firsts(variables: list[Any]) -> list[float]:
    from horoclone.keras.flavor import to_numpy

    return [float(np.asarray(to_numpy(v))[0]) for v in variables]


def halves_have_their_passes(kind: str) -> None:
    """The two halves of a GAN, in turns: each has its gradients applied, and none is forgotten."""
    optimizer, (a, b) = made(kind, backward_passes_per_step=2)
    for _ in range(4):
        stepped(optimizer, (1.0, a))
        stepped(optimizer, (10.0, b))
    assert firsts([a, b]) == [-6.0, -60.0]


def halves_have_their_passes_after_joint_ones(kind: str) -> None:
    """Given together at first, in turns after that, then together again."""
    optimizer, (a, b) = made(kind, backward_passes_per_step=2)
    for _ in range(2):
        stepped(optimizer, (1.0, a), (10.0, b))
    assert firsts([a, b]) == [-3.0, -30.0]
    for _ in range(4):
        stepped(optimizer, (1.0, a))
        stepped(optimizer, (10.0, b))
    assert firsts([a, b]) == [-9.0, -90.0]
    stepped(optimizer, (1.0, a))
    stepped(optimizer, (1.0, a), (10.0, b))  # whose turn has come takes the other along
    assert firsts([a, b]) == [-12.0, -105.0]


def a_gradient_in_one_pass_counts(kind: str) -> None:
    optimizer, (a, b) = made(kind, backward_passes_per_step=2)
    for first, second in (
        ((1.0, 10.0), (1.0, None)),
        ((1.0, None), (1.0, None)),
        ((None, 10.0), (1.0, None)),
    ):
        stepped(optimizer, (first[0], a), (first[1], b))
        stepped(optimizer, (second[0], a), (second[1], b))
    assert firsts([a, b]) == [-7.5, -30.0]


def others_never_meet(kind: str) -> None:
    """Gradients of different variables, alike in shape and number, are not added up; afterwards the runtime works."""
    import horoclone.keras as hvd

    optimizer, variables = made(kind)
    stepped(optimizer, (0.0, variables[0]), (0.0, variables[1]))
    with pytest.raises(Exception, match=r"variables\.0\.of\.2.*variables\.1\.of\.2"):
        stepped(optimizer, (1.0, variables[hvd.rank()]))
    assert firsts(variables) == [0.0, 0.0]
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()


def optimizers_never_meet(kind: str) -> None:
    """Two optimizers of one form, in opposite orders; a third one that is made and left alone changes nothing."""
    import horoclone.keras as hvd

    (first, of_first), (second, of_second) = made(kind), made(kind)
    order = [(first, of_first, 1.0), (second, of_second, 10.0)]
    for optimizer, variables, g in order if hvd.rank() == 0 else order[::-1]:
        with pytest.raises(Exception, match=r"'DistributedSGD.*'DistributedSGD"):
            stepped(optimizer, (g, variables[0]), (g, variables[1]))
    assert firsts(of_first + of_second) == [0.0] * 4
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()


def optimizers_of_one_form_are_told_apart_alike(kind: str) -> None:
    """Whichever begins, and whatever one rank alone has made since, copied, or was given by a checkpoint."""
    import horoclone.keras as hvd

    (first, of_first), (second, of_second) = made(kind), made(kind)
    if hvd.rank() == 1:
        type(first).from_config(first.get_config())
    for optimizer, variables in ((second, of_second), (first, of_first), (second, of_second)):
        stepped(optimizer, (1.0, variables[0]), (10.0, variables[1]))
    if hvd.rank() == 0:
        made(kind)
    stepped(first, (1.0, of_first[0]), (10.0, of_first[1]))
    assert firsts(of_first + of_second) == [-3.0, -30.0, -3.0, -30.0]


# --- tests -----------------------------------------------------------------------------------------------------------


BODIES = [
    halves_have_their_passes, halves_have_their_passes_after_joint_ones, a_gradient_in_one_pass_counts, others_never_meet, optimizers_never_meet,
    optimizers_of_one_form_are_told_apart_alike,
]  # fmt: skip


@pytest.mark.in_turn
@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.long(40))])
@pytest.mark.parametrize("backend, kind", BACKENDS)
def test_every_program_gives_what_numpy_gives(on: On, backend: str, kind: str, count: int) -> None:
    on(backend, does_what_scripts_do, kind=kind, count=count)


@pytest.mark.in_turn("backend", "kind")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("backend, kind", BACKENDS)
def test_some_of_the_variables(on: On, backend: str, kind: str, body: Any) -> None:
    on(backend, body, kind=kind, env={"HOROCLONE_DEADLOCK_TIME_SECONDS": "0.5"})
