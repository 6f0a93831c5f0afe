"""What /proc says about a process: whether it is the one that is meant, and whether it is stopped."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple


class ProcessIdentity(NamedTuple):
    """What tells a process from every other one. started: in ticks since the host was booted, 0: unknown. namespace:
    in which the pid means something, 0: unknown."""

    pid: int
    started: int
    namespace: int


def own_identity() -> ProcessIdentity:
    """Of this process."""
    return ProcessIdentity(os.getpid(), _fields(os.getpid())[1], own_namespace())


@functools.cache  # a process keeps its own
def own_namespace() -> int:
    """The number of the namespace of processes in which we live; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_of(pid: int) -> int:
    """When it was started, as in ProcessIdentity; 0: there is no such process."""
    return _fields(pid)[1]


def lives(process: ProcessIdentity) -> bool:
    """Whether it is still there and no zombie. True where nobody here can tell: in another namespace."""
    if not process.pid or (process.namespace and process.namespace != own_namespace()):
        return True
    state, started = _fields(process.pid)
    return state not in ("", "Z", "X") and (not process.started or started == process.started)


def is_stopped(process: ProcessIdentity) -> bool:
    """Whether a signal, or a debugger, has stopped it."""
    if not process.pid or (process.namespace and process.namespace != own_namespace()):
        return False
    return _fields(process.pid)[0] in ("T", "t")


def _fields(pid: int) -> tuple[str, int]:
    """(state, start) of its line in /proc; ("", 0): there is none."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # cheaper than a file object
        try:
            line = os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
        words = line.rpartition(b") ")[2].split()  # the name before may have anything in it
        return words[0].decode(), int(words[19])
    except (OSError, IndexError, ValueError):
        return "", 0
