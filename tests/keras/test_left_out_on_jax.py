"""Keras on JAX: a step that one rank alone leaves out, in a program, is not made up for by its next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def leaves_out_one(alone: bool) -> list[float]:
    import jax
    import jax.numpy as jnp
    import keras

    import horoclone.keras as hvd

    variable = keras.Variable(np.zeros(2, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])

    @jax.jit
    def step(trained: Any, own: Any, gradient: Any) -> Any:
        return jax.lax.cond(
            jnp.isfinite(gradient).all(),
            lambda: optimizer.stateless_apply(own, [gradient], trained),
            lambda: (trained, own),
        )

    trained, own = [variable.value], [v.value for v in optimizer.variables]
    seen = []
    for number in range(4):
        is_bad = number == 1 and (hvd.rank() == 1 or not alone)
        gradient = jnp.full(2, jnp.nan if is_bad else float(number + hvd.rank()))
        trained, own = step(trained, own, gradient)
        seen.append(float(trained[0][0]))
    return seen


@pytest.mark.parametrize("alone", [False, True])
def test_a_step_left_out(on: Callable[..., list[Any]], alone: bool) -> None:
    if alone:
        with pytest.raises(AssertionError, match=r"rank 1 .*, having left out 1 and .* Mismatched steps\. "):
            on("jax", leaves_out_one, alone=True)
    else:
        assert on("jax", leaves_out_one, alone=False) == [[-0.5, -0.5, -3.0, -6.5]] * 2
