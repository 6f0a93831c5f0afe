"""Handles of NumPy operations in flight: what they will return, and the arrays that must live until they are done.

Thread: any, under Python's lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horoclone.process_sets import ProcessSet, global_process_set, id_of

if TYPE_CHECKING:
    from horoclone._core import Runtime


class Pending:
    """An operation in flight: which runtime has it, what must stay alive, and how its outcome is made."""

    __slots__ = ("finish", "handle", "keep", "native")

    def __init__(
        self, native: Runtime, handle: int, keep: Any, finish: Callable[[Runtime, int], Any]
    ) -> None:
        self.native = native
        self.handle = handle  # 0: nothing was submitted (an empty group)
        self.keep = keep
        self.finish = finish


_pending: dict[int, Pending] = {}
_numbers = itertools.count(1)


def set_id(process_set: ProcessSet) -> int:
    return 0 if process_set is global_process_set else id_of(process_set)


def remember(pending: Pending) -> int:
    number = next(_numbers)
    _pending[number] = pending
    return number


def now(pending: Pending) -> Any:
    """Waits for the operation and gives its outcome."""
    if pending.handle == 0:
        return pending.finish(pending.native, 0)
    pending.native.wait(pending.handle)
    try:
        return pending.finish(pending.native, pending.handle)
    finally:
        pending.native.release(pending.handle)


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once."""
    pending = _pending.get(handle)
    return pending is None or pending.handle == 0 or pending.native.poll(pending.handle)


def synchronize(handle: int) -> Any:
    """Waits for an `_async` operation and returns what the blocking function would have. None for an unknown handle."""
    pending = _pending.pop(handle, None)
    return None if pending is None else now(pending)
