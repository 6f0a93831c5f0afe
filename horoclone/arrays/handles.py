"""Handles of operations in flight: what they will return, and which arrays must stay alive until they are done.

Thread: any, with the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horoclone.handles import Waits, given_away, nobody, not_yet, slow_path
from horoclone.process_sets import global_process_set

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


# number -> an operation in flight; of one that took the fast path its handle -> its output, or (output, what must live,
# None). Handles of the core are below 2^62, and no two lives of the runtime in one process give the same.
_pending: dict[int, Any] = {}
_numbers = itertools.count(1 << 62)
_owner: Runtime | None = None  # the runtime of those that took the fast path


# The fast path of an allreduce, in one crossing (_core.FastPath): start_plain and start_plain_group return a handle,
# or None for what is not plain or not right; finish_plain returns the output, or NotImplemented where `synchronize` has
# to wait, raise or make something. call_plain waits, too: it returns the output, or None, or the handle of an
# operation that has failed, of which `synchronize` raises the error. Callers read them from this module: they change
# with the runtime.
start_plain: Callable[..., int | None] = slow_path
call_plain: Callable[..., Any] = slow_path
start_plain_group: Callable[..., int | None] = slow_path
finish_plain: Callable[[Any], Any] = not_yet
given_elsewhere: Callable[[int], bool] = nobody  # whether finish_plain gave it to another thread

_waits = Waits()


def _begin_life(native: Runtime) -> None:
    """Opens the fast path into another runtime. What is left of the one before stays its own."""
    global _owner, start_plain, call_plain, start_plain_group, finish_plain, given_elsewhere
    import numpy as np

    from horoclone._core import FastPath

    for handle, kept in list(_pending.items()):
        _pending[handle] = _as_pending(handle, kept)
    fast_path = FastPath(native, (np.ndarray,), None, global_process_set, _pending)
    start_plain, start_plain_group, finish_plain = fast_path.start, fast_path.start_group, fast_path.finish
    call_plain, given_elsewhere = fast_path.call, fast_path.given_elsewhere
    _owner = native


def open_fast_path(native: Runtime) -> None:
    """Opens the fast path for what comes, behind a call that has taken the slow one."""
    if native is not _owner:
        _begin_life(native)


def _as_pending(handle: int, kept: Any) -> Pending:
    if isinstance(kept, Pending):
        return kept
    assert _owner is not None
    output = kept[0] if type(kept) is tuple else kept
    return Pending(_owner, handle, kept, lambda native, handle: output)


def remember(pending: Pending) -> int:
    if pending.native is not _owner:
        _begin_life(pending.native)
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
    """Returns whether synchronize(handle) would return at once."""
    _waits.refuse_no_handle("poll", handle)
    kept = _pending.get(handle)
    if kept is None:
        return not _waits.under_way(handle)
    pending = _as_pending(handle, kept)
    return pending.handle == 0 or pending.native.poll(pending.handle)


def synchronize(handle: int) -> Any:
    """Waits for an `_async` operation and returns what the blocking function would have. None for an unknown handle.

    Threads that wait for one handle each get the result; RuntimeError for one that comes after another has got it.
    """
    output = finish_plain(handle)
    if output is not NotImplemented:
        return output
    if type(handle) is not int:
        _waits.refuse_no_handle("synchronize", handle)
    return _waits.once(handle, _wait)


def _wait(handle: int) -> Any:
    kept = _pending.pop(handle, None)
    if kept is None:
        if _waits.given_elsewhere(handle) or given_elsewhere(handle):
            raise given_away(handle)
        return None
    outcome = now(_as_pending(handle, kept))
    _waits.gave(handle)
    return outcome
