"""Traces the system calls of saves that forked children make, and kills each child before another call (ptrace).

python traced.py DIRECTORY: prints as JSON the calls of one save, and what load() finds after each kill.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fakes import Ranks

from horoclone.checkpoint import files, load
from horoclone.checkpoint.saving import Save

# Those of x86-64 that change a file system, by number; opening counts where it may create.
CALLS = {
    1: "write", 2: "open", 18: "pwrite64", 20: "writev", 40: "sendfile", 74: "fsync", 75: "fdatasync", 76: "truncate",
    77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink", 88: "symlink",
    90: "chmod", 91: "fchmod", 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat",
    266: "symlinkat", 268: "fchmodat", 275: "splice", 277: "sync_file_range", 285: "fallocate", 296: "pwritev",
    316: "renameat2", 326: "copy_file_range", 328: "pwritev2",
}  # fmt: skip
OF_A_DESCRIPTOR = {"write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "fchmod", "fallocate"}
TRACEME, SETOPTIONS, SYSCALL, GET_SYSCALL_INFO = 0, 0x4200, 24, 0x420E
OPTIONS = 1 | 1 << 3 | 1 << 20  # TRACESYSGOOD, TRACECLONE, EXITKILL
WALL = 0x40000000
ENTRY = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


class Info(ctypes.Structure):
    """struct ptrace_syscall_info, at the entry of a call."""

    _fields_ = [
        ("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32), ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64), ("number", ctypes.c_uint64), ("args", ctypes.c_uint64 * 6),
    ]  # fmt: skip


def ptrace(request: int, tid: int, address: int = 0, data: Any = 0) -> None:
    if libc.ptrace(request, tid, address, data) < 0 and ctypes.get_errno() != 3:  # ESRCH: it is dead already
        raise OSError(ctypes.get_errno(), f"ptrace({request}): {os.strerror(ctypes.get_errno())}")


def entered(tid: int) -> tuple[str, str] | None:
    """The call and the path of its descriptor where this thread enters one that changes the disk."""
    info = Info()
    ptrace(GET_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.addressof(info))
    name = CALLS.get(info.number) if info.op == ENTRY else None
    if name is None:
        return None
    if name in ("open", "openat"):
        flags = info.args[1 if name == "open" else 2]
        return (name, "") if flags & (os.O_CREAT | os.O_TRUNC) else None
    if name not in OF_A_DESCRIPTOR:
        return name, ""
    try:
        return name, os.readlink(f"/proc/{tid}/fd/{info.args[0]}")
    except OSError:
        return name, ""


def traced(body: Callable[[], None], kill_at: int = 0) -> tuple[int, list[tuple[str, str]]]:
    """body() in a child that is killed when any thread of it enters the call of that number; its status and calls."""
    child = os.fork()
    if child == 0:
        try:
            ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            body()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    ptrace(SETOPTIONS, child, 0, OPTIONS)
    ptrace(SYSCALL, child)
    calls: list[tuple[str, str]] = []
    while True:
        tid, status = os.waitpid(-1, WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if tid == child:
                return status, calls
            continue
        stop, deliver = os.WSTOPSIG(status), 0
        if stop == signal.SIGTRAP | 0x80:
            call = entered(tid)
            if call is not None and not call[1].startswith(
                ("/proc", "pipe", "socket", "anon", "/dev", "/memfd")
            ):
                calls.append(call)
                if len(calls) == kill_at:
                    os.kill(child, signal.SIGKILL)
        elif stop not in (signal.SIGTRAP, signal.SIGSTOP):
            deliver = stop
        ptrace(SYSCALL, tid, 0, deliver)


def save(path: Path, value: float) -> None:
    """A save of two ranks, as threads, each of which writes its file in several pieces."""
    ranks = Ranks(2)
    state = {"w": np.full(40_000, value), "v": np.full((200, 300), value, np.float32), "epoch": int(value)}
    every = [Save(path, state, 1, 20.0, ranks.of(rank)) for rank in range(2)]
    for one in every:
        one.start()
    for one in every:
        one.wait()
        if one.error is not None:
            raise one.error


def forked(body: Callable[[], None]) -> None:
    """body() in a process that has ended when this returns: a directory belongs to one that lives."""
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def found(path: Path) -> int:
    state = load(path)
    epoch: int = state["epoch"]
    assert (state["w"] == epoch).all() and (state["v"] == epoch).all()
    return epoch


def main() -> None:
    files._PIECE = 32 * files.PAGE
    place = Path(sys.argv[1])
    forked(lambda: save(place / "clean", 1))
    status, calls = traced(lambda: save(place / "clean", 2))
    assert status == 0, status
    after = []
    for number in range(1, len(calls) + 1):
        path = place / str(number)
        forked(lambda path=path: save(path, 1))
        status, _ = traced(lambda path=path: save(path, 2), number)
        killed = os.WIFSIGNALED(status)
        after.append((killed, found(path)))
        forked(lambda path=path: save(path, 3))  # and saving goes on
        assert found(path) == 3
    print(json.dumps({"calls": calls, "after": after}))


if __name__ == "__main__":
    signal.alarm(120)
    main()
