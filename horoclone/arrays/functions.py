"""The names under which users call the operations on arrays, for one adapter. NumPy's and CuPy's bindings use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horoclone.arrays.adapter import Adapter, Operations
from horoclone.arrays.collectives import Collectives
from horoclone.arrays.grouped import Grouped
from horoclone.arrays.handles import poll, synchronize
from horoclone.arrays.messages import Messages
from horoclone.arrays.rooted import Rooted

KINDS: tuple[type[Operations[Any]], ...] = (Collectives, Grouped, Rooted, Messages)


def functions_over(memory: Adapter) -> dict[str, Callable[..., Any]]:
    """The public functions of the binding to that adapter's arrays, by name: the public methods of all KINDS, bound."""
    functions: dict[str, Callable[..., Any]] = {"poll": poll, "synchronize": synchronize}
    for kind in KINDS:
        operations = kind(memory)
        functions |= {name: getattr(operations, name) for name in dir(kind) if not name.startswith("_")}
    return functions
