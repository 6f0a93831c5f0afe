"""A small network that is trained on shards, and on everybody's data by one process; with Keras 3 and with tf_keras."""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH, STEPS = 6, 6
TOLERANCE = 2e-5  # absolute and relative: float32 sums in another order, over twelve steps


def the_keras() -> Any:
    from horoclone.keras.flavor import keras

    return keras


def optimizer_named(which: str) -> Any:
    keras = the_keras()
    kind = which.removeprefix("legacy ")
    optimizers = keras.optimizers.legacy if kind != which else keras.optimizers
    scaled = getattr(keras.optimizers, "LossScaleOptimizer", None) or keras.mixed_precision.LossScaleOptimizer
    return {
        "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: optimizers.Adam(0.01, epsilon=1e-3),
        "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.05),
        "global_clipnorm": lambda: optimizers.SGD(0.5, global_clipnorm=0.1),
        "clipvalue": lambda: optimizers.SGD(0.5, clipvalue=0.01),
        "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
        "accumulating": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
        "scaled": lambda: scaled(optimizers.SGD(0.1), initial_scale=1024.0),
    }[kind]()


def network(seed: int = 0, embedding: bool = False, **options: Any) -> Any:
    keras = the_keras()
    keras.utils.set_random_seed(seed)
    first = [keras.layers.Embedding(11, 4), keras.layers.Flatten()] if embedding else []
    return keras.Sequential([
        keras.layers.Input((8,)),
        *first,
        keras.layers.Dense(16, activation="tanh", **options),
        keras.layers.Dense(3, **options),
    ])  # fmt: skip


def compiled(model: Any, optimizer: Any, **options: Any) -> Any:
    loss = the_keras().losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model


def shard(rank: int, steps: int = STEPS, embedding: bool = False) -> tuple[Any, Any]:
    chance = np.random.default_rng(100 + rank)
    count = BATCH * steps
    x = chance.integers(0, 11, (count, 8)) if embedding else chance.normal(size=(count, 8)).astype(np.float32)
    return x, chance.integers(0, 3, count)


def everybody(size: int, steps: int = STEPS, embedding: bool = False) -> tuple[Any, Any]:
    """The shards as one data set whose batch k consists of everybody's batches k."""
    parts = [shard(rank, steps, embedding) for rank in range(size)]
    xs, ys = (np.stack([p[i].reshape(steps, BATCH, *p[i].shape[1:]) for p in parts], axis=1) for i in (0, 1))
    return xs.reshape(-1, 8), ys.reshape(-1)


def fit(model: Any, data: tuple[Any, Any], batch: int = BATCH, epochs: int = 2, callbacks: Any = ()) -> None:
    model.fit(*data, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def same_everywhere(model: Any) -> bool:
    import horoclone.keras as hvd

    return len({tuple(w.tobytes() for w in ws) for ws in hvd.allgather_object(model.get_weights())}) == 1


def as_one_process(model: Any, reference: Any, *args: Any, **options: Any) -> None:
    """The ranks' weights are alike, and close to those of the reference, which rank 0 alone fits: fit(reference, ...)."""
    import horoclone.keras as hvd

    assert same_everywhere(model)
    if hvd.rank() == 0:
        fit(reference, *args, **options)
        close(model, reference)


def close(model: Any, reference: Any, tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def trains_as_one(which: str, embedding: bool = False, passes: int = 1, **options: Any) -> None:
    """fit on shards, from a start that differs between the ranks, equals fit on everything."""
    import horoclone.keras as hvd

    if passes > 1:
        options |= {"backward_passes_per_step": passes, "average_aggregated_gradients": True}
    optimizer = hvd.DistributedOptimizer(optimizer_named(which), **options)
    model = compiled(network(hvd.rank(), embedding), optimizer)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, shard(hvd.rank(), embedding=embedding), callbacks=[start])
    reference = compiled(network(0, embedding), optimizer_named(which))
    whole = everybody(hvd.size(), embedding=embedding)
    as_one_process(model, reference, whole, batch=BATCH * hvd.size() * passes)
    began = network(0, embedding).get_weights()
    assert max(np.abs(a - b).max() for a, b in zip(began, model.get_weights(), strict=True)) > 0.01
