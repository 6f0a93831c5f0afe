"""A state as JSON and a list of arrays, and back. Nothing here can run code that a file names.

A node is null, a bool, an integer, a finite number or a string as itself, else one of
{"dict": [[key, node], ...]}, {"list": [...]}, {"tuple": [...]}, {"float": "nan"}, {"array": place}, {"owned": place}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from horoclone.checkpoint.leaves import Form, Kind, kind_of

DEPTH = 200


class Owned:
    """Owned(value) in a state: what only this rank has. Its value may differ from rank to rank, in form too.

    load() gives Pieces in its place: the values of all the ranks that saved.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class Leaf(NamedTuple):
    """An array of a state. name: in its file, made of the keys that lead to it."""

    name: str
    kind: Kind
    form: Form
    value: Any


class Flat:
    """A state taken apart: its node, its arrays and what it holds as Owned, in the order of their places."""

    def __init__(self, state: Any, where: str = "state") -> None:
        self.leaves: list[Leaf] = []
        self.owned: list[Owned] = []
        self._names: set[str] = {"__metadata__"}
        self.node = self._node(state, where, (), 0)

    def _node(self, value: Any, where: str, keys: tuple[str, ...], depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError(f"{where} lies more than {DEPTH} levels deep: does the state hold itself?")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Owned):
            self.owned.append(value)
            return {"owned": len(self.owned) - 1}
        if isinstance(value, Mapping):
            return {"dict": [self._pair(k, v, where, keys, depth) for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            word = "list" if isinstance(value, list) else "tuple"
            return {
                word: [
                    self._node(one, f"{where}[{place}]", (*keys, str(place)), depth + 1)
                    for place, one in enumerate(value)
                ]
            }
        kind = kind_of(value)
        if kind is None:
            raise TypeError(_cannot(value, where))
        try:
            self.leaves.append(Leaf(self._named(keys), kind, kind.form(value), value))
        except TypeError as error:
            raise TypeError(f"{where}: {error}.") from None
        return {"array": len(self.leaves) - 1}

    def _pair(self, key: Any, value: Any, where: str, keys: tuple[str, ...], depth: int) -> list[Any]:
        if type(key) not in (str, int):
            raise TypeError(
                f"{where} has the key {key!r}: keys of a state that is saved are strings or integers."
            )
        return [key, self._node(value, f"{where}[{key!r}]", (*keys, str(key)), depth + 1)]

    def _named(self, keys: tuple[str, ...]) -> str:
        name = wanted = ".".join(keys) or "state"
        count = 1
        while name in self._names:
            count += 1
            name = f"{wanted}#{count}"
        self._names.add(name)
        return name

    def outline(self) -> Any:
        """What must be alike on all ranks: everything but the values of numbers, strings and arrays."""
        arrays = [[leaf.name, leaf.kind.name, leaf.form.dtype, leaf.form.shape] for leaf in self.leaves]
        return [_without_values(self.node), arrays]


def _cannot(value: Any, where: str) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    text = f"{where} is a {kind}, which cannot be saved."
    framework = kind.split(".")[0]
    if framework in ("torch", "jax", "jaxlib"):
        module = framework.removesuffix("lib")
        return f"{text} Arrays of {module} can, once `import horoclone.{module}` has run."
    return (
        f"{text} A state is made of dicts, lists, tuples, numbers, strings, bools, None and arrays: "
        "pass object.state_dict(), or the values that matter."
    )


def _without_values(node: Any) -> Any:
    if not isinstance(node, dict):
        return None
    ((word, value),) = node.items()
    if word == "dict":
        return {word: [[key, _without_values(one)] for key, one in value]}
    if word in ("list", "tuple"):
        return {word: [_without_values(one) for one in value]}
    return None if word == "float" else node


def built(node: Any, array: Callable[[int, Any], Any], owned: Callable[[int], Any], like: Any = None) -> Any:
    """The state of a node. array(place, like) and owned(place) give what stands there.

    like: a state of the same structure, or None. ValueError that names the first place where the two differ.
    """
    return _built(node, array, owned, like, "state", like is not None)


def _built(node: Any, array: Any, owned: Any, like: Any, where: str, compared: bool) -> Any:
    if not isinstance(node, dict):
        if compared and not (like is None or node is None or type(like) in (bool, int, float, str)):
            raise ValueError(
                f"{where} is {type(node).__name__} in the save and {type(like).__name__} in `like`"
            )
        return node
    ((word, value),) = node.items()
    if word == "float":
        return float(value)
    if word == "owned":
        return owned(value)
    if word == "array":
        if compared:
            if like is None or kind_of(like) is None:
                raise ValueError(f"{where} is an array in the save and {type(like).__name__} in `like`")
            return array(value, (where, like))
        return array(value, None)
    if word == "dict":
        if compared:
            _check_keys([key for key, _ in value], like, where)
        return {
            key: _built(one, array, owned, like[key] if compared else None, f"{where}[{key!r}]", compared)
            for key, one in value
        }
    if word not in ("list", "tuple"):
        raise ValueError(f"{where} is a {word!r}, which this version does not know")
    kind: Any = list if word == "list" else tuple
    if compared and (not isinstance(like, kind) or len(like) != len(value)):
        found = f"{type(like).__name__}" + (f" of {len(like)}" if isinstance(like, (list, tuple)) else "")
        raise ValueError(f"{where} is a {word} of {len(value)} in the save and {found} in `like`")
    parts = [
        _built(one, array, owned, like[place] if compared else None, f"{where}[{place}]", compared)
        for place, one in enumerate(value)
    ]
    if compared and hasattr(like, "_fields"):
        return type(like)(*parts)
    return kind(parts)


def _check_keys(keys: list[Any], like: Any, where: str) -> None:
    if not isinstance(like, Mapping):
        raise ValueError(f"{where} is a dict in the save and {type(like).__name__} in `like`")
    only_saved, only_like = [k for k in keys if k not in like], [k for k in like if k not in keys]
    if only_saved or only_like:
        raise ValueError(f"{where} has the keys {only_saved} only in the save and {only_like} only in `like`")
