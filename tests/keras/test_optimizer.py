"""DistributedOptimizer of Keras 3 on every backend and of tf_keras, against one process that sees everybody's batches.

Horovod's, with Keras 3, trains every rank on its own without a word. So everything here compares weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import load, run_python

training = load(Path(__file__).with_name("training.py"), "keras_training")
BATCH, compiled, everybody, fit = training.BATCH, training.compiled, training.everybody, training.fit
close, network, optimizer_named = training.close, training.network, training.optimizer_named
same_everywhere, shard = training.same_everywhere, training.shard
BACKENDS = ["tensorflow", "jax", "torch"]


# --- what the ranks run ----------------------------------------------------------------------------------------------


def step(optimizer: Any, gradients: Any, variables: Any) -> None:
    """One step in a loop of the user's own; on JAX in the form that Keras's LossScaleOptimizer knows there."""
    import keras

    if keras.backend.backend() != "jax":
        optimizer.apply(gradients, variables)
        return
    import jax

    if not optimizer.built:
        optimizer.build(variables)
    held = [[v.value for v in group] for group in (optimizer.variables, variables)]
    after = jax.jit(optimizer.stateless_apply)(held[0], gradients, held[1])
    for group, values in zip((variables, optimizer.variables), after, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


def takes_gradients(options: dict[str, Any]) -> None:
    """apply() in a loop of the user's own, with gradients that are known."""
    import keras

    import horoclone.keras as hvd

    variables = [keras.Variable(np.zeros(n, "float32"), name=f"v{n}") for n in (3, 5, 2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    gradients = [
        keras.ops.convert_to_tensor(np.full(v.shape, float(hvd.rank() + i + 1), "float32"))
        for i, v in enumerate(variables)
    ]
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    factor = hvd.size() if options.get("op") == hvd.Sum else 1.0
    for i, variable in enumerate(variables):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -(mean + i) * factor, rtol=1e-3)
    for i, gradient in enumerate(gradients):  # what the user holds stays as it was
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(gradient), float(hvd.rank() + i + 1))


def takes_options() -> None:
    import horoclone.keras as hvd

    takes_gradients({"op": hvd.Sum})
    takes_gradients({"gradient_predivide_factor": 2.0})
    takes_gradients({"compression": hvd.Compression.fp16})
    takes_gradients({"compression": hvd.Compression.bf16})
    takes_gradients({"groups": 2})
    takes_gradients({"groups": 7})
    with pytest.warns(DeprecationWarning, match="num_groups"):
        takes_gradients({"num_groups": 2})


def combines_by_adasum() -> None:
    """Gradients at right angles are added, parallel ones averaged."""
    import keras

    import horoclone.keras as hvd

    crossed, parallel = (
        keras.Variable(np.zeros(hvd.size(), "float32"), name=n) for n in ("crossed", "parallel")
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
    mine = np.eye(hvd.size(), dtype=np.float32)[hvd.rank()]
    optimizer.apply([keras.ops.convert_to_tensor(mine), keras.ops.ones(hvd.size())], [crossed, parallel])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(crossed), -1.0, rtol=1e-6)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(parallel), -1.0, rtol=1e-6)


def groups_of_variables() -> None:
    import keras

    import horoclone.keras as hvd

    variables = [keras.Variable(np.zeros(n, "float32"), name=f"v{n}") for n in (3, 5, 2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=[[variables[2], variables[0]]])
    gradients = [keras.ops.full(v.shape, float(hvd.rank())) for v in variables]
    optimizer.apply(gradients, variables)
    for variable in variables:
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -(hvd.size() - 1) / 2)


def keeps_local_variables() -> None:
    """A local variable's gradient is this rank's own, divided by the size unless told otherwise."""
    import keras

    import horoclone.keras as hvd

    for scale in (True, False):
        ours, mine = (keras.Variable(np.zeros(2, "float32"), name=n) for n in ("ours", "mine"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(mine)
        gradients = [keras.ops.full((2,), float(hvd.rank() + 1)) for _ in range(2)]
        optimizer.apply(gradients, [ours, mine])
        mean = (hvd.size() + 1) / 2
        np.testing.assert_allclose(keras.ops.convert_to_numpy(ours), -mean)
        expected = -(hvd.rank() + 1) / (hvd.size() if scale else 1)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(mine), expected)


def divides_in_full_precision() -> None:
    """By the passes and, of a local variable, by the size."""
    import keras

    import horoclone.keras as hvd

    ours, mine = (keras.Variable(np.zeros(2), dtype="float64", name=n) for n in ("ours", "mine"))
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=3, average_aggregated_gradients=True
    )
    optimizer.register_local_var(mine)
    for _ in range(3):
        optimizer.apply([keras.ops.ones((2,), "float64") for _ in range(2)], [ours, mine])
    for variable, expected in ((ours, 1), (mine, 1 / hvd.size())):  # a float32 factor would be 1e-8 off
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -expected, rtol=1e-15)


def keeps_local_layers() -> None:
    import horoclone.keras as hvd

    model = network()
    optimizer = hvd.PartialDistributedOptimizer(optimizer_named("sgd"), local_layers=model.layers[1])
    compiled(model, optimizer)
    fit(model, shard(hvd.rank()), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    weights = hvd.allgather_object(model.get_weights())
    for index in range(len(weights[0])):
        equal = all(np.array_equal(weights[0][index], other[index]) for other in weights)
        assert equal == (index not in (2, 3)), index


def stays_in_its_process_set() -> None:
    """Ranks 0 and 1 train together; rank 2 is on its own."""
    import keras

    import horoclone.keras as hvd

    both = hvd.add_process_set([0, 1])
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=both)
    optimizer.apply([keras.ops.full((2,), float(hvd.rank() + 1))], [variable])
    expected = -1.5 if both.included() else -3.0
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected)


def scales_losses_alike(outer: bool) -> None:
    """An overflow on one rank skips the step on all, whichever way round the two wrappers are."""
    import keras

    import horoclone.keras as hvd

    sgd, scaled = keras.optimizers.SGD(1.0), keras.optimizers.LossScaleOptimizer
    if outer:
        optimizer = hvd.DistributedOptimizer(scaled(sgd, initial_scale=4.0))
    else:
        optimizer = scaled(hvd.DistributedOptimizer(sgd), initial_scale=4.0)
    variable = keras.Variable(np.zeros(2, "float32"))
    bad = np.inf if hvd.rank() == 0 else 1.0
    step(optimizer, [keras.ops.full((2,), bad)], [variable])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), 0.0)
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 2.0
    step(optimizer, [keras.ops.full((2,), float(2 * hvd.rank()))], [variable])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -(hvd.size() - 1) / 2.0)


def trains_in_half_precision() -> None:
    """mixed_float16: compile() puts a LossScaleOptimizer around ours."""
    import keras

    import horoclone.keras as hvd

    model = compiled(
        network(hvd.rank(), dtype="mixed_float16"), hvd.DistributedOptimizer(optimizer_named("sgd"))
    )
    # It looks at the model's own policy
    if not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        model = compiled(model, keras.optimizers.LossScaleOptimizer(model.optimizer))
    fit(model, shard(hvd.rank()), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert same_everywhere(model)


def is_saved_as_a_plain_optimizer(path: str, passes: int) -> None:
    """Rank 0 saves; the file names Keras's own class; load_model goes on where training stopped."""
    import keras

    import horoclone.keras as hvd

    def distributed() -> Any:
        return hvd.DistributedOptimizer(optimizer_named("adam"), backward_passes_per_step=passes)

    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model = compiled(network(), distributed())
    config = keras.saving.serialize_keras_object(model.optimizer)
    plain = keras.saving.serialize_keras_object(optimizer_named("adam"))
    assert config == plain | {
        "config": model.optimizer.get_config(),
        "registered_name": config["registered_name"],
    }
    fit(model, shard(hvd.rank(), steps=2), callbacks=start)
    if hvd.rank() == 0:
        model.save(path)
    hvd.allgather_object(None)
    if hvd.rank() == passes - 1:
        code = (
            f"import sys, keras; o = keras.models.load_model({path!r}).optimizer; print(len(o.variables), "
            "type(o).__module__.startswith('keras.') and 'horoclone' not in sys.modules)"
        )
        done = run_python(code, check=True)
        assert done.stdout.split() == [str(len(optimizer_named("adam").variables) + 2 * 4), "True"]
    loaded = hvd.load_model(path)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) > 0
    if passes == 1:
        for other in (model, loaded):
            fit(other, shard(hvd.rank()), callbacks=start)
        assert same_everywhere(loaded)
        close(loaded, model, 0.0)


def keeps_what_was_built() -> None:
    """Wrapped after training has begun: momenta and count stay."""
    import horoclone.keras as hvd

    optimizer = optimizer_named("sgd")
    model = compiled(network(), optimizer)
    fit(model, everybody(hvd.size()), batch=BATCH * hvd.size())
    before = [np.array(v) for v in optimizer.variables]
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, optimizer.variables, strict=True))
    compiled(model, optimizer)
    fit(model, shard(hvd.rank()))
    reference = compiled(network(), optimizer_named("sgd"))
    training.as_one_process(model, reference, everybody(hvd.size()), batch=BATCH * hvd.size(), epochs=4)


def refuses_wrong_arguments() -> None:
    import keras

    import horoclone.keras as hvd

    def wrong(error: type[BaseException], text: str, **options: Any) -> None:
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(options.pop("optimizer", None) or keras.optimizers.SGD(), **options)

    wrong(ValueError, "already", optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD()))
    wrong(ValueError, "optimizer of Keras", optimizer="sgd")
    wrong(ZeroDivisionError, "gradient_predivide_factor", gradient_predivide_factor=0.0)
    with pytest.warns(UserWarning, match="no effect"):  # as in Horovod, it is left out
        summing = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), gradient_predivide_factor=2.0, op=hvd.Sum
        )
    variable = keras.Variable(np.zeros(2, "float32"))
    summing.apply([keras.ops.ones((2,))], [variable])
    assert keras.ops.convert_to_numpy(variable).tolist() == [-float(hvd.size())] * 2
    wrong(ValueError, "hvd.Average, hvd.Sum or hvd.Adasum", op=hvd.Max)
    wrong(ValueError, "groups", groups=-1)
    wrong(ValueError, "groups", groups=["a"])
    wrong(ValueError, "backward_passes_per_step", backward_passes_per_step=0)


def misses_gradients_on_one_rank() -> None:
    """Only on torch may a gradient be missing on some ranks: there it counts as zero, unless nobody has it."""
    import keras

    import horoclone.keras as hvd

    variables = [keras.Variable(np.zeros(2, "float32"), name=n) for n in "abc"]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    mine = [keras.ops.ones((2,)), keras.ops.ones((2,)) if hvd.rank() == 0 else None, None]
    with pytest.warns(UserWarning, match="Gradients do not exist for variables \\['c'\\]"):
        optimizer.apply(mine, variables)
    values = [keras.ops.convert_to_numpy(v)[0] for v in variables]
    assert values == [-1.0, -1.0 / hvd.size(), 0.0]


def says_what_differs() -> None:
    """Other shapes on another rank: an error on every rank, and the next step works."""
    import keras

    import horoclone.keras as hvd

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), name="mine")
    variable = keras.Variable(np.zeros(2 + hvd.rank(), "float32"))
    with pytest.raises(Exception, match=r"mine\.0"):
        optimizer.apply([keras.ops.ones(variable.shape)], [variable])
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


def names_the_weight_that_differs() -> None:
    import keras

    import horoclone.keras as hvd

    layer = keras.layers.Dense(2 + hvd.rank(), name="second")
    layer.build((None, 3))
    optimizer = hvd.DistributedOptimizer(optimizer_named("sgd"))
    gradients = [keras.ops.ones(one.shape) for one in layer.variables]
    with pytest.raises(Exception, match=r"tensor 0 \(second/kernel\) as float32\[3,3\]"):
        optimizer.apply(gradients, layer.variables)


def reduces_once_for_several_optimizers() -> None:
    """What a MultiOptimizer is made of does not reduce as well; what it keeps for a variable is found there."""
    import keras

    import horoclone.keras as hvd
    from horoclone.keras.compared import slots_of

    variables = [keras.Variable(np.zeros(2, "float32"), name=name) for name in ("kernel", "bias")]
    first, second = keras.optimizers.SGD(1.0, momentum=0.5), keras.optimizers.SGD(0.5)
    for build_first in (False, True):
        parts = [
            hvd.DistributedOptimizer(one.from_config(one.get_config()), op=hvd.Sum) for one in (first, second)
        ]
        choose = (
            (lambda v, parts=parts: parts[v.name == "bias"])
            if build_first
            else (keras.optimizers.OptimizerMap(parts[0], {"bias": parts[1]}))
        )
        optimizer = keras.optimizers.MultiOptimizer(choose)
        if build_first:
            optimizer.build(variables)
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
        for variable in variables:
            variable.assign(np.zeros(2, "float32"))
        optimizer.apply([keras.ops.full((2,), hvd.rank() + 1.0)] * 2, variables)
        values = [keras.ops.convert_to_numpy(one)[0] for one in variables]
        assert values == [-3.0, -1.5], values
        assert [len(slots) for slots in slots_of(optimizer, variables)] == [1, 0]
    choose = keras.optimizers.OptimizerMap(hvd.DistributedOptimizer(first, op=hvd.Sum))
    with pytest.raises(ValueError, match="inside the MultiOptimizer .* another op"):
        hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(choose))
    second.optimizers = None  # a user's attribute
    hvd.DistributedOptimizer(second)


def fits_again_with_moving_averages() -> None:
    import horoclone.keras as hvd

    optimizer = hvd.DistributedOptimizer(optimizer_named("ema"))
    model = training.compiled(training.network(0), optimizer)
    for _ in range(2):
        training.fit(model, training.shard(hvd.rank()), epochs=1)
    assert training.same_everywhere(model)


def takes_the_largest_scale_of_all_passes() -> None:
    """What Keras overwrites with its gradient, as the scales of float8, is neither added up nor averaged."""
    import keras

    import horoclone.keras as hvd

    scale, weight = (keras.Variable(np.zeros(2, "float32")) for _ in range(2))
    scale.overwrite_with_gradient = True
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    optimizer.build([scale, weight])
    for passes in ((1.0, 3.0), (4.0, 2.0), (0.5, 0.25), (0.125, 0.5)):
        optimizer.apply([keras.ops.full((2,), passes[hvd.rank()])] * 2, [scale, weight])
    values = [keras.ops.convert_to_numpy(one).tolist() for one in (scale, weight)]
    assert values == [[0.5] * 2, [-2.5 - 0.34375] * 2], values


# --- tests -----------------------------------------------------------------------------------------------------------

On = Callable[..., list[Any]]


# Every rule on every backend where their code differs; what only Keras does after the reduction, on one each.
@pytest.mark.in_turn("which")
@pytest.mark.parametrize(
    "which, backend",
    [
        *((which, backend) for which in ("sgd", "scaled") for backend in BACKENDS),
        ("adam", "jax"),
        ("global_clipnorm", "tensorflow"),
        ("global_clipnorm", "jax"),  # where Keras clips inside the traced step
        ("clipnorm", "tensorflow"),
        ("clipvalue", "torch"),
        ("ema", "jax"),
        ("accumulating", "jax"),
        ("accumulating", "torch"),
        *(
            (kind + which, "legacy")
            for kind in ("", "legacy ")
            for which in ("sgd", "adam", "global_clipnorm", "scaled")
        ),
    ],
)
def test_training_on_shards_equals_training_on_everything(on: On, backend: str, which: str) -> None:
    on(backend, training.trains_as_one, which=which)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "body",
    [takes_options, combines_by_adasum, groups_of_variables, keeps_local_variables, says_what_differs],
    ids=lambda body: body.__name__,
)
def test_of_the_wrapper(on: On, backend: str, body: Any) -> None:
    on(backend, body)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "body",
    [
        keeps_local_layers,
        keeps_what_was_built,
        refuses_wrong_arguments,
        takes_the_largest_scale_of_all_passes,
    ],
    ids=lambda body: body.__name__,
)
def test_of_the_wrapper_on_any_backend(on: On, backend: str, body: Any) -> None:
    on(backend, body)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_of_gradients_in_float64(on: On, backend: str) -> None:
    on(backend, divides_in_full_precision, size=3)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_in_half_precision(on: On, backend: str) -> None:
    on(backend, trains_in_half_precision)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outer", [True, False])
def test_an_overflow_on_one_rank_skips_the_step_on_all(on: On, backend: str, outer: bool) -> None:
    on(backend, scales_losses_alike, outer=outer)


@pytest.mark.in_turn
@pytest.mark.parametrize("passes, backend", [(1, "torch"), *((2, one) for one in BACKENDS)])
def test_a_saved_model_is_a_plain_one(on: On, backend: str, passes: int, tmp_path: Any) -> None:
    on(backend, is_saved_as_a_plain_optimizer, path=str(tmp_path / "model.keras"), passes=passes)


def test_process_sets(on: On) -> None:
    on("torch", stays_in_its_process_set, size=3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


def test_a_second_fit_with_moving_averages(on: On) -> None:
    on("jax", fits_again_with_moving_averages)


def test_several_optimizers(on: On) -> None:
    on("torch", reduces_once_for_several_optimizers)


def test_missing_gradients(on: On) -> None:
    on("torch", misses_gradients_on_one_rank)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_names_the_weight(on: On, backend: str) -> None:
    on(backend, names_the_weight_that_differs)


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
