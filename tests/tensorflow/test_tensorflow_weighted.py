"""Weighted means of TensorFlow's tensors and of a tape's gradients, eagerly and in graphs: tests/weighted.py, and what
TensorFlow alone has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from world import later, load, ranks

tf = later("tensorflow")
hvd = later("horoclone.tensorflow")


weighted = load(Path(__file__).parents[1] / "weighted.py", "weighted")


def array(values: Any, dtype: str) -> Any:
    return tf.cast(tf.constant(values, tf.float64), dtype)  # of a float, tf.cast would make float32 first


def grouped(x: Any, name: Any, weight: Any) -> Any:
    x = tf.convert_to_tensor(x)
    return hvd.grouped_allreduce([x, x[0]], name=name, weight=weight)[0]


@functools.cache
def traced(name: Any, is_weighted: bool) -> Any:
    return tf.function(lambda x, w: hvd.allreduce(x, name=name, weight=w if is_weighted else None))


def graph(x: Any, name: Any, weight: Any) -> Any:
    """Unnamed it is traced anew, on each rank."""
    run = (traced if name else traced.__wrapped__)(name, weight is not None)
    weight = 0.0 if weight is None else weight
    if isinstance(weight, int):
        return run(x, tf.constant(weight))  # int32, as a count of samples is
    return run(x, weight if tf.is_tensor(weight) else array(weight, "float64"))


def with_variable(x: Any, name: Any, weight: Any) -> Any:
    weight = None if weight is None else tf.Variable(weight, dtype=tf.float64)
    return hvd.allreduce(x, name=name, weight=weight)


def gradient(form: Any, x: Any, scale: float, weight: Any) -> Any:
    variable = tf.Variable(x)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(form(variable, name=None, weight=weight)) * scale
    return tape.gradient(y, variable)


def trained(in_a_graph: bool) -> Any:
    def gradients(a: Any, b: Any, x: Any, y: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            loss = tf.reduce_mean((tf.tanh(x @ a) @ b - y) ** 2)
        return hvd.DistributedGradientTape(tape, weight=weight).gradient(loss, [a, b])

    kinds = [tf.TensorSpec(shape, tf.float64) for shape in ([5, 7], [7, 1], [None, 5], [None, 1], [])]
    run = tf.function(gradients, input_signature=kinds) if in_a_graph else gradients
    return lambda p, x, y, weight: run(*(tf.constant(one, tf.float64) for one in (*p, x, y, weight)))


@pytest.mark.parametrize("question", weighted.NAMES)
@ranks(3, limit_s=180)
def test_as_any_binding(question: str) -> None:
    calls = weighted.Calls(
        hvd, hvd.join, array, lambda tensor: tensor.numpy(),
        [hvd.allreduce, with_variable, grouped, graph], gradient, tf.errors.InvalidArgumentError,
        tf.errors.FailedPreconditionError, [hvd.grouped_allreduce], [trained(False), trained(True)],
    )  # fmt: skip
    weighted.ask(question, calls)


@ranks(2)
def test_a_weight_for_rows_alone_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="weight="):
        hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2])), weight=1)


@ranks(2)
def test_a_tape_says_what_weights_do_not_work_with() -> None:
    for options in {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}:
        with pytest.raises(ValueError, match="weight="):
            hvd.DistributedGradientTape(tf.GradientTape(), weight=1, **options)
    variable = tf.Variable([[1.0], [2.0]])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.gather(variable, [0]))
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        hvd.DistributedGradientTape(tape, weight=1).gradient(y, [variable])
