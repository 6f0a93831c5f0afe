"""Writes this process's stacks or flight record for `horoclone top`, which asks by a signal
(live/stack_dump_client.py).

Thread: the signals come at any time; stacks are written by a handler in C, the record by the main thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from horoclone.live.stack_dump_client import END, RECORD, STACKS
from horoclone.runtime import current

_listens = False
_record: int | None = None


def listen(free_signal: Callable[[], int | None]) -> None:
    """Once in the life of a process. free_signal: gives one that nobody uses, or None: then nobody can ask."""
    global _listens
    if _listens:
        return
    _listens = True
    with contextlib.suppress(OSError):  # no descriptor is left: what cannot do without one says so
        _open_both(free_signal)


def _open_both(free_signal: Callable[[], int | None]) -> None:
    global _record
    number = free_signal()
    if number is None:
        return
    faulthandler.register(number, file=_memory(STACKS, number), all_threads=True, chain=False)
    number = free_signal()
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    _record = _memory(RECORD, number)
    signal.signal(number, _write_record)


def _memory(name: str, number: int) -> int:
    """Kept for the life of the process. Appended to: who asks empties it before."""
    descriptor = os.memfd_create(f"{name}.{number}", os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


def _write_record(number: int, frame: FrameType | None) -> None:
    runtime = current.runtime
    if runtime is None or _record is None:
        return
    try:
        text = runtime.flight_record("asked for by horoclone top").encode()
        view = memoryview(text + END)
        while view:
            view = view[os.write(_record, view) :]
    except Exception:  # what the program does is more important; who asked sees that nothing came
        pass
