"""hvd.elastic of Keras on each backend: states, the loop, and callbacks that commit what they count in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

On = Callable[..., list[Any]]
BACKENDS = ["tensorflow", "jax", "torch", "legacy"]


def a_model() -> Any:
    from horoclone.keras.flavor import LEGACY, keras

    layers = [keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((2,)), *layers])
    optimizer = keras.optimizers.Adam(0.05)
    options = {} if LEGACY else {"jit_compile": False}
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def values_of(model: Any) -> list[Any]:
    return [np.array(weight) for weight in model.get_weights()]


def alike(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


X = np.arange(24.0, dtype=np.float32).reshape(12, 2) / 24


def commits_restores_and_synchronises() -> None:
    import horoclone.keras as hvd

    model = a_model()
    with pytest.raises(ValueError, match="Model must be built first"):
        hvd.elastic.KerasState(type(model)())
    state = hvd.elastic.KerasState(model, epoch=0, log=[])
    if hvd.rank() == 0:
        model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0)
        state.epoch, state.log = 1, ["live"]
    state.sync()
    assert (state.epoch, state.log) == (1, ["live"])
    kept = values_of(model)
    for theirs in hvd.allgather_object(kept):
        assert alike(kept, theirs)
    model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0)
    trained = values_of(model)
    assert not alike(trained, kept)
    state.restore()
    assert alike(values_of(model), kept)
    model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0, shuffle=False)
    once = values_of(model)
    state.restore()
    model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0, shuffle=False)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(values_of(model), once, strict=True)), (
        "the moments too"
    )
    other = hvd.elastic.KerasState(a_model() if hvd.rank() else model, None, epoch=0)
    other.sync()


def keeps_other_models_and_callbacks() -> None:
    """A second model, its optimizer, and a callback that refers to the model: all stay the objects they are."""
    import horoclone.keras as hvd
    from horoclone.keras.flavor import LEGACY, keras

    model, other = a_model(), a_model()
    rate = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, factor=0.5, min_delta=1e9)
    metric = keras.metrics.Mean()
    state = hvd.elastic.KerasState(
        model, other=other, rest=[other.optimizer, metric], rate=rate, schedule={"callback": rate}
    )
    state.sync()
    for theirs in hvd.allgather_object(values_of(other)):
        assert alike(values_of(other), theirs)

    def train() -> None:
        model.fit(X, X.sum(1), batch_size=4, epochs=3, verbose=0, callbacks=[rate])
        other.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0)
        metric.update_state([1.0 + hvd.rank()])

    def now() -> list[Any]:
        variables = other.optimizer.variables() if LEGACY else other.optimizer.variables
        return [
            *values_of(other),
            *map(np.array, map(to_numpy, variables)),
            float(metric.result()),
            rate.wait,
        ]

    from horoclone.keras.flavor import to_numpy

    train()
    state.commit()
    kept = now()
    assert float(to_numpy(model.optimizer.learning_rate)) < 0.05
    train()
    assert not alike(now(), kept)
    state.restore()
    assert alike(now(), kept)
    state.sync()
    assert state.other is other and state.rate is rate and state.schedule["callback"] is rate
    assert rate.model is model and state.rest == [other.optimizer, metric]
    train()
    state.commit()


def fits_again_after_a_failure(order: str) -> None:
    """A failure in the middle of fit(): it goes on at the batch behind the last commit, which repeats none."""
    import horoclone.keras as hvd
    from horoclone.keras.flavor import keras

    model = a_model()
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    failures, begun, committed = [hvd.HorovodInternalError("a double of a loss")], [], []
    commit = state.commit

    def watched() -> None:
        commit()
        committed.append((state.epoch, state.batch))

    state.commit = watched

    class Fails(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if state.epoch == 1 and state.batch == 2 and failures:
                raise failures.pop()

    @hvd.elastic.run
    def train(state: Any) -> int:
        begun.append((state.epoch, state.batch))
        made = {
            "c": hvd.elastic.CommitStateCallback(state),
            "b": hvd.elastic.UpdateBatchStateCallback(state),
            "e": hvd.elastic.UpdateEpochStateCallback(state),
        }
        left = X[4 * state.batch :]
        model.fit(
            left, left.sum(1), batch_size=4, epochs=1, verbose=0, callbacks=[*map(made.get, order), Fails()]
        )
        if state.epoch < 3:
            model.fit(
                X, X.sum(1), batch_size=4, epochs=3 - state.epoch, verbose=0,
                callbacks=[*map(made.get, order), Fails()],
            )  # fmt: skip
        return int(state.epoch)

    assert train(state) == 3
    assert begun == [(0, 0), (1, 2)], begun
    assert committed[:6] == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)], committed
    assert committed[6:] == [(1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0)], committed


def keeps_averages_out_of_the_weights() -> None:
    """After an interrupt the averages of use_ema were trained on where fit() had put them into the weights."""
    import horoclone.keras as hvd
    from horoclone.keras.flavor import keras

    model = a_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, use_ema=True))
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    state = hvd.elastic.KerasState(model)
    seen: list[Any] = []

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                state.save()
                seen.extend(state._saved_values[: len(model.weights)])
                raise hvd.HostsUpdatedInterrupt

    with pytest.raises(hvd.HostsUpdatedInterrupt):
        model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0, callbacks=[Interrupts()])
    assert alike(values_of(model), seen)
    model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0)
    averages = [np.array(one) for one in optimizer._model_variables_moving_average]
    assert alike(values_of(model), averages), "as Keras has it, when fit() ends"


def trains_again_after_a_step_that_failed() -> None:
    """Its weights are gone, since JAX has donated them to it, and fit() ends with what went wrong all the same."""
    import jax

    import horoclone.keras as hvd
    from horoclone.keras.flavor import keras

    steps: list[int] = []

    def count(_: Any) -> Any:
        steps.append(len(steps))
        if len(steps) in fails_in:
            raise hvd.HorovodInternalError("a double of a loss")
        return np.float32(0)

    def loss(y: Any, z: Any) -> Any:
        counted = jax.pure_callback(
            count, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(y.sum())
        )
        return ((y - z) ** 2).mean() + counted

    fails_in = {1, 3}
    model = a_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, use_ema=True))
    model.compile(optimizer=optimizer, loss=loss)
    state = hvd.elastic.KerasState(model)
    for done in (1, 3):
        with pytest.raises(Exception, match="a double of a loss"):
            model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0)
        assert len(steps) == done
        state.restore()
    model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0)
    assert all(np.isfinite(one).all() for one in values_of(model))


def commits_seldom() -> None:
    import horoclone.keras as hvd

    with pytest.raises(ValueError, match="at least 1"):
        hvd.elastic.CommitStateCallback(None, batches_per_commit=0)
    model = a_model()
    state = hvd.elastic.KerasState(model, batch=0)
    state.sync()
    callbacks = [hvd.elastic.CommitStateCallback(state, 2), hvd.elastic.UpdateBatchStateCallback(state)]
    model.fit(X, X.sum(1), batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    assert state._commits_made == 2  # after batch 2, and at the end


def reduces_what_one_rank_has_traced() -> None:
    """A job that began with one rank: its step goes on when others have come."""
    from unittest import mock

    import tensorflow as tf

    import horoclone.keras as hvd
    from horoclone.keras import reduction
    from horoclone.keras.flavor import keras

    ours, mine = tf.Variable([0.0]), tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(mine)
    optimizer.build([ours, mine])
    step = tf.function(lambda g: optimizer.apply_gradients([(g, ours), (g, mine)]))
    own = tf.constant([2.0 + 2 * hvd.rank()])
    with (
        mock.patch.object(reduction, "is_elastic", lambda: True),
        mock.patch.object(type(hvd.global_process_set), "size", lambda _: 1),
    ):
        step.get_concrete_function(own)
    step(own)
    assert ours.numpy().tolist() == [-3.0] and mine.numpy().tolist() == [-1.0 - hvd.rank()]


@pytest.mark.parametrize("backend", ["tensorflow", "legacy"])
def test_a_step_that_one_rank_has_traced(on: On, backend: str) -> None:
    on(backend, reduces_what_one_rank_has_traced)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_a_model(on: On, backend: str) -> None:
    on(backend, commits_restores_and_synchronises)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_goes_along_with_a_model_stays_the_same(on: On, backend: str) -> None:
    on(backend, keeps_other_models_and_callbacks)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_goes_on_after_a_failure(on: On, backend: str) -> None:
    on(backend, fits_again_after_a_failure, order="cbe")


def test_the_order_of_the_callbacks_does_not_matter(on: On) -> None:
    on("torch", fits_again_after_a_failure, order="ebc")


def test_commits_can_be_seldom(on: On) -> None:
    on("torch", commits_seldom)


def test_an_interrupt_leaves_the_weights_as_they_are(on: On) -> None:
    on("jax", keeps_averages_out_of_the_weights, size=1)


def test_a_step_that_failed_is_what_fit_ends_with(on: On) -> None:
    on("jax", trains_again_after_a_step_that_failed, size=1)
