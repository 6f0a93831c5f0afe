"""Elastic training with Keras: `hvd.elastic.run`, KerasState, and the callbacks that commit in model.fit.

For Keras 3 on TensorFlow, JAX and torch, and for tf_keras. See docs/elastic.md.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from horoclone.elastic.attributes import keep_in_place
from horoclone.elastic.generation import Generation, generation
from horoclone.elastic.randomness import RandomStates
from horoclone.elastic.recovery import Recovery, last_recovery
from horoclone.elastic.run import reset_world, run_fn
from horoclone.elastic.sampler import ElasticSampler
from horoclone.elastic.state import ObjectState, State
from horoclone.elastic.variables import VariablesState, converting
from horoclone.errors import StateLost
from horoclone.keras.callbacks import BroadcastGlobalVariablesCallback, _state_of
from horoclone.keras.flavor import LEGACY, assign, backend, keras, to_numpy
from horoclone.owned import Owned

_P = ParamSpec("_P")
_T = TypeVar("_T")

__all__ = [
    "CommitStateCallback", "ElasticSampler", "Generation", "KerasState", "ObjectState", "Owned",
    "RandomStates", "Recovery", "State", "StateLost", "UpdateBatchStateCallback", "UpdateEpochStateCallback",
    "generation", "last_recovery", "run", "run_fn",
]  # fmt: skip


def _horovod_error_of(error: Exception) -> BaseException | None:
    find: Callable[[BaseException], BaseException | None]
    if backend() == "tensorflow":
        from horoclone.tensorflow.elastic import horovod_error_of as find
    elif backend() == "jax":
        from horoclone.jax.failures import horovod_error_of as find
    else:
        return None
    return find(error)


def run(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates func(state, ...) so that it carries on when ranks are lost or added. See horoclone.elastic.run.run_fn.

    A lost collective in a compiled step, which the backend raises as an error of its own, counts as
    HorovodInternalError. JAX compiles steps for one size: they are dropped when another generation begins.
    """

    def reset() -> None:
        if backend() == "jax":
            import jax

            jax.clear_caches()
        reset_world()

    return functools.wraps(func)(run_fn(converting(func, _horovod_error_of), reset))


def _has_variables(value: Any) -> bool:
    kinds = (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
    return isinstance(
        value, (*kinds, keras.optimizers.legacy.Optimizer) if LEGACY else (*kinds, keras.Variable)
    )


def _variables_of(value: Any) -> list[Any]:
    _bring_home(value)
    if not LEGACY and isinstance(value, keras.Variable):
        return [value]
    return list(value.variables() if callable(value.variables) else value.variables)


def _write_variables(value: Any, inside: Sequence[Any]) -> None:
    for variable, one in zip(_variables_of(value), inside, strict=False):  # newer ones keep their value
        assign(variable, one)


keep_in_place(_has_variables, lambda value: [to_numpy(one) for one in _variables_of(value)], _write_variables)


class KerasState(VariablesState):
    """Keeps what KerasState(model, optimizer, batch=0, epoch=0) is given: a model's weights, its optimizer's variables,
    and attributes.

    optimizer: default the one that the model was compiled with. The model must be built; the optimizer is built here.
    ValueError for a model that is not.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        _bring_home(self.model)
        parts = _Parts(self.model, self.optimizer)
        BroadcastGlobalVariablesCallback._build_optimizer(parts)
        return _state_of(parts)

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        return [to_numpy(variable) for variable in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            assign(variable, value)


class _Parts:
    """A model beside the optimizer that the state was given for it."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.weights, self.trainable_variables = model.weights, model.trainable_variables
        self.optimizer = optimizer


def _bring_home(model: Any) -> None:
    """On JAX fit() keeps the values of the variables to itself between its steps."""
    if not LEGACY and backend() == "jax" and hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


class _Update(keras.callbacks.Callback):
    """Counts for the state, and before a commit that comes first, whatever the order of the callbacks is."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        """The commits of this fit() see what this callback counts."""
        self.state.__dict__.setdefault("_counting", {})[type(self)] = self
        self._begin()

    def on_train_end(self, logs: Any = None) -> None:
        """Not called when fit() ends with an exception: the callback of the next fit() takes this one's place."""
        if self.state.__dict__.get("_counting", {}).get(type(self)) is self:
            del self.state.__dict__["_counting"][type(self)]

    def _begin(self) -> None:
        pass

    def _after_batch(self, batch: int) -> None:
        pass

    def _after_epoch(self, epoch: int) -> None:
        pass

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One more batch is done."""
        self._after_batch(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """One more epoch is done."""
        self._after_epoch(epoch)


class UpdateBatchStateCallback(_Update):
    """Keeps in state.batch how many batches of the epoch are done: 0 at its beginning, counted across fit() calls."""

    def _begin(self) -> None:
        self._first = int(self.state.batch)

    def _after_batch(self, batch: int) -> None:
        self.state.batch = self._first + batch + 1

    def _after_epoch(self, epoch: int) -> None:
        self.state.batch = self._first = 0


class UpdateEpochStateCallback(_Update):
    """Keeps in state.epoch how many epochs are done, counted across fit() calls: fit(epochs=N - state.epoch)."""

    def _begin(self) -> None:
        self._first: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where this fit() began: fit(initial_epoch=state.epoch) counts from there, fit() from 0: what counts is
        where this fit() began."""
        if self._first is None:
            self._first, self._from = int(self.state.epoch), epoch

    def _after_epoch(self, epoch: int) -> None:
        assert self._first is not None
        self.state.epoch = self._first + epoch - self._from + 1


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state after every batches_per_commit batches, and at the end of each epoch.

    state.batch and state.epoch, if callbacks keep them, are up to date in the commit, wherever in the list those stand.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(
                f"CommitStateCallback: batches_per_commit must be at least 1, not {batches_per_commit}"
            )
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to count anew, so that ranks that have just come count as all others do."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits the state if batches_per_commit batches have passed."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            for counting in self.state.__dict__.get("_counting", {}).values():
                counting._after_batch(batch)
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits the state at the end of the epoch."""
        for counting in self.state.__dict__.get("_counting", {}).values():
            counting._after_epoch(epoch)
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()
