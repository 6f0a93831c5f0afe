"""Placeholders for what Horovod has and horoclone does not: importable names that raise Unsupported when they are used.

A script that imports such a name and never calls it runs; one that calls it is told what to do instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from horoclone import errors

_family = "horoclone"


def use_horovods_names() -> None:
    """From now on classes that wrap a user's class say that they are Horovod's: `horovod` was imported, and is us."""
    global _family
    _family = "horovod"


def shown_module(name: str) -> str:
    """The __module__ of classes that are made for users, "torch.optimizer": scripts and libraries tell a wrapped object
    by the word "horovod" in it."""
    return f"{_family}.{name}"


class StandInType(type):
    """The class of stand-ins: they can be subclassed and named in isinstance, not called or looked into."""

    _what: str
    _instead: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise errors.Unsupported(f"{cls._what}: {cls._instead}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):  # Python, debuggers and decorators probe for these
            raise AttributeError(f"{cls._what} has no attribute {name!r}")
        raise errors.Unsupported(f"{cls._what}.{name}: {cls._instead}")


def stand_in(what: str, instead: str) -> Any:
    """A class named `what` ("hvd.elastic.run") that raises Unsupported, ending in `instead`, when it is used."""
    module, _, name = what.rpartition(".")
    return StandInType(name, (), {"__module__": module, "_what": what, "_instead": instead})


def any_name(module: str, instead: str) -> Callable[[str], Any]:
    """The __getattr__ of a module (its __name__ is `module`) of which every public name is a stand-in."""

    @functools.cache
    def find(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return stand_in(f"{module.replace('horoclone', 'horovod', 1)}.{name}", instead)

    return find


class StandInModule(ModuleType):
    """A module of which every public name is a stand-in; the exceptions are the real ones, so that `except` works."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(name, f"Not in this version of horoclone: {instead}")
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        kind = getattr(errors, name, None)
        value = kind if isinstance(kind, type) else stand_in(f"{self.__name__}.{name}", self._instead)
        setattr(self, name, value)
        return value
