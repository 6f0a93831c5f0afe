"""The base of the bindings' tables of handles: what happens when several threads synchronize one handle.

One of the threads waits in the core, and all get its result. A result is given away once, as in Horovod: a second call
in the same thread returns None. In another thread it raises an error, because None would be mistaken for a result. At
the end are the functions that take the place of the fast path (csrc/python/fast_path.cc) while it is closed. Thread:
any, with the GIL.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from horoclone.arguments import is_integer, wrong_type


class _Here(threading.local):
    """Numbers the threads. The system's own numbers are given again once a thread has ended."""

    def __init__(self) -> None:
        self.number = next(_numbers)


_numbers = itertools.count()
_here = _Here()


class _Wait:
    """One thread's wait for an operation, which others may join."""

    __slots__ = ("done", "error", "joined", "outcome")

    def __init__(self) -> None:
        self.done = False
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.joined: list[threading.Event] = []


class Waits:
    """The waits of one table of handles."""

    def __init__(self) -> None:
        self._under_way: dict[int, _Wait] = {}
        self._given: deque[tuple[int, int]] = deque(maxlen=1024)  # handle, and the thread that has its result

    def refuse_no_handle(self, call: str, handle: Any) -> None:
        """TypeError for what cannot be a handle. None may be asked for, and an old number, as in Horovod."""
        if handle is not None and not is_integer(handle):
            raise wrong_type(
                call, "handle", handle, "what a function whose name ends in _async or _async_ returns"
            )

    def under_way(self, handle: int) -> bool:
        """Whether a thread is in `once` for it."""
        return handle in self._under_way

    def once(self, handle: int, wait: Callable[[int], Any]) -> Any:
        """What `wait(handle)` returns or raises, which only one of the threads calls that are here for this handle.

        Where that thread is interrupted by a signal, the next one calls it.
        """
        mine = _Wait()
        while True:
            first = self._under_way.setdefault(handle, mine)  # one step with the GIL
            if first is mine:
                return self._first(handle, mine, wait)
            event = threading.Event()
            first.joined.append(event)
            if not first.done:
                event.wait()
            if first.error is None:
                return first.outcome
            if isinstance(first.error, Exception):
                raise first.error

    def _first(self, handle: int, mine: _Wait, wait: Callable[[int], Any]) -> Any:
        try:
            mine.outcome = wait(handle)
            return mine.outcome
        except BaseException as error:
            mine.error = error
            raise
        finally:
            mine.done = True
            del self._under_way[handle]
            for event in mine.joined:
                event.set()

    def gave(self, handle: int) -> None:
        """Writes down that this thread has been given its result."""
        self._given.append((handle, _here.number))

    def given_elsewhere(self, handle: int) -> bool:
        """Whether another thread was the last one to be given its result here (as far back as is remembered)."""
        for other, thread in reversed(self._given):
            if other == handle:
                return thread != _here.number
        return False


def given_away(handle: int) -> RuntimeError:
    """What a thread gets that comes too late."""
    return RuntimeError(
        f"handle {handle} was synchronized by another thread, which has been given its result: a result is given once. "
        "Let one thread synchronize it and pass the result on, or let all of them be waiting before it is done."
    )


# --- while no fast path is open ---


def slow_path(*_: Any) -> None:
    """Stands for start_plain and start_plain_group while no fast path is open."""
    return None


def not_yet(handle: Any) -> Any:
    """Stands for finish_plain while no fast path is open."""
    return NotImplemented


def nobody(handle: int) -> bool:
    """Stands for given_elsewhere while no fast path is open."""
    return False
