"""What only TensorFlow has: sparse gradients, XLA, the name horovod.tensorflow.keras, and tf_keras with its two kinds
of optimizers. "tensorflow" is Keras 3, "legacy" is tf_keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import load, operations, run_python

training = load(Path(__file__).with_name("training.py"), "keras_training")
STEPS, compiled, fit, network = training.STEPS, training.compiled, training.fit, training.network
optimizer_named, same_everywhere = training.optimizer_named, training.same_everywhere
shard, the_keras, trains_as_one = training.shard, training.the_keras, training.trains_as_one
On = Callable[..., list[Any]]


# --- what the ranks run ----------------------------------------------------------------------------------------------


def skips_together(legacy: bool, outer: bool) -> None:
    """An overflow on one rank skips the step on all, whichever way round the two wrappers are."""
    import tensorflow as tf

    import horoclone.tensorflow.keras as hvd

    keras = the_keras()
    kind = keras.optimizers.legacy.SGD if legacy else keras.optimizers.SGD
    scaled = keras.mixed_precision.LossScaleOptimizer
    if outer:
        optimizer = hvd.DistributedOptimizer(scaled(kind(1.0), initial_scale=4.0))
    else:
        optimizer = scaled(hvd.DistributedOptimizer(kind(1.0)), initial_scale=4.0)
    variable = tf.Variable([0.0, 0.0])
    optimizer.apply_gradients([(tf.fill((2,), np.inf if hvd.rank() == 0 else 1.0), variable)])
    assert variable.numpy().tolist() == [0.0, 0.0] and float(optimizer.loss_scale) == 2.0
    optimizer.apply_gradients([(tf.fill((2,), float(hvd.rank())), variable)])
    np.testing.assert_allclose(variable.numpy(), -(hvd.size() - 1) / 2.0)


def reduces_only_once() -> None:
    """Gradients that the user has reduced are left alone: the arguments that Horovod's users know."""
    import tensorflow as tf

    import horoclone.tensorflow.keras as hvd

    for kind, flag in (
        (the_keras().optimizers.SGD, {"skip_gradients_aggregation": True}),
        (the_keras().optimizers.legacy.SGD, {"experimental_aggregate_gradients": False}),
    ):
        optimizer, variable = hvd.DistributedOptimizer(kind(1.0)), tf.Variable(0.0)
        optimizer.apply_gradients([(tf.constant(float(hvd.rank())), variable)], **flag)
        assert variable.numpy() == -hvd.rank()
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(optimizer)


def sends_few_groups() -> None:
    """In a function groups of about 8 MiB, which travel while others are computed; eagerly, or as the user says, one."""
    import tensorflow as tf

    import horoclone.tensorflow.keras as hvd

    for groups, expected in ((None, 3), (1, 1)):
        variables = [tf.Variable(tf.zeros((1 << 20,))) for _ in range(5)]  # 4 MiB each
        optimizer = hvd.DistributedOptimizer(the_keras().optimizers.SGD(1.0), groups=groups)
        optimizer.build(variables)

        def step(optimizer: Any = optimizer, variables: Any = variables) -> None:
            gradients = [tf.fill((1 << 20,), float(hvd.rank() + i)) for i in range(5)]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        compiled = tf.function(step)
        compiled()  # traces
        for run, count in ((compiled, expected), (step, 1)):
            before = operations()
            run()
            assert operations() - before == count
        assert all((v.numpy() == -3 * (i + 0.5)).all() for i, v in enumerate(variables))


def meets_in_the_order_of_the_model() -> None:
    """A rank that has loaded the model has made its variables in another order than one that has built it."""
    import tensorflow as tf

    import horoclone.tensorflow.keras as hvd

    for kind in (the_keras().optimizers.SGD, the_keras().optimizers.legacy.SGD):
        made = [tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])]
        first, second = made if hvd.rank() == 0 else made[::-1]
        optimizer = hvd.DistributedOptimizer(kind(1.0))
        for _ in range(2):
            grads = [tf.fill([2], size * (hvd.rank() + 1.0)) for size in (1.0, 10.0)]
            optimizer.apply_gradients(zip(grads, (first, second), strict=True))
        mean = (hvd.size() + 1) / 2
        assert first.numpy().tolist() == [-2 * mean] * 2 and second.numpy().tolist() == [-20 * mean] * 2


def saves_a_plain_optimizer(path: str, which: str) -> None:
    import horoclone.keras as hvd

    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model = compiled(network(), hvd.DistributedOptimizer(optimizer_named(which)))
    fit(model, shard(hvd.rank()), callbacks=start)
    if hvd.rank() == 0:
        model.save(path)
    hvd.allgather_object(None)
    if hvd.rank() == 0:
        assert loaded_alone(path) == str(type(optimizer_named(which)))
    loaded = hvd.load_model(path)
    assert int(loaded.optimizer.iterations) == 2 * STEPS
    for other in (model, loaded):
        fit(other, shard(hvd.rank()), callbacks=start)
    assert same_everywhere(loaded)
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def loaded_alone(path: str, own: bool = False) -> str:
    """The class of a saved model's optimizer, for a process without horoclone; own: with the classes of the user."""
    name = the_keras().__name__
    code = (
        f"import sys, {name} as keras\n"
        "class Halving(keras.optimizers.SGD): pass\n"
        "def own_loss(truth, guess): pass\n"
        f"kinds = dict(Halving=Halving, own_loss=own_loss) if {own} else None\n"
        f"print(type(keras.models.load_model({path!r}, custom_objects=kinds).optimizer))\n"
        "assert 'horoclone' not in sys.modules"
    )
    done = run_python(code, check=True)
    return done.stdout.strip()


def loads_what_the_user_wrote(path: str) -> None:
    """An optimizer and a loss of the user's own: saved under their names, loaded as custom_optimizers and objects."""
    import horoclone.keras as hvd

    keras = the_keras()

    class Halving(keras.optimizers.SGD):
        pass

    def own_loss(truth: Any, guess: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(truth, guess, from_logits=True)

    model = compiled(network(), hvd.DistributedOptimizer(Halving(0.1, momentum=0.9)))
    model.compile(model.optimizer, own_loss)
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    fit(model, shard(hvd.rank()), callbacks=start)
    path = f"{path}{hvd.rank()}.keras"
    model.save(path)
    with pytest.raises((TypeError, ValueError), match="Halving|own_loss"):
        hvd.load_model(path)
    kinds = {"own_loss": own_loss}
    loaded = hvd.load_model(path, [Halving], kinds, compression=hvd.Compression.fp16)
    assert (
        isinstance(loaded.optimizer, Halving)
        and loaded.optimizer._horoclone.reduction.compression is hvd.Compression.fp16
    )
    by_keras = keras.models.load_model(path, custom_objects={"Halving": Halving, **kinds})
    assert type(by_keras.optimizer)._horoclone_base is Halving  # reduces, as horoclone is loaded
    if hvd.rank() == 0:
        assert loaded_alone(path, own=True) == "<class '__main__.Halving'>"
    fit(loaded, shard(hvd.rank()), callbacks=start)
    assert same_everywhere(loaded) and int(loaded.optimizer.iterations) == 4 * STEPS  # two epochs, twice


def refuses_xla() -> None:
    """With the callback and without it, before anything has been communicated; the next model trains."""
    import horoclone.tensorflow.keras as hvd

    data = shard(hvd.rank(), 1)
    for callbacks in ([hvd.callbacks.BroadcastGlobalVariablesCallback(0)], []):
        model = compiled(network(), hvd.DistributedOptimizer(optimizer_named("sgd")), jit_compile=True)
        with pytest.raises(Exception, match=r"model\.compile\(.*jit_compile=False"):
            fit(model, data, callbacks=callbacks)
    fit(compiled(network(), hvd.DistributedOptimizer(optimizer_named("sgd"))), data)


def switches_automatic_xla_off() -> None:
    """Keras chooses XLA by itself where it sees a GPU."""
    import horoclone.tensorflow.keras as hvd

    model = compiled(network(hvd.rank()), hvd.DistributedOptimizer(optimizer_named("sgd")))
    model.jit_compile = True  # as compile() does with "auto" beside a GPU
    with pytest.warns(UserWarning, match="jit_compile"):
        fit(model, shard(hvd.rank(), 1), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert not model.jit_compile and same_everywhere(model)


def has_horovods_names() -> None:
    import importlib

    from horoclone import horovod_alias

    horovod_alias.install()
    for name in ("keras", "tensorflow.keras"):
        for part in ("", ".callbacks", ".elastic"):
            ours = importlib.import_module(f"horoclone.{name}{part}")
            assert importlib.import_module(f"horovod.{name}{part}") is ours
    import horovod.keras as one
    import horovod.tensorflow.keras as two

    assert one.callbacks.MetricAverageCallback is two.callbacks.MetricAverageCallback
    optimizer = two.DistributedOptimizer(
        optimizer_named("sgd"), None, "", "", two.Compression.none, False, 1.0, two.Average, 3, True
    )
    assert optimizer._horoclone.reduction.passes == 3 and optimizer._horoclone.reduction.average_passes
    optimizer = one.DistributedOptimizer(
        optimizer_named("sgd"), None, "", "", one.Compression.fp16, False, 1.0, one.Sum, 0, 4
    )
    assert optimizer._horoclone.reduction.groups == 4 and optimizer._horoclone.reduction.op == one.Sum


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.in_turn("backend", "which", "passes")
@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize(
    "backend, which, passes",
    [("tensorflow", "sgd", 1), ("tensorflow", "sgd", 2), ("legacy", "sgd", 1), ("legacy", "legacy sgd", 1)],
)
def test_sparse_gradients(on: On, backend: str, which: str, passes: int, sparse_as_dense: bool) -> None:
    on(backend, trains_as_one, which=which, embedding=True, passes=passes, sparse_as_dense=sparse_as_dense)


@pytest.mark.in_turn
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(on: On, legacy: bool, outer: bool) -> None:
    on("legacy", skips_together, legacy=legacy, outer=outer)


@pytest.mark.parametrize("body", [reduces_only_once, sends_few_groups, has_horovods_names, meets_in_the_order_of_the_model],
                         ids=lambda body: body.__name__)  # fmt: skip
def test_of_tf_keras(on: On, body: Any) -> None:
    on("legacy", body)


@pytest.mark.in_turn
@pytest.mark.parametrize("which, suffix", [("adam", "keras"), ("legacy adam", "h5")])
def test_tf_keras_saves_a_plain_optimizer(on: On, which: str, suffix: str, tmp_path: Any) -> None:
    on("legacy", saves_a_plain_optimizer, path=str(tmp_path / f"model.{suffix}"), which=which)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", ["tensorflow", "legacy"])
def test_a_model_with_classes_of_the_users_is_loaded(on: On, backend: str, tmp_path: Any) -> None:
    on(backend, loads_what_the_user_wrote, path=str(tmp_path / "model"))


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", ["tensorflow", "legacy"])
def test_xla_is_refused_before_the_first_step(on: On, backend: str) -> None:
    on(backend, refuses_xla)


@pytest.mark.parametrize(
    "body", [switches_automatic_xla_off, sends_few_groups, has_horovods_names], ids=lambda body: body.__name__
)
def test_of_keras_3(on: On, body: Any) -> None:
    on("tensorflow", body)
