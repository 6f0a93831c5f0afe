"""Elastic training with TensorFlow: `hvd.elastic.run`, states of variables and of Keras models. See docs/elastic.md."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from horoclone.elastic.attributes import keep_in_place
from horoclone.elastic.generation import Generation, generation
from horoclone.elastic.randomness import RandomStates
from horoclone.elastic.recovery import Recovery, last_recovery
from horoclone.elastic.run import reset_world, run_fn
from horoclone.elastic.sampler import ElasticSampler
from horoclone.elastic.state import ObjectState, State
from horoclone.elastic.variables import VariablesState, converting
from horoclone.errors import HorovodInternalError, StateLost
from horoclone.owned import Owned

_P = ParamSpec("_P")
_T = TypeVar("_T")

__all__ = [
    "ElasticSampler", "Generation", "ObjectState", "Owned", "RandomStates", "Recovery", "State", "StateLost",
    "TensorFlowKerasState", "TensorFlowState", "generation", "last_recovery", "run", "run_fn",
]  # fmt: skip

_OUR_OPS = re.compile(
    r"Horovod\w*(Allreduce|Allgather|Broadcast|Alltoall|Reducescatter|Barrier|Join)", re.IGNORECASE
)


def horovod_error_of(error: BaseException) -> HorovodInternalError | None:
    """The lost collective inside an exception that TensorFlow raised, or None when it is another's."""
    if not isinstance(error, tf.errors.UnknownError) or isinstance(error, ValueError):
        return None
    text = f"{error} {getattr(error.op, 'type', '')}"
    return HorovodInternalError(str(error.message)) if _OUR_OPS.search(text) else None


def run(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates func(state, ...) so that it carries on when ranks are lost or added. See horoclone.elastic.run.run_fn.

    A lost collective in a graph, which TensorFlow raises as UnknownError, counts as HorovodInternalError.
    """
    return functools.wraps(func)(run_fn(converting(func, horovod_error_of), reset_world))


def _variables_in(value: Any) -> list[Any]:
    """Of a variable, a module, and an object of whatever Keras; empty for anything else."""
    if isinstance(value, tf.Variable):
        return [value]
    if not hasattr(type(value), "variables"):
        return []
    found = value.variables() if callable(value.variables) else value.variables
    is_ours = isinstance(found, (list, tuple)) and all(hasattr(type(one), "assign") for one in found)
    return list(found) if is_ours else []


def _write_variables(value: Any, inside: Sequence[Any]) -> None:
    for variable, one in zip(_variables_in(value), inside, strict=False):  # newer ones keep their value
        variable.assign(one)


keep_in_place(
    lambda value: bool(_variables_in(value)),
    lambda value: [_inner(one).numpy() for one in _variables_in(value)],
    _write_variables,
)


class TensorFlowState(VariablesState):
    """Keeps tf.Variables and attributes: TensorFlowState(variables=[...], epoch=0).

    In TensorFlow 1's graph mode `session` (default: the default one) reads and writes them, and variables=None means
    all global variables.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None and tf.executing_eagerly():
            raise ValueError("TensorFlowState: TensorFlow runs eagerly, so pass the list of variables")
        self.variables = tf.compat.v1.global_variables() if variables is None else list(variables)
        self.session = session
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        return self.variables

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        if tf.executing_eagerly():
            return [variable.numpy() for variable in variables]
        values: list[Any] = self._session().run(list(variables)) if variables else []
        return values

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            if tf.executing_eagerly():
                variable.assign(value)
            else:
                variable.load(value, self._session())

    def _session(self) -> Any:
        session = self.session or tf.compat.v1.get_default_session()
        if session is None:
            raise ValueError("TensorFlowState: graph mode needs a session; pass session= or enter one")
        return session


class TensorFlowKerasState(VariablesState):
    """Keeps what TensorFlowKerasState(model, optimizer, epoch=0) is given: a Keras model's weights, its optimizer's
    variables, attributes.

    optimizer: default the one that the model was compiled with. The model must be built. backend is not needed.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self.backend = backend
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        return variables_of(self.model, self.optimizer)

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        return [_inner(variable).numpy() for variable in variables]

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _inner(variable: Any) -> Any:
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def variables_of(model: Any, optimizer: Any) -> list[Any]:
    """A built model's weights and its optimizer's variables, each once; the optimizer is built for it."""
    if optimizer is None:
        return list(model.weights)
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(model.trainable_variables)
    elif not getattr(optimizer, "built", False) or not hasattr(optimizer, "path"):
        optimizer.build(model.trainable_variables)
    own = optimizer.variables
    found = [*model.weights, *(own() if callable(own) else own)]
    return list({id(variable): variable for variable in found}.values())
