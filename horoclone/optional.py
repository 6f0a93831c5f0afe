"""The optional parts of the package: a folder each, which nothing else imports and which may be absent.

Where the rest offers one of them, as `hvd.checkpoint`, `horoclone plan` or `--dashboard`, it asks for it here by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

PARTS = ("checkpoint", "lightning", "live.dashboard", "plan", "ps", "ray", "spark")


def is_there(part: str) -> bool:
    """Whether a part lies in this installation; what it needs of other packages may be missing all the same."""
    return importlib.util.find_spec(f"horoclone.{part}") is not None


def load(name: str) -> Any:
    """A part, or a module of one: "plan", "live.dashboard.server". ImportError that says so where it is absent."""
    part = _part_of(name)
    if not is_there(part):
        raise ImportError(
            f"horoclone.{part} is not part of this installation of horoclone", name=f"horoclone.{part}"
        )
    return importlib.import_module(f"horoclone.{name}")


def offers(module: str, names: list[str], **parts: str) -> Callable[[str], Any]:
    """`__getattr__` of a module that offers parts, or modules of them, as attributes: attribute -> what is loaded when
    it is asked for. names: the module's `__all__`, from which absent ones are taken out."""
    there = {name: part for name, part in parts.items() if is_there(_part_of(part))}
    names[:] = [name for name in names if name not in parts or name in there]

    def __getattr__(name: str) -> Any:
        """What is loaded only where it is used."""
        if name in there:
            return load(there[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def _part_of(name: str) -> str:
    return next(part for part in PARTS if name == part or name.startswith(f"{part}."))
