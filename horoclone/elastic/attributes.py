"""What of the attributes of an elastic state stays the object that it is, and how the rest is copied around it.

A learning-rate scheduler refers to its optimizer, and the training function to both. A deep copy of the scheduler would
carry a copy of the optimizer along and set the rate of that one. So objects stay themselves, whoever refers to them: a
copy has a Place for each, and beside it what is inside. Containers and arrays are copied. Pure.
"""

from __future__ import annotations

import copy
import functools
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_RESOLVE = "horoclone.elastic.attributes"  # key of a memo of deepcopy; its own keys are numbers
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, type, types.FunctionType,
    types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip


class Place:
    """Stands in a copy for an object that stays itself. name: where it is in the state, alike on all ranks.

    value: the object, where the copy was made; a copy that comes from elsewhere is about the object of that name. made:
    the class of an object of which attributes are everything: where there is none yet, one is made.
    """

    def __init__(self, name: str, kind: str = "", made: type | None = None, value: Any = None) -> None:
        self.name, self.kind, self.made, self.value = name, kind, made, value

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        resolve = memo.get(_RESOLVE)
        return self if resolve is None else resolve(self)

    def __reduce__(self) -> Any:
        return Place, (self.name, self.kind, self.made)

    def __repr__(self) -> str:
        return f"<the {self.kind} {self.name!r} itself>"


class Way(NamedTuple):
    """How what is inside of an object is read, and written into the same object."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]


States = dict[str, tuple[Place, Any]]  # name of the place -> what is inside of its object
Named = Iterable[tuple[str, Any]]

_registered: list[tuple[Callable[[Any], bool], Way]] = []


def keep_in_place(
    is_one: Callable[[Any], bool], read: Callable[[Any], Any], write: Callable[[Any, Any], Any]
) -> None:
    """A framework says how its objects, which have no load_state_dict() or a special one, are kept."""
    _registered.append((is_one, Way(read, write)))


def _write_vars(value: Any, inside: dict[str, Any]) -> None:
    own = vars(value)
    own.clear()
    own.update(inside)


_BY_STATE_DICT = Way(lambda value: value.state_dict(), lambda value, inside: value.load_state_dict(inside))
_BY_VARS = Way(lambda value: dict(vars(value)), _write_vars)


def _way_of(value: Any) -> Way | None:
    """For an object with a state of its own."""
    for is_one, way in _registered:
        if is_one(value):
            return way
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return _BY_STATE_DICT if all(map(callable, methods)) else None


class Indistinct(TypeError):
    """Two objects that have a state, and nothing by which another rank can tell one from the other."""


class Attributes:
    """Those of one moment. fixed: objects that the state keeps in another way, and their parts.

    holding: the names of attributes that are, or refer to, an object which stays itself.
    """

    def __init__(self, values: Mapping[str, Any], fixed: Named) -> None:
        self.values, self.holding = values, set[str]()
        self._places: dict[int, Place] = {}
        self._ways: dict[str, Way] = {}
        self._named: dict[str, Place] = {}  # by every name under which it was met
        self._fix(fixed)
        self._has_parts = False
        self._visit_all()
        if self._has_parts:  # others may refer to a module's parameters, and have been looked at before
            self._visit_all()

    def _fix(self, named: Named) -> None:
        for name, value in named:
            self._put(name, value, None)

    def _put(self, name: str, value: Any, made: type | None) -> None:
        place = Place(name, type(value).__qualname__, made, value)
        self._named.setdefault(name, self._places.setdefault(id(value), place))

    def _visit_all(self) -> None:
        self._seen: dict[int, bool] = {}
        for name, value in self.values.items():
            if self._visit(name, value):
                self.holding.add(name)

    def _visit(self, name: str, value: Any) -> bool:
        """Whether it is or refers to something that stays itself."""
        if isinstance(value, _LEAVES) or (
            type(value) in (list, tuple) and all(type(one) in _LEAVES for one in value)
        ):
            return False
        if id(value) in self._places:
            self._named.setdefault(name, self._places[id(value)])
            return True
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = False
        way, is_plain = _way_of(value), _is_plain_object(value)
        if way is None and not (is_plain and "{" not in name):
            children = [self._visit(f"{name}{key}", child) for key, child in _children(value)]
            self._seen[id(value)] = any(children)
            if not any(children) or not (is_plain or isinstance(value, types.MethodType)):
                return any(children)
        if way is None:
            way = None if isinstance(value, types.MethodType) else _BY_VARS
        self._keep(name, value, way)
        return True

    def _keep(self, name: str, value: Any, way: Way | None) -> None:
        if name in self._ways:  # of a set, whose order differs from rank to rank
            raise Indistinct(
                f"{name} stands for two objects that have a state: keep them in a list or a dict"
            )
        self._put(name, value, type(value) if way is _BY_VARS else None)
        if way is not None:
            self._ways[name] = way
        if way is _BY_VARS:
            for key, child in _children(value):
                self._visit(f"{name}{key}", child)
        if hasattr(value, "named_parameters"):
            self._has_parts = True
            self._fix(parts_of_module(name, value))

    def kept(self) -> list[Any]:
        """The objects that stay themselves, without the fixed ones."""
        return [place.value for place in self._places.values() if place.name in self._ways]

    def copied(self, names: Iterable[str]) -> tuple[dict[str, Any], States]:
        """Deep copies of these attributes, with places, and what is inside of the objects that stay themselves."""
        kept = [place for place in self._places.values() if place.name in self._ways]
        inside = [self._ways[place.name].read(place.value) for place in kept]
        memo: dict[Any, Any] = dict(self._places)
        values, inside = copy.deepcopy(({name: self.values[name] for name in names}, inside), memo)
        return values, {place.name: (place, one) for place, one in zip(kept, inside, strict=True)}

    def resolved(self, values: dict[str, Any], states: States) -> tuple[dict[str, Any], list[Any]]:
        """Copies with the objects in their places; [(write, object, what is to be inside)]. ValueError where this
        process has no such object."""
        kept = [self._at(place) for place, _ in states.values()]
        memo: dict[Any, Any] = {_RESOLVE: self._at}
        found, inside = copy.deepcopy((values, [one for _, one in states.values()]), memo)
        return found, [(self._way(value).write, value, one) for value, one in zip(kept, inside, strict=True)]

    def _way(self, value: Any) -> Way:
        return _way_of(value) or _BY_VARS

    def _at(self, place: Place) -> Any:
        if place.value is not None:
            return place.value
        mine = self._named.get(place.name)
        if mine is not None and place.kind in ("", mine.kind):
            return mine.value
        if place.made is not None:
            value: Any = object.__new__(place.made)
            self._named[place.name] = Place(place.name, place.kind, place.made, value)
            return value
        raise ValueError(
            f"the elastic state has a {place.kind or 'value'} at {place.name}, and in this process there is none; make "
            "the same state, with the same objects in it, on every rank"
        )


def attribute_of(name: str) -> str:
    """The attribute that the name of a place begins with."""
    return re.split(r"[^\w]", name, maxsplit=1)[0]


def parts_of_module(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    """The modules, parameters and buffers of a torch.nn.Module: others may refer to each of them."""
    for kind in ("modules", "parameters", "buffers"):
        for key, value in getattr(module, f"named_{kind}")():
            if value is not module:
                yield f"{name}.{key}", value


def _is_plain_object(value: Any) -> bool:
    """Whether its attributes are all that is inside of it, as far as copy and pickle know."""
    kind: Any = type(value)
    names = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__new__", "__deepcopy__")
    return (
        hasattr(value, "__dict__")
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in names)
        and not any(one.__dict__.get("__slots__") for one in kind.__mro__)
    )


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """What deepcopy would go into, and how that is called."""
    if isinstance(value, dict):
        for place, (key, child) in enumerate(value.items()):
            name = repr(key) if isinstance(key, (str, int)) else f"{type(key).__name__} {place}"
            yield f"[{name}]", child
            yield f".keys()[{place}]", key
    elif isinstance(value, (list, tuple, deque)):
        for place, child in enumerate(value):
            yield f"[{place}]", child
    elif isinstance(value, (set, frozenset)):
        for child in value:
            yield f"{{{type(child).__name__}}}", child
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif hasattr(type(value), "__deepcopy__"):
        return
    for key, child in list(getattr(value, "__dict__", {}).items()):
        yield f".{key}", child
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if key not in ("__dict__", "__weakref__") and hasattr(value, key):
                yield f".{key}", getattr(value, key)
