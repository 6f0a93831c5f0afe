"""Handles of operations in flight: what they will return, what must stay alive, and the fast path of an allreduce.

Where several threads synchronize one handle, one of them waits in the core, and all get its result. A result is given
away once, as in Horovod: a second call in the same thread returns None. In another thread it raises an error, because
None would be mistaken for a result. Thread: any, with the GIL.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from horoclone.arguments import is_integer, wrong_type
from horoclone.errors import HorovodInternalError
from horoclone.process_sets import global_process_set

if TYPE_CHECKING:
    from horoclone._core import Runtime


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


# --- the table ---

ROWS: Any = object()  # an output: what the core owns, rows whose number the ranks agree on
NOT_SUBMITTED = 1 << 62  # and above: of what needed no operation. The core's own handles are smaller.

Maker = Callable[["Runtime", int], Any]  # of an output, from the core's result


class Handles:
    """The table of one binding, and its fast path into the core (csrc/python/fast_path.cc), which has the same table.

    The fast path takes an allreduce of plain tensors in one crossing. start_plain and start_plain_group return a
    handle, or None for what is not plain or not right. call_plain waits, too: it returns the output, or None, or the
    handle of an operation that has failed. finish_plain returns the output, or NotImplemented where wait_for() has to
    wait, raise or make something. They change with the runtime, so callers read them here each time.

    kinds: the exact types of what is plain. exchange: DLPack's table of functions for them; None: the buffer protocol.
    begins: called when a life of the runtime begins here, with the runtime; what is then left of the one before stays
    its own.
    """

    def __init__(
        self,
        kinds: tuple[type, ...],
        exchange: Any = None,
        begins: Callable[[Runtime], None] = lambda runtime: None,
    ) -> None:
        self.kinds, self._exchange, self._begins = kinds, exchange, begins
        # handle -> (output, what must live, its maker or None), or just the output, where nothing else is to be kept
        self.pending: dict[int, Any] = {}
        self._runtime: Any = (
            None  # whose handles these are. No two lives in one process give the same number.
        )
        self._earlier: dict[int, Runtime] = {}  # of handles that are older
        # Memory of calls that a signal broke off: the core may still write to it
        self._unfinished: list[Any] = []
        self._waits = Waits()
        self._numbers = itertools.count(NOT_SUBMITTED)
        self.start_plain: Callable[..., int | None] = declines
        self.call_plain: Callable[..., Any] = declines
        self.start_plain_group: Callable[..., int | None] = declines
        self.finish_plain: Callable[[Any], Any] = lambda handle: NotImplemented
        self._given_elsewhere: Callable[[int], bool] = lambda handle: False  # by finish_plain

    def open_fast_path(self, runtime: Runtime) -> None:
        """Opens it for what comes, behind a call that has taken the slow one."""
        if runtime is self._runtime:
            return
        self._begins(runtime)
        for handle in self.pending:
            self._earlier.setdefault(handle, self._runtime)
        self._unfinished.clear()
        self._runtime = runtime
        from horoclone._core import FastPath

        fast_path = FastPath(runtime, self.kinds, self._exchange, global_process_set, self.pending)
        self.start_plain, self.start_plain_group = fast_path.start, fast_path.start_group
        self.call_plain, self.finish_plain = fast_path.call, fast_path.finish
        self._given_elsewhere = fast_path.given_elsewhere

    def remember(
        self, runtime: Runtime, handle: int, output: Any, kept: Any, make: Maker | None = None
    ) -> int:
        """Writes down what was submitted. kept: what must live until it is done. Returns the handle."""
        self.open_fast_path(runtime)
        self.pending[handle] = (output, kept, make)
        return handle

    def copied_back(self, handle: int, targets: Sequence[Any], copy: Callable[[Any, Any], Any]) -> int:
        """The outputs of this handle, which lie in memory of their own, are copied to `targets`, which the caller gets.
        copy: (to, from)."""
        outputs, kept, make = self.pending[handle]

        def copied(runtime: Runtime, handle: int) -> Any:
            made = outputs if make is None else make(runtime, handle)
            for target, output in zip(targets, made, strict=True):
                copy(target, output)
            return targets

        self.pending[handle] = (targets, (kept, targets), copied)
        return handle

    def settled(self, output: Any) -> int:
        """A handle of what needed no operation, as a group without tensors."""
        handle = next(self._numbers)
        self.pending[handle] = (output, None, None)
        return handle

    def keep_if_broken_off(self, error: BaseException, tensors: Any) -> None:
        """Keeps the memory of a blocking call that ended by a signal's exception."""
        if not isinstance(error, (HorovodInternalError, ValueError)):
            self._unfinished.append(tensors)

    def poll(self, handle: Any) -> bool | None:
        """Whether wait_for() would return at once; None for a handle whose result has been given, or that is none."""
        self._waits.refuse_no_handle("poll", handle)
        if handle not in self.pending and not self._waits.under_way(handle):
            return None
        return handle >= NOT_SUBMITTED or self._earlier.get(handle, self._runtime).poll(handle)

    def wait_for(self, handle: Any) -> Any:
        """For a handle that finish_plain leaves: waits and returns its output, or raises its error."""
        if type(handle) is not int:
            self._waits.refuse_no_handle("synchronize", handle)
        return self._waits.once(handle, self._wait)

    def _wait(self, handle: int) -> Any:
        entry = self.pending.pop(handle, None)
        if entry is None:
            if self._waits.given_elsewhere(handle) or self._given_elsewhere(handle):
                raise given_away(handle)
            return None
        output, _, make = entry if type(entry) is tuple else (entry, entry, None)
        if handle >= NOT_SUBMITTED:
            self._waits.gave(handle)
            return output
        runtime = self._earlier.get(handle, self._runtime)
        try:
            runtime.wait(handle)
        except (HorovodInternalError, ValueError):
            self._earlier.pop(handle, None)
            raise
        except BaseException:
            self.pending[handle] = entry  # a signal's: the core has not let go of the tensors
            raise
        self._earlier.pop(handle, None)
        self._waits.gave(handle)
        try:
            return output if make is None else make(runtime, handle)
        finally:
            runtime.release(handle)


def declines(*_: Any) -> None:
    """Stands for the fast path while none is open."""
