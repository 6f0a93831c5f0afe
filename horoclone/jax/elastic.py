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
_Form = tuple[list[str], list[Any], Any]  # the leaves' names, what each is, and the structure

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

    def _read(self, variables: Sequence[Any]) -> _Leaves:
        return _Leaves([np.asarray(leaf) for leaf in without_keys(list(variables))], self._form())

    def _write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        self._set_trees(self._form(), values)

    def _values_of(self, variables: Sequence[Any]) -> list[Any]:
        return _Leaves(super()._values_of(variables), self._form())

    def _restore_values(self, saved: Any) -> None:
        self._set_trees(saved.form, saved)

    def _names_of(self, values: Any) -> list[str]:
        names: list[str] = values.names
        return names

    def _forms_of(self, values: Sequence[Any]) -> list[Any]:
        return list(zip(self._names_of(values), super()._forms_of(values), strict=True))

    def _from_disk(self, found: dict[str, Any]) -> None:
        values, names = found.get("variables", {}), self._names_of(self._saved_values)
        if set(values) == {str(place) for place in range(len(names))}:  # as saves once were
            found = {**found, "variables": {name: values[str(place)] for place, name in enumerate(names)}}
        super()._from_disk(found)

    def _take_from_disk(self, found: dict[str, Any]) -> None:
        mine: Any = self._saved_values
        super()._take_from_disk(found)
        self._saved_values = _Leaves(self._saved_values, mine.form)

    def _set_content(self, content: Any) -> None:
        plain, values = content
        super()._set_content((plain, _Leaves(values, self._form()) if type(values) is _Named else values))

    def _form(self) -> _Form:
        pairs, form = jax.tree_util.tree_flatten_with_path([getattr(self, name) for name in self._trees])
        names = [self._trees[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in pairs]
        if len(set(names)) < len(names):  # a class of the user's may give two leaves one key
            names = [str(place) for place in range(len(names))]
        return names, [_kind_of(leaf) for _, leaf in pairs], form

    def _set_trees(self, form: _Form, values: Sequence[Any]) -> None:
        _, kinds, structure = form
        new = [_made(kind, value) for kind, value in zip(kinds, values, strict=True)]
        for name, tree in zip(self._trees, jax.tree_util.tree_unflatten(structure, new), strict=True):
            setattr(self, name, tree)


class _Named(list[Any]):
    """A copy's values as another rank gets them, with the leaves' names: its own trees, which must have leaves of the
    same names, have their form."""

    def __init__(self, values: Sequence[Any], names: list[str]) -> None:
        super().__init__(values)
        self.names = names

    def __reduce__(self) -> Any:
        return _Named, (list(self), self.names)


class _Leaves(_Named):
    """A copy's values with the form of the trees that they are of: later ones may have another one (layers that were
    added, another optimizer)."""

    def __init__(self, values: Sequence[Any], form: _Form) -> None:
        super().__init__(values, form[0])
        self.form = form


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(value))


def _kind_of(leaf: Any) -> Any:
    """What another value has to become to stand in the leaf's place: keys, numbers and texts stand for their like."""
    if is_key(leaf) or isinstance(leaf, (bool, int, float, complex, str)):
        return leaf
    return jax.Array if isinstance(leaf, jax.Array) else np.ndarray


def _made(kind: Any, value: Any) -> Any:
    if is_key(kind):
        return with_keys(kind, jax.numpy.array(value))
    if kind is jax.Array:
        return jax.numpy.array(value)  # a copy: the buffer of the saved array must not become JAX's
    return np.array(value) if kind is np.ndarray else value.item()
