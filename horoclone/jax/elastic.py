"""Elastic training with JAX: `hvd.elastic.run` and a state of pytrees. See docs/elastic.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from horoclone.elastic.generation import Generation, generation
from horoclone.elastic.randomness import RandomStates
from horoclone.elastic.recovery import Recovery, last_recovery
from horoclone.elastic.run import reset_world, run_fn
from horoclone.elastic.sampler import ElasticSampler
from horoclone.elastic.state import ObjectState, State
from horoclone.elastic.variables import VariablesState, converting
from horoclone.errors import StateLost
from horoclone.jax.failures import horovod_error_of
from horoclone.jax.random_keys import is_key, with_keys, without_keys
from horoclone.owned import Owned

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Form = tuple[list[Any], Any]  # what each leaf is, and the structure

__all__ = [
    "ElasticSampler", "Generation", "JaxState", "ObjectState", "Owned", "RandomStates", "Recovery", "State",
    "StateLost", "generation", "last_recovery", "run", "run_fn",
]  # fmt: skip


def run(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates func(state, ...) so that it carries on when ranks are lost or added. See horoclone.elastic.run.run_fn.

    A lost collective inside a program, which JAX raises as an error of its own, counts as the error that it was.
    Programs with collectives are compiled for one size: they are dropped when another generation begins.
    """

    def reset() -> None:
        jax.clear_caches()
        reset_world()

    return functools.wraps(func)(run_fn(converting(func, horovod_error_of), reset))


class JaxState(VariablesState):
    """Keeps pytrees: JaxState(params=params, opt_state=opt_state, epoch=0) takes pytrees whose leaves are arrays,
    beside plain attributes.

    A keyword whose value has a jax.Array in it is a pytree, every other one an attribute. Read and set them as
    state.params; what is read after restore() or sync() are new arrays on the default device.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._trees = [name for name, value in kwargs.items() if _has_arrays(value)]
        for name in self._trees:
            setattr(self, name, kwargs[name])
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._trees})

    def _variables(self) -> Sequence[Any]:
        """The leaves; _write needs only their places."""
        return [leaf for name in self._trees for leaf in jax.tree_util.tree_leaves(getattr(self, name))]

    def _read(self, variables: Sequence[Any]) -> list[Any]:
        return [np.asarray(leaf) for leaf in without_keys(list(variables))]

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        self._set_trees(self._form(), values)

    def _values_of(self, variables: Sequence[Any]) -> list[Any]:
        return _Leaves(super()._values_of(variables), self._form())

    def _restore_values(self, saved: list[Any]) -> None:
        self._set_trees(saved.form if isinstance(saved, _Leaves) else self._form(), saved)

    def _form(self) -> _Form:
        leaves, form = jax.tree_util.tree_flatten([getattr(self, name) for name in self._trees])
        return [_kind_of(leaf) for leaf in leaves], form

    def _set_trees(self, form: _Form, values: Sequence[Any]) -> None:
        kinds, structure = form
        new = [_made(kind, value) for kind, value in zip(kinds, values, strict=True)]
        for name, tree in zip(self._trees, jax.tree_util.tree_unflatten(structure, new), strict=True):
            setattr(self, name, tree)


class _Leaves(list[Any]):
    """A copy's values with the form of the trees that they are of: later ones may have another one (layers that were
    added, another optimizer). What another rank gets are the values alone, and its trees have their form."""

    def __init__(self, values: list[Any], form: _Form) -> None:
        super().__init__(values)
        self.form = form

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(value))


def _kind_of(leaf: Any) -> Any:
    """What another value has to become to stand in the leaf's place: a key and a number stand for their like."""
    if is_key(leaf) or isinstance(leaf, (bool, int, float, complex)):
        return leaf
    return jax.Array if isinstance(leaf, jax.Array) else np.ndarray


def _made(kind: Any, value: Any) -> Any:
    if is_key(kind):
        return with_keys(kind, jax.numpy.array(value))
    if kind is jax.Array:
        return jax.numpy.array(value)  # a copy: the buffer of the saved array must not become JAX's
    return np.array(value) if kind is np.ndarray else value.item()
