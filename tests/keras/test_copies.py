"""Copies of wrapped optimizers, however they are made, reduce as the original does, or refuse at their first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import load

On = Callable[..., list[Any]]
the_keras = load(Path(__file__).with_name("training.py"), "keras_training").the_keras


# --- what the ranks run ----------------------------------------------------------------------------------------------


def sgd(kind: str, rate: float = 1.0, **options: Any) -> Any:
    optimizers = the_keras().optimizers
    return (optimizers.legacy if kind == "legacy" else optimizers).SGD(rate, **options)


def a_variable() -> Any:
    from horoclone.keras.flavor import LEGACY

    if LEGACY:
        import tensorflow as tf

        return tf.Variable([0.0])
    return the_keras().Variable([0.0])


def stepped(optimizer: Any, times: int = 1) -> float:
    """Where a variable is after steps with the gradient rank + 1: -1.5 a step with Average, -3 with Sum."""
    from horoclone import runtime
    from horoclone.keras.flavor import to_numpy, to_tensor

    variable = a_variable()
    for _ in range(times):
        optimizer.apply_gradients([(to_tensor(np.array([runtime.rank() + 1.0], np.float32)), variable)])
    return float(np.asarray(to_numpy(variable))[0])


def ways() -> dict[str, Callable[[Any], Any]]:
    import copy
    import pickle

    import cloudpickle

    keras = the_keras()
    saving = getattr(keras, "saving")  # noqa: B009
    return {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda o: pickle.loads(pickle.dumps(o)),
        "cloudpickle": lambda o: cloudpickle.loads(cloudpickle.dumps(o)),
        "from_config": lambda o: o.__class__.from_config(o.get_config()),
        "from_config of the plain class": lambda o: type(o)._horoclone_base.from_config(o.get_config()),
        "constructor": lambda o: type(o)._horoclone_base(**_arguments(o)),
        "serialize": lambda o: keras.optimizers.deserialize(keras.optimizers.serialize(o)),
        "saving": lambda o: saving.deserialize_keras_object(saving.serialize_keras_object(o)),
        "get": keras.optimizers.get,
        "get of its configuration": lambda o: keras.optimizers.get(keras.optimizers.serialize(o)),
        "a copy of a pickle's copy": lambda o: copy.deepcopy(pickle.loads(pickle.dumps(copy.copy(o)))),
    }


def _arguments(optimizer: Any) -> dict[str, Any]:
    return {key: value for key, value in optimizer.get_config().items() if key != "is_legacy_optimizer"}


def copies_reduce(kind: str) -> None:
    import horoclone.keras as hvd

    just_one = hvd.add_process_set([1])
    for options, right in (
        ({}, -1.5),
        ({"op": hvd.Sum}, -3.0),
        ({"compression": hvd.Compression.fp16, "gradient_predivide_factor": 2.0}, -1.5),
        ({"process_set": just_one}, -(hvd.rank() + 1.0)),
    ):
        for name, way in ways().items():
            if "process_set" in options and "pickle" in name:
                continue
            original = hvd.DistributedOptimizer(sgd(kind), **options)
            made = way(original)
            assert (made is original) == (name == "get")
            assert stepped(made) == right, (name, options)
            assert made is original or stepped(original) == right, (name, options)
            assert ".distributed" not in str(getattr(made, "name", "") or getattr(made, "_name", ""))


def copies_add_up(kind: str) -> None:
    """backward_passes_per_step is kept: the first pass moves nothing, the second applies the sum of both."""
    import horoclone.keras as hvd

    for name, way in ways().items():
        made = way(hvd.DistributedOptimizer(sgd(kind), backward_passes_per_step=2))
        assert stepped(made, 1) == 0.0, name
        made = way(hvd.DistributedOptimizer(sgd(kind), backward_passes_per_step=2))
        assert stepped(made, 2) == -3.0, name


def copies_keep_the_state_of_each_variable(kind: str) -> None:
    """Variables whose first gradients come late, in another order than the optimizer is given: momentum is theirs."""
    import copy
    import pickle

    import tensorflow as tf

    import horoclone.keras as hvd

    def step(optimizer: Any, *places: int) -> None:
        grads = [tf.constant(10.0**i * (hvd.rank() + 1)) if i in places else None for i in range(3)]
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))

    for way in (copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        for before in ([(1, 2)], [(2,), (1, 2)], [(1, 2), (0, 1, 2)], [(2,), (0,), (1,)]):
            for after in ([(0, 1, 2)], [(1,), (0, 2)], [(0,), (2,), (0, 1, 2)]):
                results = []
                for copied in (False, True):
                    variables = [tf.Variable(0.0) for _ in range(3)]
                    optimizer = hvd.DistributedOptimizer(sgd(kind, momentum=0.5))
                    if kind == "new":
                        optimizer.build(variables)
                    for places in before:
                        step(optimizer, *places)
                    if copied:
                        optimizer = way(way(optimizer))
                        if kind == "new":
                            optimizer.build(variables)
                    for places in after:
                        step(optimizer, *places)
                    results.append([float(v) for v in variables] + [int(optimizer.iterations)])
                assert results[0] == results[1], (before, after)


def copies_whose_first_step_has_fewer_variables(kind: str) -> None:
    """Without build(), as in a loop of the user's own: momentum goes on, or an error says what to add."""
    import copy
    import pickle

    import horoclone.keras as hvd
    from horoclone.keras.flavor import to_numpy, to_tensor

    def step(optimizer: Any, *places: int) -> None:
        gradient = [to_tensor(np.array([hvd.rank() + 1.0], np.float32)) for _ in places]
        optimizer.apply_gradients(list(zip(gradient, [variables[i] for i in places], strict=True)))

    def values() -> list[float]:
        return [float(np.asarray(to_numpy(v))[0]) for v in variables]

    pickled = lambda o: pickle.loads(pickle.dumps(o))  # noqa: E731
    for way in (copy.copy, copy.deepcopy, pickled, lambda o: copy.deepcopy(copy.copy(o))):
        variables = [a_variable() for _ in range(3)]
        original = hvd.DistributedOptimizer(sgd(kind, momentum=0.5))
        step(original, 0, 1, 2)
        made = way(original)
        if way is pickled and kind == "new":
            with pytest.raises(hvd.Unsupported, match=r"built for other variables.*copy.build"):
                step(made, 2, 0)
            made = way(original)
            made.build(variables)
        step(made, 2, 0)
        assert values() == [-3.75, -1.5, -3.75]
        step(made, 1)
        assert values() == [-3.75, -3.75, -3.75]
    unused = hvd.DistributedOptimizer(sgd(kind, momentum=0.5))
    variables = [a_variable()]
    step(copy.deepcopy(unused), 0)  # one that has not trained has no state
    assert values() == [-1.5]


def gradients_without_variables(passes: int) -> None:
    """They are those of the variables that the copy was built for, in their order, where the original had more."""
    for places in [(2, 0), (1,), (2, 1, 0)]:
        gradients_of(places, passes)


def gradients_of(places: Sequence[int], passes: int) -> None:
    import copy

    import horoclone.keras as hvd

    keras = the_keras()
    variables = [keras.Variable(np.zeros(2, np.float32)) for _ in range(3)]
    original = hvd.DistributedOptimizer(sgd("new", momentum=0.5), backward_passes_per_step=passes)
    one = keras.ops.full((2,), hvd.rank() + 1.0)
    for _ in range(2):
        original.apply([one] * 3, variables)
    made, some = copy.deepcopy(original), [variables[i] for i in places]
    made.build(some)
    gradients = [one * (place + 1) for place in places]
    trained, own = [v.value for v in some], [v.value for v in made.variables]
    for _ in range(2):
        if keras.backend.backend() == "jax":
            import jax

            trained, own = jax.jit(made.stateless_apply)(own, gradients, trained)
        else:
            made.apply(gradients)
            trained = [v.value for v in some]
    for place, value in zip(places, trained, strict=True):
        mean = 1.5 * (place + 1)
        momenta = [0.5 * (-2.25 if passes == 1 else -3.0) - mean * passes]
        if passes == 1:
            momenta.append(0.5 * momenta[0] - mean)
        before = -3.75 if passes == 1 else -3.0
        assert float(keras.ops.convert_to_numpy(value)[0]) == before + sum(momenta), places


def a_scaled_copy_is_for_all_variables() -> None:
    """On JAX a LossScaleOptimizer takes states by place alone."""
    import copy

    import horoclone.keras as hvd

    keras = the_keras()
    variables = [keras.Variable(np.zeros(2, np.float32)) for _ in range(2)]
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd("new")))
    scaled.build(variables)
    made = copy.deepcopy(scaled)
    made.build(variables[1:])
    with pytest.raises(hvd.Unsupported, match="copy of one that has trained, for fewer variables"):
        made.stateless_apply(
            [v.value for v in made.variables], [keras.ops.ones(2)], [v.value for v in variables[1:]]
        )


def a_model(kind: str, optimizer: Any) -> Any:
    keras = the_keras()
    layers = [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    return model


def fitted(model: Any) -> float:
    """The weight after one step from 0: 0.3 of both ranks' average, 0.2 or 0.4 where a rank trains alone."""
    import horoclone.keras as hvd

    model.set_weights([np.zeros((1, 1), np.float32)])
    y = np.full((4, 1), hvd.rank() + 1.0, np.float32)
    model.fit(np.ones((4, 1), np.float32), y, batch_size=4, verbose=0)
    return round(float(model.get_weights()[0][0, 0]), 4)


def models_reduce(kind: str, folder: str) -> None:
    import copy
    import pickle

    import horoclone.keras as hvd

    keras, rank = the_keras(), hvd.rank()
    # Keras 3 builds optimizers from h5 without variables
    old = "keras" if keras.__name__ == "keras" else "h5"

    def saved(suffix: str, **options: Any) -> Callable[[Any], Any]:
        def way(model: Any) -> Any:
            path = f"{folder}/{kind}-{rank}.{suffix}"
            model.save(path)
            return keras.models.load_model(path, **options)

        return way

    def cloned(model: Any) -> Any:
        other = keras.models.clone_model(model)
        other.compile(copy.deepcopy(model.optimizer), keras.losses.MeanSquaredError())
        return other

    def by_horovods_load_model(model: Any) -> Any:
        path = f"{folder}/{kind}-{rank}.{old}"
        model.save(path)
        return hvd.load_model(path)

    def with_custom_objects(model: Any) -> Any:
        def made(**config: Any) -> Any:
            return hvd.DistributedOptimizer(sgd(kind).__class__(**config))

        return saved(old, custom_objects={"unused": made})(model)

    every = {
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "deepcopy": copy.deepcopy,
        "keras": saved("keras"),
        "h5": saved(old),
        "clone": cloned,
        "hvd.load_model": by_horovods_load_model,
        "custom_objects": with_custom_objects,
    }
    model = a_model(kind, hvd.DistributedOptimizer(sgd(kind, 0.1)))
    assert fitted(model) == 0.3
    for name, way in every.items():
        assert fitted(way(model)) == 0.3, name
    assert fitted(model) == 0.3, "no copy has changed it"


def options_that_are_not_known(kind: str) -> None:
    """A configuration from another process, with options that this one has not seen: nothing is guessed."""
    import horoclone.keras as hvd
    from horoclone.keras import copies

    keras = the_keras()
    config = keras.optimizers.serialize(hvd.DistributedOptimizer(sgd(kind), op=hvd.Sum))
    copies._known.clear()
    with pytest.raises(hvd.Unsupported, match=r"hvd.DistributedOptimizer\(model.optimizer, ...\)"):
        stepped(keras.optimizers.get(dict(config)))
    made = keras.optimizers.get(dict(config))
    assert hvd.DistributedOptimizer(made, op=hvd.Sum) is made
    assert stepped(made) == -3.0
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(made)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(made.__class__.from_config(made.get_config()))


def local_variables_stay_local(kind: str) -> None:
    import copy

    import horoclone.keras as hvd

    own = hvd.rank() + 1.0
    model = a_model(kind, "sgd")
    optimizer = hvd.PartialDistributedOptimizer(
        sgd(kind, 0.1), local_layers=model.layers[0], scale_local_gradients=False
    )
    for made in (optimizer, copy.deepcopy(optimizer), type(optimizer).from_config(optimizer.get_config())):
        model.compile(made, "mse")
        assert fitted(model) == round(0.2 * own, 4)
    with pytest.raises(hvd.Unsupported, match="local variables"):
        stepped(copy.deepcopy(optimizer))


def says_who_it_is(kind: str) -> None:
    """What Lightning, Merlin and TensorFlow's recommenders-addons ask; and that classes do not pile up."""
    import horovod.keras as hvd

    optimizer = hvd.DistributedOptimizer(sgd(kind))
    assert "horovod" in str(type(optimizer)) and type(optimizer).__module__.startswith("horovod")
    assert optimizer.__module__.startswith("horovod") and "horovod._keras" in str(optimizer)
    assert type(optimizer).__name__ == "SGD"
    assert the_keras().optimizers.serialize(optimizer)["module"].startswith("keras")
    for options in ({}, {"op": hvd.Sum}):
        first, second = (hvd.DistributedOptimizer(sgd(kind), **options) for _ in range(2))
        assert type(first) is type(second)


# --- tests -----------------------------------------------------------------------------------------------------------

BODIES = [
    copies_reduce, copies_add_up, copies_whose_first_step_has_fewer_variables,
    options_that_are_not_known, local_variables_stay_local, says_who_it_is,
]  # fmt: skip
EACH_KERAS = [
    ("tensorflow", "new"), ("jax", "new"), ("torch", "new"), ("legacy", "new"), ("legacy", "legacy"),
]  # fmt: skip


@pytest.mark.in_turn("backend", "kind")
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("backend, kind", EACH_KERAS)
def test_copies(on: On, backend: str, kind: str, body: Any) -> None:
    on(backend, body, kind=kind, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


@pytest.mark.in_turn
@pytest.mark.parametrize("backend, kind", EACH_KERAS)
def test_copies_of_models(on: On, backend: str, kind: str, tmp_path: Any) -> None:
    on(backend, models_reduce, kind=kind, folder=str(tmp_path))


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_copies_keep_the_state_of_each_variable(on: On, kind: str) -> None:
    on("legacy", copies_keep_the_state_of_each_variable, kind=kind)


@pytest.mark.in_turn("backend")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_gradients_without_variables(on: On, backend: str, passes: int) -> None:
    on(backend, gradients_without_variables, passes=passes)


def test_a_scaled_copy_is_for_all_variables(on: On) -> None:
    on("jax", a_scaled_copy_is_for_all_variables)
