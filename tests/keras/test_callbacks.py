"""The callbacks, and collectives on values, on every backend and with tf_keras. The loops are Keras's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from world import load

BACKENDS = ["tensorflow", "jax", "torch", "legacy"]
On = Callable[..., list[Any]]
the_keras = load(Path(__file__).with_name("training.py"), "keras_training").the_keras


def network(optimizer: Any = None, seed: int = 0, width: int = 4, between: Any = ()) -> Any:
    """between: classes of further layers."""
    keras = the_keras()
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([
        keras.layers.Input((3,)),
        keras.layers.Dense(width, activation="tanh"),
        *(layer() for layer in between),
        keras.layers.Dense(1),
    ])  # fmt: skip
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def data(seed: int, batches: int = 4) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(4 * batches, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1, keepdims=True), "batch_size": 4, "shuffle": False, "verbose": 0}


def state_of(model: Any) -> list[Any]:
    from horoclone.keras.flavor import to_numpy

    variables = model.optimizer.variables
    return [
        np.array(to_numpy(v)) for v in [*model.weights, *(variables() if callable(variables) else variables)]
    ]


class Probe:
    """A callback that notes something before every batch."""

    def __new__(cls, look: Callable[[Any], Any]) -> Any:
        class Looking(the_keras().callbacks.Callback):
            seen: list[Any] = []

            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                self.seen.append(look(self.model))

        probe = Looking()
        probe.seen = []
        return probe


# --- what the ranks run ----------------------------------------------------------------------------------------------


def starts_alike() -> None:
    """Before step 0 every rank has the root's weights, moving averages and momenta; seeds stay each rank's own."""
    import horoclone.keras as hvd

    root = hvd.size() - 1
    layers = the_keras().layers
    model = network(seed=hvd.rank(), between=[layers.BatchNormalization, lambda: layers.Dropout(0.5)])
    model.fit(**data(hvd.rank()))  # builds, and makes all state differ
    mine = state_of(model)
    everybody = hvd.allgather_object(mine)
    assert not np.array_equal(everybody[0][0], everybody[1][0])
    probe = Probe(state_of)
    model.fit(**data(hvd.rank()), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(root), probe])
    for ours, theirs in zip(probe.seen[0], everybody[root], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def builds_the_optimizer_before_the_first_step() -> None:
    import horoclone.keras as hvd

    model = network(hvd.DistributedOptimizer(the_keras().optimizers.Adam(0.01)), seed=hvd.rank())
    probe = Probe(state_of)
    model.fit(**data(hvd.rank()), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), probe])
    weights = len(model.weights)
    # Iterations, two moments each
    assert len(probe.seen[0]) >= weights + 1 + 2 * len(model.trainable_weights)
    states = hvd.allgather_object(probe.seen[0])
    assert all(np.array_equal(a, b) for a, b in zip(states[0], states[1], strict=True))


def sends_layers_that_the_first_step_builds() -> None:
    """Keras says that a model of the user's class is built after model.build(), and has not built its layers."""
    import horoclone.keras as hvd

    keras = the_keras()

    class Model(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(1)
            self.last.build((None, 4))

        def call(self, x: Any) -> Any:
            return self.last(self.first(x))

    keras.utils.set_random_seed(hvd.rank())
    model = Model()
    model.build((None, 3))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.fit(**data(hvd.rank(), 2), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    states = hvd.allgather_object(state_of(model))
    assert len(model.weights) == 4 and all(np.array_equal(a, b) for a, b in zip(*states, strict=True))


def sends_weights_before_the_first_step_beside_a_layer_that_no_call_reaches() -> None:
    import horoclone.keras as hvd

    keras = the_keras()

    class Model(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.used(x)

    model = Model()
    model(np.zeros((1, 2), np.float32))
    model.used.set_weights([np.full((2, 1), 100.0 if hvd.rank() else 1.0, np.float32)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    exact = np.ones((2, 2), np.float32), np.full((2, 1), 2.0, np.float32)
    model.fit(*exact, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert np.array_equal(model.used.get_weights()[0], [[1.0], [1.0]])


def warns_of_statistics_that_are_not_synchronised() -> None:
    import horoclone.keras as hvd

    layer = the_keras().layers.BatchNormalization
    model = network(between=[lambda: layer(synchronized=True)])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.warns(UserWarning, match=r"synchronized=True\), as 'batch_norm.*SyncBatchNormalization"):
        callback.set_model(model)


def keeps_local_variables() -> None:
    import horoclone.keras as hvd

    model = network(seed=hvd.rank())
    before = [np.array(w) for w in model.get_weights()]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[model.weights[0]])
    callback.register_local_var(model.weights[1])
    probe = Probe(lambda model: model.get_weights())
    model.fit(**data(0), callbacks=[callback, probe])
    for index in (0, 1):
        np.testing.assert_array_equal(probe.seen[0][index], before[index])
    assert len({w.tobytes() for w in hvd.allgather_object(probe.seen[0][0])}) == hvd.size()


def says_which_variable_differs() -> None:
    import horoclone.keras as hvd

    model = network(width=4 + hvd.rank())
    with pytest.raises(
        ValueError, match=r"of rank 1 differ from those of rank 0: .*\[3, 5\] there, .*\[3, 4\] on rank 0"
    ):
        model.fit(**data(0), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    with pytest.raises(ValueError, match=r"the ranks have \[4, 5\] batches per epoch"):
        network().fit(
            **data(0, 4 + hvd.rank()), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        )
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


def says_that_the_rates_differ() -> None:
    """As after ReduceLROnPlateau without MetricAverageCallback: at the next epoch, on every rank."""
    import horoclone.keras as hvd
    from horoclone.keras import learning_rate as rates

    class Lowers(the_keras().callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            rates.set_learning_rate(self.model.optimizer, 0.5 ** (epoch + 1) * (1 + epoch * hvd.rank()))
            ended.append(epoch)

    ended: list[int] = []
    model = network(hvd.DistributedOptimizer(the_keras().optimizers.SGD(1.0)))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Lowers()]
    with pytest.raises(ValueError, match=r"different learning rates.*MetricAverageCallback"):
        model.fit(**data(hvd.rank()), epochs=4, callbacks=callbacks)
    assert ended == [0, 1]


def takes_rates_that_a_callback_makes_equal() -> None:
    """Rank 0 has loaded its model, say: before the first batch the ranks' rates differ."""
    import horoclone.keras as hvd
    from horoclone.keras import learning_rate as rates

    model = network(hvd.DistributedOptimizer(the_keras().optimizers.SGD(0.1 + hvd.rank())))
    sets = the_keras().callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.set_learning_rate(model.optimizer, 0.25)
    )
    model.fit(
        **data(hvd.rank()), epochs=3, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), sets]
    )
    assert rates.learning_rate_if_known(model.optimizer) == 0.25


def averages_metrics() -> None:
    """Also those of the validation; what Keras keeps as history, and later callbacks see, is the average."""
    import horoclone.keras as hvd

    keras = the_keras()
    model = network()
    own: list[dict[str, float]] = []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: own.append(dict(logs)))
    history = model.fit(
        **data(hvd.rank()),
        epochs=2,
        validation_data=(data(9)["x"], data(9)["y"]),
        callbacks=[note, hvd.callbacks.MetricAverageCallback()],
    ).history
    assert set(history) == {"loss", "val_loss"}
    for epoch in range(2):
        for name in history:
            mean = np.mean([logs[epoch][name] for logs in hvd.allgather_object(own)])
            np.testing.assert_allclose(history[name][epoch], mean, rtol=1e-6)
    with pytest.raises(ValueError, match="different metrics"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {f"metric{hvd.rank()}": 1.0})
    for_each_class: Any = {"f1": np.arange(3) + hvd.rank()}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, for_each_class)
    assert for_each_class["f1"].tolist() == [0.5, 1.5, 2.5]


def warms_up() -> None:
    """From 1/size of the rate to all of it, a little more with every batch."""
    import horoclone.keras as hvd

    callbacks = hvd.callbacks
    from horoclone.keras.learning_rate import learning_rate_of

    model, steps, epochs = network(), 4, 2
    probe = Probe(lambda model: learning_rate_of(model.optimizer))
    warm = callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=epochs, verbose=1)
    history = model.fit(**data(0, steps), epochs=3, callbacks=[warm, probe]).history
    size = hvd.size()
    expected = [0.4 / size * ((i + 1) / steps * (size - 1) / epochs + 1) for i in range(epochs * steps)]
    np.testing.assert_allclose(probe.seen, expected + [0.4] * steps, rtol=1e-5)
    np.testing.assert_allclose(history["lr"][-1], 0.4, rtol=1e-6)


def follows_a_schedule() -> None:
    import horoclone.keras as hvd
    from horoclone.keras.learning_rate import learning_rate_of

    model = network()
    schedule = hvd.callbacks.LearningRateScheduleCallback
    probe = Probe(lambda model: round(learning_rate_of(model.optimizer), 6))
    drops = [
        schedule(1.0, 0.5, start_epoch=1, end_epoch=3),  # a number counts from its first epoch
        schedule(1.0, lambda epoch: 0.1**epoch, start_epoch=3),
    ]
    model.fit(**data(0, 2), epochs=5, callbacks=[*drops, probe])
    assert probe.seen == [0.1, 0.1, 1.0, 1.0, 0.5, 0.5, 0.001, 0.001, 0.0001, 0.0001]
    smooth = schedule(1.0, 0.25, start_epoch=0, staircase=False)  # a number too may be taken smoothly
    model.fit(**data(0, 2), epochs=2, callbacks=[smooth, probe])
    assert probe.seen[10:] == [1.0, 0.5, 0.25, 0.125]
    with pytest.raises(ValueError, match="initial_lr"):
        schedule(None, 0.5)
    model.compile(
        the_keras().optimizers.SGD(the_keras().optimizers.schedules.ExponentialDecay(0.1, 9, 0.9)), "mse"
    )
    with pytest.raises(TypeError, match="learning rate of this optimizer cannot be set"):
        model.fit(**data(0, 2), callbacks=[schedule(1.0, 0.5)])


def corrects_momentum(correction: bool) -> None:
    """After a change of the rate from 0.1 to 0.05, what SGD has gathered counts half."""
    import horoclone.keras as hvd

    keras = the_keras()
    model = keras.Sequential(
        [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), lambda y, z: z)  # gradient 1, whatever the weight
    probe = Probe(lambda model: float(model.get_weights()[0][0, 0]))
    drop = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 0.5**epoch, momentum_correction=correction
    )
    x = np.ones((1, 1), np.float32)
    model.fit(x, x, epochs=4, verbose=0, callbacks=[drop, probe])
    weight, velocity, rate, expected = 0.0, 0.0, 0.1, []
    for epoch in range(4):
        expected.append(weight)
        new = 0.1 * 0.5**epoch
        velocity *= new / rate if correction else 1.0
        rate = new
        velocity = 0.5 * velocity - rate
        weight += velocity
    np.testing.assert_allclose(probe.seen, expected, rtol=1e-5)


def leaves_momentum_without_a_rate() -> None:
    """That of Muon has gathered gradients alone."""
    import horoclone.keras as hvd
    from horoclone.keras.learning_rate import rescale_momentum

    keras = the_keras()
    variable = keras.Variable(np.zeros((2, 2), "float32"), name="kernel")
    muon = hvd.DistributedOptimizer(keras.optimizers.Muon(0.1))
    muon.apply([keras.ops.ones((2, 2))], [variable])
    (gathered,) = (one for one in muon.momentums if one is not None)
    before = keras.ops.convert_to_numpy(gathered).copy()
    rescale_momentum(muon, 0.5)
    assert before.any() and (keras.ops.convert_to_numpy(gathered) == before).all()


def writes_the_best_on_one_rank(folder: str) -> None:
    from pathlib import Path

    import horoclone.keras as hvd

    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="filepath"):
        network().fit(**data(0), callbacks=[best])
    best.filepath = f"{folder}/rank{hvd.rank()}.keras"
    network().fit(**data(0), epochs=2, callbacks=[best])
    hvd.allgather_object(None)
    assert [path.name for path in Path(folder).iterdir()] == ["rank0.keras"]


def logs_horoclones_numbers(folder: str) -> None:
    """Every third batch and after the last; a training that goes on at epoch 1 goes on counting."""
    import horoclone.keras as hvd

    steps: list[int] = []
    model = network(hvd.DistributedOptimizer(the_keras().optimizers.SGD(0.1)))
    both = [
        hvd.callbacks.MetricsCallback(folder, every=3),
        hvd.callbacks.MetricsCallback(lambda numbers, step: steps.append(step), every=3, all_ranks=True),
    ]
    model.fit(**data(hvd.rank()), epochs=2, callbacks=both)
    assert steps == [3, 6, 8]
    later: list[int] = []
    resumed = hvd.callbacks.MetricsCallback(lambda numbers, step: later.append(step), every=100)
    model.fit(**data(hvd.rank()), epochs=2, initial_epoch=1, callbacks=[resumed])
    assert later == ([8] if hvd.rank() == 0 else [])
    if hvd.rank() == 0:
        # Else TensorBoard's reader loads TensorFlow where it is installed, for its file system.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(folder)
        events.Reload()
        logged = events.Scalars("horoclone/operations")
        assert [one.step for one in logged] == steps
        assert 0 < logged[0].value <= logged[-1].value <= hvd.metrics()["operations"]


def works_on_values() -> None:
    import horoclone.keras as hvd
    from horoclone.keras.flavor import to_tensor

    rank, size = hvd.rank(), hvd.size()
    tensor = to_tensor(np.arange(4, dtype=np.float32) + rank)
    np.testing.assert_allclose(hvd.allreduce(tensor), np.arange(4) + (size - 1) / 2)
    np.testing.assert_allclose(
        hvd.allreduce([1.0, 2.0], op=hvd.Sum, prescale_factor=2.0), [2.0 * size, 4.0 * size]
    )
    np.testing.assert_allclose(
        hvd.allreduce(tensor, name="named", compression=hvd.Compression.fp16), np.arange(4) + (size - 1) / 2
    )
    assert hvd.allreduce(3) == 3 and hvd.allreduce(2.5) == 2.5
    precise = np.asarray(hvd.allreduce(np.float64(1) / 3))
    assert precise.dtype == np.float64 and precise == 1 / 3
    gathered = hvd.allgather(to_tensor(np.full((rank + 1, 2), rank, np.int32)))
    assert np.asarray(gathered).tolist() == [[r, r] for r in range(size) for _ in range(r + 1)]
    np.testing.assert_array_equal(hvd.broadcast(tensor, 1), np.arange(4) + 1)
    np.testing.assert_allclose(
        hvd.reducescatter(np.ones((size, 3), np.float32), op=hvd.Sum), np.full((1, 3), size)
    )
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)


def gives_tensors() -> None:
    """On TensorFlow, as in Horovod: also within a function, and for numbers."""
    import tensorflow as tf

    import horoclone.keras as other
    import horoclone.tensorflow.keras as hvd

    size, x = hvd.size(), tf.constant([1.0, 2.0, 3.0])
    for module in (hvd, other):
        results = [
            module.allreduce(x, name="a"),
            module.allreduce(x, op=module.Sum),
            module.allreduce(float(module.rank())),
            module.allgather(tf.ones((module.rank() + 1, 2)), name="b"),
            module.broadcast(tf.Variable(x), 1),
            module.reducescatter(tf.ones((size, 2)), op=module.Sum),
        ]
        assert all(tf.is_tensor(result) and result.dtype == tf.float32 for result in results)
        assert results[1].numpy().tolist() == [size, 2.0 * size, 3.0 * size] and results[2].shape == ()
        assert results[3].shape == (size * (size + 1) // 2, 2) and (results[5].numpy() == size).all()
        assert module.allreduce(3, op=module.Sum).dtype == tf.int32
        inside = tf.function(lambda t, module=module: module.allreduce(2 * t, op=module.Sum))
        assert inside(x).numpy().tolist() == [2.0 * size, 4.0 * size, 6.0 * size]
        with pytest.warns(DeprecationWarning):
            assert module.allreduce(x, average=False).numpy().tolist() == results[1].numpy().tolist()


def gives_arrays_in_a_session() -> None:
    import tensorflow as tf

    import horoclone.tensorflow.keras as hvd

    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=hvd.rank() + 1.0)
        tf.compat.v1.keras.backend.get_session().run(tf.compat.v1.global_variables_initializer())
        hvd.broadcast_global_variables(1)
        assert tf.compat.v1.keras.backend.get_session().run(variable) == 2.0
        given = hvd.allreduce(tf.fill((2,), hvd.rank() + 1.0), op=hvd.Sum, name="in_a_session")
    assert isinstance(given, np.ndarray) and given.tolist() == [3.0, 3.0]


def registers_local_variables_late(kind: str = "new") -> None:
    """A library patches on_batch_end of the object, or a class replaces it, to register its own variables before what
    is there is sent. Their shapes differ between the ranks, as those of their momenta do."""
    import types

    import horoclone.keras as hvd

    keras, rank = the_keras(), hvd.rank()

    class Own(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(name="table", shape=(4 + rank, 1), initializer="ones")

        def call(self, x: Any) -> Any:
            return x + self.table[0]

    for patched in (True, False):
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1), Own()])
        optimizers = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.01, momentum=0.9))
        optimizer.register_local_var(model.layers[1].table)
        model.compile(optimizer, "mse")
        raw = hvd.callbacks.BroadcastGlobalVariablesCallback.on_batch_end

        def on_batch_end(self: Any, batch: int, logs: Any = None, raw: Any = raw) -> None:
            if batch == 0:
                self.register_local_var(self.model.layers[1].table)
            raw(self, batch, logs)

        if patched:
            callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            callback.on_batch_end = types.MethodType(on_batch_end, callback)
        else:
            bases = (hvd.callbacks.BroadcastGlobalVariablesCallback,)
            callback = type("Registering", bases, {"on_batch_end": on_batch_end})(0)
        model.fit(
            np.ones((8, 3), "f4"), np.full((8, 1), rank, "f4"), batch_size=4, verbose=0, callbacks=[callback]
        )
        kernels = hvd.allgather_object(model.layers[0].get_weights()[0].tobytes())
        assert len(set(kernels)) == 1
        assert tuple(model.layers[1].table.shape) == (4 + rank, 1)


def says_that_nothing_was_sent() -> None:
    import horoclone.keras as hvd

    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.on_batch_end = lambda batch, logs=None: None
    with pytest.raises(RuntimeError, match="Call the original on_batch_end"):
        network(hvd.DistributedOptimizer(the_keras().optimizers.SGD(0.1))).fit(
            **data(hvd.rank()), callbacks=[callback]
        )


# --- tests -----------------------------------------------------------------------------------------------------------


BODIES = [
    starts_alike, works_on_values, builds_the_optimizer_before_the_first_step, keeps_local_variables,
    says_which_variable_differs, says_that_the_rates_differ, takes_rates_that_a_callback_makes_equal, averages_metrics,
    warms_up, follows_a_schedule,
]  # fmt: skip


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_callbacks(on: On, backend: str, body: Any) -> None:
    on(backend, body)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", ["tensorflow", "legacy"])
def test_statistics_of_normalisation_that_are_each_ranks_own(on: On, backend: str) -> None:
    on(backend, warns_of_statistics_that_are_not_synchronised)


def test_layers_that_model_build_leaves_to_the_first_step(on: On) -> None:
    on("tensorflow", sends_layers_that_the_first_step_builds)
    on("tensorflow", sends_weights_before_the_first_step_beside_a_layer_that_no_call_reaches)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_momentum_is_rescaled_with_the_rate_or_not(on: On, backend: str, correction: bool) -> None:
    on(backend, corrects_momentum, correction=correction)


def test_momentum_without_a_rate_is_left_alone(on: On) -> None:
    on("torch", leaves_momentum_without_a_rate)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_model_is_written_by_rank_0(on: On, backend: str, tmp_path: Any) -> None:
    on(backend, writes_the_best_on_one_rank, folder=str(tmp_path))


# Nothing of it depends on the backend, much on the Keras.
@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", ["torch", "legacy"])
def test_metrics_go_to_a_tracker(on: On, backend: str, tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    on(backend, logs_horoclones_numbers, folder=str(tmp_path))


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", ["tensorflow", "legacy"])
def test_values_are_tensors_on_tensorflow(on: On, backend: str) -> None:
    on(backend, gives_tensors)


def test_values_are_arrays_in_a_session(on: On) -> None:
    on("legacy", gives_arrays_in_a_session)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_replaces_on_batch_end(on: On, backend: str) -> None:
    on(backend, registers_local_variables_late)
    on(backend, says_that_nothing_was_sent)
    if backend == "legacy":
        on(backend, registers_local_variables_late, kind="legacy")
