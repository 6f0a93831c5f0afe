"""Asks a rank of this host, from outside, for its stacks or its flight record; runtime/stack_dump_handler.py answers.

A signal asks, and the rank writes into anonymous memory, whose name has the number of the signal. The kernel decides
who may do so, as for a debugger: the same user. Stacks come while the program hangs, too.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

STACKS, RECORD = "horoclone-stacks", "horoclone-record"  # memory: NAME.SIGNAL
END = b"\n\0"  # after a whole record
STACKS_S, QUIET_S = 1.0, 0.05  # limit for the first byte; silence after which that was all
RECORD_S = 2.0  # its main thread has to come to Python code
_LOOK_S = 0.01
_LINK = re.compile(r"/memfd:([\w-]+)\.(\d+) \(deleted\)")


class NoAnswer(Exception):
    """The rank did not answer, or cannot be asked; the text says why."""


def stacks(pid: int, host: str) -> str:
    """The stacks of all threads of that process, newest call first, as faulthandler writes them. NoAnswer."""
    memory, number = _place(pid, host, STACKS)
    try:
        os.ftruncate(memory, 0)
        _ask(pid, number)
        content = _read_until_quiet(memory)
    finally:
        os.close(memory)
    if not content:
        raise NoAnswer("it does not answer: it is stopped, or all of its threads block signals")
    return content.decode(errors="replace").rstrip()


def flight_records(ranks: Mapping[int, tuple[int, str]], folder: str) -> tuple[list[str], list[str]]:
    """Has the ranks (rank -> pid, host) write their last operations into `folder`; (files, what failed)."""
    written, failed = [], []
    for rank, (pid, host) in ranks.items():
        try:
            content = _record(pid, host)
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder, f"horoclone-rank{rank}.json")
            path.write_bytes(content)
            written.append(str(path))
        except NoAnswer as error:
            failed.append(f"rank {rank}: {error}")
        except OSError as error:
            failed.append(f"{error.filename}: {error.strerror}")
            break
    return written, failed


def _record(pid: int, host: str) -> bytes:
    memory, number = _place(pid, host, RECORD)
    try:
        os.ftruncate(memory, 0)
        _ask(pid, number)
        deadline = time.monotonic() + RECORD_S
        while not (content := _whole(memory)).endswith(END):
            if time.monotonic() > deadline:
                raise NoAnswer("its main thread does not come to Python code; its stacks say where it is")
            time.sleep(_LOOK_S)
    finally:
        os.close(memory)
    return content[: -len(END)]


def _place(pid: int, host: str, name: str) -> tuple[int, int]:
    """(a descriptor of ours for the memory, the signal)."""
    if not _is_here(host):
        raise NoAnswer(f"it runs on {host}: horoclone top has to run there")
    folder = f"/proc/{pid}/fd"
    try:
        for entry in os.listdir(folder):
            found = _LINK.fullmatch(_target(f"{folder}/{entry}"))
            if found and found[1] == name and _handles(pid, int(found[2])):
                return os.open(f"{folder}/{entry}", os.O_RDWR | os.O_CLOEXEC), int(found[2])
    except PermissionError:
        raise NoAnswer(f"process {pid} may not be looked at by this user") from None
    except OSError:
        raise NoAnswer(f"process {pid} is gone") from None
    raise NoAnswer(
        "it does not listen: HOROCLONE_STALL_STACKS=0, or init() was called in another thread than the main one"
    )


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return ""


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal: without one it would end."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _is_here(host: str) -> bool:
    if host in ("", "localhost", socket.gethostname()):
        return True
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of ours can be bound
        return True
    except OSError:
        return False


def _ask(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise NoAnswer(f"process {pid}: {error.strerror}") from None


def _whole(memory: int) -> bytes:
    size = os.fstat(memory).st_size
    return os.pread(memory, size, 0)


def _read_until_quiet(memory: int) -> bytes:
    began = quiet_since = time.monotonic()
    size = 0
    while True:
        now = time.monotonic()
        if (grown := os.fstat(memory).st_size) != size:
            size, quiet_since = grown, now
        if now - (quiet_since if size else began) > (QUIET_S if size else STACKS_S):
            return _whole(memory)
        time.sleep(_LOOK_S)
