"""A state as JSON and a list of arrays, and back. Nothing here can run code that a file names.

A node is null, a bool, an integer, a finite number or a string as itself, else one of
{"dict": [[key, node], ...]}, "ordered" for an OrderedDict and "named" for a named tuple alike, {"list": [...]},
{"tuple": [...]}, {"float": "nan"}, {"array": place}, {"owned": place}."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from horoclone.checkpoint.leaves import Form, Kind, kind_of
from horoclone.owned import Owned

DEPTH = 200
PAIRS, SEQUENCES = ("dict", "ordered", "named"), ("list", "tuple")  # the words whose nodes hold others
DIGITS = 4000  # of an integer; Python reads no longer ones
_INT_BITS = int(DIGITS * math.log2(10))


_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered"}


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
        if type(value) is int and value.bit_length() > _INT_BITS:
            raise ValueError(f"{where} is an integer of more than {DIGITS} digits, which cannot be saved")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Owned):
            self.owned.append(value)
            return {"owned": len(self.owned) - 1}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            pairs = enumerate(zip(value._fields, value, strict=True))
            return {
                "named": [
                    [field, self._item(one, f"{where}.{field}", keys, at, depth)]
                    for at, (field, one) in pairs
                ]
            }
        if word := _MAPPINGS.get(type(value)):
            return {word: [self._pair(k, v, where, keys, depth) for k, v in value.items()]}
        if type(value) in (list, tuple):
            parts = enumerate(value)
            return {
                type(value).__name__: [
                    self._item(one, f"{where}[{at}]", keys, at, depth) for at, one in parts
                ]
            }
        kind = kind_of(value)
        if kind is None:
            raise TypeError(_cannot(value, where))
        try:
            form = kind.form(value)
        except Exception as error:  # whatever a framework says of an array of its own
            raise TypeError(f"{where}: {error}.") from None
        self.leaves.append(Leaf(self._named(keys), kind, form, value))
        return {"array": len(self.leaves) - 1}

    def _item(self, value: Any, where: str, keys: tuple[str, ...], at: int, depth: int) -> Any:
        return self._node(value, where, (*keys, str(at)), depth + 1)

    def _pair(self, key: Any, value: Any, where: str, keys: tuple[str, ...], depth: int) -> list[Any]:
        if type(key) not in (str, int):
            raise TypeError(
                f"{where} has the key {key!r}: keys of a state that is saved are strings or integers."
            )
        return [key, self._node(value, f"{where}[{key!r}]", (*keys, str(key)), depth + 1)]

    def _named(self, keys: tuple[str, ...]) -> str:
        # A lone surrogate has no place in the file's header; the key itself is in the node.
        name = wanted = ".".join(keys).encode(errors="backslashreplace").decode() or "state"
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
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        plain = next(one for one in (Mapping, list, tuple, set, frozenset) if isinstance(value, one))
        word = {Mapping: "dict", set: "sorted", frozenset: "sorted"}.get(plain, plain.__name__)
        return f"{text} It would come back as another type: pass {word}(value)."
    if framework in ("torch", "jax", "jaxlib"):
        module = framework.removesuffix("lib")
        return f"{text} Arrays of {module} can, once `import horoclone.{module}` has run."
    return (
        f"{text} A state is made of dicts, lists, tuples, numbers, strings, bools, None and arrays: "
        "pass object.state_dict(), or the values that matter."
    )


def _without_values(node: Any) -> Any:
    if not isinstance(node, dict) or "float" in node:
        return None
    return mapped(node, _without_values)


def mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """A node of the same word with what change() makes of the nodes in it."""
    ((word, value),) = node.items()
    if word in PAIRS:
        return {word: [[key, change(one)] for key, one in value]}
    return {word: [change(one) for one in value]} if word in SEQUENCES else node


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
    if word == "named" and (not compared or hasattr(like, "_fields")):
        return _built_tuple(value, array, owned, like, where, compared)
    if word in ("dict", "ordered"):
        if compared:
            _check_keys([key for key, _ in value], like, where)
        kind: Any = dict if word == "dict" else OrderedDict
        return kind(
            (key, _built(one, array, owned, like[key] if compared else None, f"{where}[{key!r}]", compared))
            for key, one in value
        )
    parts = [one for _, one in value] if word == "named" else value
    kind = list if word == "list" else tuple
    if compared and (not isinstance(like, kind) or len(like) != len(parts)):
        found = f"{type(like).__name__}" + (f" of {len(like)}" if isinstance(like, (list, tuple)) else "")
        raise ValueError(f"{where} is a {kind.__name__} of {len(parts)} in the save and {found} in `like`")
    made = [
        _built(one, array, owned, like[place] if compared else None, f"{where}[{place}]", compared)
        for place, one in enumerate(parts)
    ]
    return type(like)(*made) if compared and hasattr(like, "_fields") else kind(made)


def _built_tuple(pairs: Any, array: Any, owned: Any, like: Any, where: str, compared: bool) -> Any:
    """A named tuple: a tuple, or what `like` is."""
    fields = tuple(field for field, _ in pairs)
    if compared and like._fields != fields:
        raise ValueError(f"{where} has the fields {fields} in the save and {like._fields} in `like`")
    made = [
        _built(one, array, owned, getattr(like, field) if compared else None, f"{where}.{field}", compared)
        for field, one in pairs
    ]
    return type(like)(*made) if compared else tuple(made)


def _check_keys(keys: list[Any], like: Any, where: str) -> None:
    if not isinstance(like, Mapping):
        raise ValueError(f"{where} is a dict in the save and {type(like).__name__} in `like`")
    only_saved, only_like = [k for k in keys if k not in like], [k for k in like if k not in keys]
    if only_saved or only_like:
        raise ValueError(f"{where} has the keys {only_saved} only in the save and {only_like} only in `like`")
