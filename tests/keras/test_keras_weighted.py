"""Weighted means of gradients in Keras 3, on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

BACKENDS = ["tensorflow", "jax", "torch"]


def _update(optimizer: Any, gradients: list[Any], variables: list[Any], weight: Any = None) -> None:
    """In a compiled function where the backend has one, with the weight as an argument of it."""
    import keras

    backend = keras.backend.backend()
    if backend == "torch":
        if weight is not None:
            optimizer.set_weight(weight)
        optimizer.apply(gradients, variables)
        return
    if not optimizer.built:
        optimizer.build(variables)
    if backend == "tensorflow":
        import tensorflow as tf

        def update(gradients: Any, weight: Any) -> None:
            if weight is not None:
                optimizer.set_weight(weight)
            optimizer.apply(gradients, variables)

        tf.function(update)(gradients, None if weight is None else tf.constant(weight))
        return
    import jax

    def stateless(state: Any, gradients: Any, values: Any, weight: Any) -> Any:
        if weight is not None:
            optimizer.set_weight(weight)
        return optimizer.stateless_apply(state, gradients, values)

    held = [[v.value for v in group] for group in (optimizer.variables, variables)]
    after = jax.jit(stateless)(held[0], gradients, held[1], weight)
    for group, values in zip((variables, optimizer.variables), after, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


def updates_with_the_weighted_mean() -> None:
    import keras

    import horoclone.keras as hvd

    plain = (hvd.size() + 1) / 2
    steps = ((1003.0, 17.0), 1037 / 1020), ((None, None), plain), ((1003.0, 0.0), 1.0)
    for groups in None, 2:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=groups)
        variables = [keras.Variable(np.zeros(shape, np.float32)) for shape in ((3,), (2, 2), ())]
        moved = 0.0
        for weights, mean in steps:
            own = weights[hvd.rank()]
            nothing = own == 0.0  # the loss of no samples is NaN
            gradients = [
                keras.ops.full(v.shape, math.nan if nothing else hvd.rank() + 1.0) for v in variables
            ]
            _update(optimizer, gradients, variables, own)
            moved -= mean
            for variable in variables:
                value = keras.ops.convert_to_numpy(variable)
                np.testing.assert_allclose(value, np.full(value.shape, moved), rtol=1e-6)


def says_what_is_wrong() -> None:
    import keras

    import horoclone.keras as hvd

    variables = [keras.Variable(np.zeros(3, np.float32))]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    gradients = [keras.ops.ones(3)]
    _update(optimizer, gradients, variables)
    with pytest.raises(Exception, match="rank 1 gave the weight -2, which is negative"):
        _update(optimizer, gradients, variables, -2.0 if hvd.rank() == 1 else 1.0)
    with pytest.raises(Exception, match="give weight= where the others do"):
        _update(optimizer, gradients, variables, 1.0 if hvd.rank() == 1 else None)
    before = keras.ops.convert_to_numpy(variables[0])
    _update(optimizer, gradients, variables, 1.0 + hvd.rank())
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[0]), before - 1)
    for options in {"op": hvd.Sum}, {"backward_passes_per_step": 2}, {"gradient_predivide_factor": 2.0}:
        refusing = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        with pytest.raises(ValueError, match=r"set_weight\(\) works with op=hvd.Average"):
            refusing.set_weight(1)
    local = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    local.register_local_var(variables[0])
    with pytest.raises(ValueError, match="local variables"):
        _update(local, gradients, variables, 1.0)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_takes_the_weighted_mean(on: Callable[..., Any], backend: str) -> None:
    on(backend, updates_with_the_weighted_mean)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_weights_are_said_on_every_rank_and_training_goes_on(
    on: Callable[..., Any], backend: str
) -> None:
    on(backend, says_what_is_wrong)
