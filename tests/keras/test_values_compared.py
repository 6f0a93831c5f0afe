"""The ranks' weights and the optimizer's state are compared while Keras trains, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import load

training = load(Path(__file__).with_name("training.py"), "keras_training")
told = load(Path(__file__).parents[1] / "told.py", "told").told
BACKENDS = ["tensorflow", "jax", "torch", "legacy"]


def _model(seed: int, which: str = "adam", **options: Any) -> Any:
    import horoclone.keras as hvd

    optimizer = hvd.DistributedOptimizer(training.optimizer_named(which), **options)
    return training.compiled(training.network(seed), optimizer)


def _fit(model: Any, batches: int, callbacks: Any = ()) -> None:
    import horoclone.keras as hvd

    training.fit(model, training.shard(hvd.rank(), batches), epochs=1, callbacks=callbacks)


def _flip(variable: Any, bit: int = 3) -> None:
    from horoclone.keras.flavor import assign, to_numpy

    value = np.array(to_numpy(variable))
    value.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assign(variable, value)


def _slot(model: Any) -> Any:
    """Some momentum of a weight."""
    optimizer, shape = model.optimizer, model.trainable_variables[2].shape
    variables = optimizer.variables
    found = variables() if callable(variables) else variables
    return next(v for v in found if tuple(v.shape) == tuple(shape))


def finds_a_forgotten_broadcast() -> None:
    import horoclone.keras as hvd

    with told("warn") as lines:
        model = _model(seed=hvd.rank())
        _fit(model, 1)
        assert not lines
        _fit(model, 3)
        assert len(lines) == (hvd.rank() == 0), lines
        assert all(
            "after step 2 the ranks" in line and "BroadcastGlobalVariablesCallback" in line for line in lines
        )
    with told("error"):
        with pytest.raises(Exception, match="do not have the same values: the weight '.*' differs between"):
            _fit(_model(seed=hvd.rank()), 3)


def finds_flipped_bits() -> None:
    """In a weight, then in the optimizer's state, which JAX does not repair: with it the second model is a new one."""
    import horoclone.keras as hvd

    repairs, model = training.the_keras().backend.backend() != "jax", None
    for kind in ("the weight", "the optimizer's state of"):
        with told("repair" if repairs else "warn") as lines:
            if model is None or not repairs:
                model = _model(0)
                _fit(model, 3)
            assert not lines, lines
            weight = model.trainable_variables[2]
            if hvd.rank() == 1:
                _flip(weight if kind == "the weight" else _slot(model))
            _fit(model, 1)
            name = getattr(weight, "path", None) or weight.name
            assert len(lines) == (hvd.rank() == 0), lines
            assert all(f"{kind} {name!r} differs" in line and "no majority" in line for line in lines), lines
            _fit(model, 2)
            assert len(lines) == (hvd.rank() == 0), lines
            assert training.same_everywhere(model) or not repairs


# What each backend tries beside a schedule of callbacks and local variables; torch, which compiles nothing, tries all
# of it by itself.
ALONE: list[dict[str, Any]] = [
    {"backward_passes_per_step": 2},
    {"compression": "fp16"},
    {"op": "Sum"},
    {"groups": 2},
    {"gradient_predivide_factor": 2.0},
]
AT_ONCE = [{"backward_passes_per_step": 2, "compression": "fp16", "groups": 2}]


def is_silent(alone: bool) -> None:
    import horoclone.keras as hvd

    named = {"fp16": hvd.Compression.fp16, "Sum": hvd.Sum}
    with told("error"):
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback
        for which in ("sgd", "adam", "scaled", "global_clipnorm") if alone else ("scaled",):
            model = _model(hvd.rank(), which)
            _fit(model, 4, [begin(0)])
            assert training.same_everywhere(model)
        for options in ALONE if alone else AT_ONCE:
            chosen = {name: named.get(value, value) for name, value in options.items()}
            _fit(_model(hvd.rank(), **chosen), 6, [begin(0)])
        # Two steps of the optimizer before the broadcast.
        model = training.compiled(
            training.network(hvd.rank()),
            hvd.DistributedOptimizer(training.optimizer_named("sgd")),
            steps_per_execution=1 if training.the_keras().backend.backend() == "torch" else 2,
        )
        late = begin(0)
        late.on_batch_end = lambda batch, logs=None, whole=late.on_batch_end: whole(batch, logs)
        _fit(model, 6, [late])
        assert training.same_everywhere(model)
        if hvd.rank():
            _flip(model.trainable_variables[0])
        with pytest.raises(Exception, match="do not have the same values"):
            _fit(model, 4)
        model = _model(0)
        _flip(model.layers[-1].trainable_variables[0], hvd.rank())
        for variable in model.layers[-1].trainable_variables:
            model.optimizer.register_local_var(variable)
        _fit(model, 4)


def compares_after_a_fit_that_failed() -> None:
    import horoclone.keras as hvd

    with told("error"):
        model = _model(hvd.rank())
        late = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        late.on_batch_end = lambda batch, logs=None, whole=late.on_batch_end: whole(batch, logs)
        fails = training.the_keras().callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _fit(model, 2, [late, fails])
        with pytest.raises(Exception, match="do not have the same values"):
            _fit(model, 4)


def test_a_fit_that_failed_before_its_broadcast_does_not_end_the_comparison(on: Callable[..., Any]) -> None:
    on("torch", compares_after_a_fit_that_failed)


def says_which_setting_differs() -> None:
    import horoclone.keras as hvd

    with told("warn", 1 + hvd.rank()) as lines:
        _fit(_model(0), 4)
        assert len(lines) == (hvd.rank() == 0), lines
        assert all("HOROCLONE_COMPARE_STEPS differs" in line for line in lines)
    with told("off" if hvd.rank() else "error"):
        _fit(_model(hvd.rank()), 4)


def goes_on_where_a_rank_has_joined() -> None:
    import horoclone.torch as torch_hvd

    with told("warn") as lines:
        model = _model(0)
        _fit(model, 2)
        if torch_hvd.rank():
            if torch_hvd.rank() == 1:
                _flip(model.trainable_variables[2])
            _fit(model, 1)
            assert len(lines) == (torch_hvd.rank() == 1), lines
            assert all("rank 1 and rank 2" in line for line in lines)
        torch_hvd.join()


def test_a_rank_that_has_joined_is_no_hindrance(on: Callable[..., Any]) -> None:
    on("torch", goes_on_where_a_rank_has_joined, 3)


def keeps_slots_beside_gaps() -> None:
    """Muon has a velocity for some of the variables alone."""
    from horoclone.keras.compared import slots_of

    optimizer, variables = training.the_keras().optimizers.Muon(), training.network(0).trainable_variables
    optimizer.build(variables)
    assert None in optimizer.adam_velocities and all(slots_of(optimizer, variables))
    for variable, slots in zip(variables, slots_of(optimizer, variables), strict=True):
        velocity = optimizer.adam_velocities[optimizer._get_variable_index(variable)]
        assert velocity is None or any(slot is velocity for slot in slots)


def test_what_an_optimizer_keeps_for_some_variables_alone_is_found(on: Callable[..., Any]) -> None:
    on("tensorflow", keeps_slots_beside_gaps, 1)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forgotten_broadcast_is_found(on: Callable[..., Any], backend: str) -> None:
    on(backend, finds_a_forgotten_broadcast)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flipped_bit_is_found_at_the_next_check(on: Callable[..., Any], backend: str) -> None:
    on(backend, finds_flipped_bits)


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_may_differ_is_no_difference(on: Callable[..., Any], backend: str) -> None:
    on(backend, is_silent, alone=backend == "torch")


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_setting_that_differs_is_named_and_off_is_off_for_all(on: Callable[..., Any], backend: str) -> None:
    on(backend, says_which_setting_differs)
