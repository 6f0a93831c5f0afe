"""Lets stall reports show the stack of the thread that called init(), by a signal and a pipe."""

from __future__ import annotations

import faulthandler
import os
import signal
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from horoclone.runtime import stack_dump_handler

if TYPE_CHECKING:
    from horoclone._core import Runtime


def _libraries() -> list[str]:
    """Folders whose code is not the user's: this package, Python's own, what is installed."""
    paths = sysconfig.get_paths()
    named = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths]
    return [folder + os.sep for folder in (str(Path(__file__).resolve().parents[1]), *named)]


_LIBRARIES = _libraries()  # when imported: init() may find too few descriptors left to read files
_pipe: tuple[int, int] | None = None  # kept for the life of the process: a signal may come at any moment
_signal: int | None = None


def watch_stack(native: Runtime, environ: Mapping[str, str]) -> None:
    """Lets stall reports show what the thread that calls init() is doing. Called before the runtime connects.

    A real-time signal that nobody uses makes faulthandler write that thread's stack into a pipe: a handler in C that
    needs neither the GIL nor any lock, so that it also works in a sleep or an extension that never returns. Does
    nothing with HOROCLONE_STALL_STACKS=0, or when no signal is free. The same for who asks from outside
    (stack_dump_handler.py).
    """
    switched_off = environ.get("HOROCLONE_STALL_STACKS", "1").strip().lower() in ("0", "false", "no", "off")
    if switched_off or not _prepare():
        native.watch_stack(0, -1, threading.get_native_id(), "")
        return
    assert _pipe is not None and _signal is not None
    native.watch_stack(_signal, _pipe[0], threading.get_native_id(), "\n".join(_LIBRARIES))
    stack_dump_handler.listen(_free_signal)


def _prepare() -> bool:
    global _pipe, _signal
    if _signal is not None:
        return True
    free = _free_signal()
    if free is None or not hasattr(faulthandler, "register"):
        return False
    try:
        _pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # a full pipe must not hold up the program
    except OSError:  # no descriptor is left: what cannot do without one says so
        return False
    faulthandler.register(free, file=_pipe[1], all_threads=False, chain=False)
    _signal = free
    return True


def _free_signal() -> int | None:
    """A real-time signal that has neither a handler nor a meaning for anybody here, from the top."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    taken = _taken_signals()
    for number in range(int(signal.SIGRTMAX) - 3, int(signal.SIGRTMIN) + 2, -1):
        if number not in blocked and not taken >> (number - 1) & 1:
            return number
    return None


def _taken_signals() -> int:
    """Bit n-1: signal n is handled or ignored, as the kernel sees it, so that handlers of C code count as well."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return -1  # nobody knows: take none
    words = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return int(words.get("SigCgt", "0"), 16) | int(words.get("SigIgn", "0"), 16)
