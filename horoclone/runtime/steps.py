"""What counts steps alike on all ranks, told where these counts would part: ranks are new, or were absent.

Thread: any.
"""

from __future__ import annotations

import weakref
from typing import Any

counted: weakref.WeakSet[Any] = weakref.WeakSet()  # restart() of each is called
_joins = 0  # that have ended in this process
held = range(0)  # steps in which weights may differ: they are broadcast after them


def restart() -> None:
    """On all ranks: in a new life, after a join, where an elastic job takes its state from one rank."""
    global held
    held = range(0)
    for one in list(counted):
        one.restart()


def joins() -> int:
    """How often every rank has joined: after it, ranks are back that knew nothing of what the others agreed on."""
    return _joins


def joined() -> None:
    """On all ranks, at the end of a join."""
    global _joins
    _joins += 1
    restart()
