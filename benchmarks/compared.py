"""What the comparison of values costs: `horoclonerun -np 2 python benchmarks/compared.py [megabytes] [SGD or Adam]
[torch, jax or tensorflow]`.

Two optimizers of equal models, one that compares and one that does not, take turns of one round of the comparison each
on the same ranks. For torch it also says what the comparison's own calls take, which a busy machine disturbs less; JAX
and TensorFlow train in a program.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import horoclone as hvd

LAYERS, STEPS, ROUNDS = 10, 100, 5
own_s = 0.0


def timed(plain: Any) -> Any:
    """The method, whose time is added up."""

    def method(self: Any, *args: Any) -> Any:
        global own_s
        began = time.perf_counter()
        result = plain(self, *args)
        own_s += time.perf_counter() - began
        return result

    return method


def on_torch(name: str, width: int, kind: str) -> Any:
    """A step, as a function. name: of the optimizer."""
    import torch

    import horoclone.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    plain = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(prefix=name))
    batch = torch.ones(1, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def on_jax(name: str, width: int, kind: str) -> Any:
    import jax
    import jax.numpy as jnp
    import optax

    import horoclone.jax as hvd

    optimizer = hvd.DistributedOptimizer(getattr(optax, kind.lower())(1e-3))
    params = {f"{name}{i}": jnp.full((width, width), 1 / width) for i in range(LAYERS)}
    state = optimizer.init(params)

    def loss(params: Any) -> Any:
        x = jnp.ones((1, width))
        for weight in params.values():
            x = x @ weight
        return x.sum()

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any) -> Any:
        changes, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, changes), state

    def step() -> None:
        nonlocal params, state
        params, state = jax.block_until_ready(update(params, state))

    return step


def on_tensorflow(name: str, width: int, kind: str) -> Any:
    import keras
    import tensorflow as tf

    import horoclone.tensorflow as hvd

    optimizer = getattr(keras.optimizers, kind)(1e-3)
    weights = [tf.Variable(tf.fill((width, width), 1 / width), name=f"{name}{i}") for i in range(LAYERS)]

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        with tf.GradientTape() as tape:
            x = tf.ones((1, width))
            for weight in weights:
                x = x @ weight
            loss = tf.reduce_sum(x)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    return step


if __name__ == "__main__":
    hvd.init()
    given = dict(enumerate(sys.argv))
    megabytes, kind, framework = float(given.get(1, 100)), given.get(2, "SGD"), given.get(3, "torch")
    if framework == "torch":
        from horoclone.torch.optimizer.compared import Comparison

        for name in ("fill", "look", "note", "settle"):
            setattr(Comparison, name, timed(getattr(Comparison, name)))
    width = int((megabytes * 1e6 / 4 / LAYERS) ** 0.5)
    steps = {}
    for action in ("off", "warn"):
        os.environ["HOROCLONE_COMPARE"] = action
        steps[action] = {"torch": on_torch, "jax": on_jax, "tensorflow": on_tensorflow}[framework](
            action, width, kind
        )
        steps[action]()  # a program reads the setting when it is made
    times: dict[str, list[float]] = {action: [] for action in steps}
    shares = []
    for number in range(ROUNDS + 1):
        for action, step in steps.items():
            began, own_s = time.perf_counter(), 0.0
            for _ in range(STEPS):
                step()
            if number:
                times[action].append((time.perf_counter() - began) / STEPS * 1e3)
                shares += [own_s / STEPS * 1e3] if action == "warn" else []
    if hvd.rank() == 0:
        off, on = (statistics.median(times[action]) for action in ("off", "warn"))
        own = statistics.median(shares)
        print(
            f"{megabytes:g} MB, {framework}, {kind}: a step {off:.3f} ms without, "
            f"{on:.3f} ms with ({on / off - 1:+.1%});"
        )
        if own:
            print(f"the comparison's own calls {own:.4f} ms a step ({own / off:.2%})")
