"""`horoclone leave`: asks workers of elastic jobs on this host to leave at their next commit, and waits for their end.

For what ends a machine or a container: Kubernetes' preStop, an operator, a script of the scheduler. It sends SIGTERM to
those processes of this user that have HOROCLONE_MEMBER in their environment, or HOROCLONE_SERVICE and
HOROCLONE_ELASTIC, and have called init().
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from horoclone.launch.usage import say

PROGRAM = "horoclone leave"
WAIT_S = 35.0  # HOROCLONE_NOTICE and a little
_LOOK_EVERY_S = 0.05
_MEMBER, _SERVICE = b"HOROCLONE_MEMBER=", b"HOROCLONE_SERVICE="
_ELASTIC = (b"HOROCLONE_ELASTIC=1", b"HOROVOD_ELASTIC=1")


class Worker(NamedTuple):
    """member: the name that its launcher gave it. started: distinguishes it from a later process of this number."""

    pid: int
    parent: int
    member: bytes
    started: bytes
    catches: bool  # it has a handler for SIGTERM


def find(proc: Path = Path("/proc")) -> list[Worker]:
    """One process for each member that runs here under our user id, the outermost that catches SIGTERM, or just the
    outermost."""
    seen: dict[int, Worker] = {}
    for folder in proc.iterdir():
        worker = _read(folder) if folder.name.isdigit() and folder.name != str(os.getpid()) else None
        if worker is not None:
            seen[worker.pid] = worker
    chosen: dict[bytes, Worker] = {}
    for worker in sorted(seen.values(), key=lambda one: (not one.catches, _depth(one, seen), one.pid)):
        chosen.setdefault(worker.member, worker)
    return sorted(chosen.values())


def _depth(worker: Worker, seen: dict[int, Worker]) -> int:
    """How many processes of the same member are around it."""
    depth = 0
    while worker.parent in seen and seen[worker.parent].member == worker.member and depth < len(seen):
        worker, depth = seen[worker.parent], depth + 1
    return depth


def _read(folder: Path) -> Worker | None:
    try:
        if folder.stat().st_uid != os.geteuid():
            return None
        environ = (folder / "environ").read_bytes().split(b"\0")
        fields = (folder / "stat").read_bytes().rpartition(b") ")[2].split()
        status = (folder / "status").read_bytes()
    except OSError:
        return None  # it has ended, or is not ours
    name = _name(environ)
    if not name or fields[0] in (b"Z", b"X"):
        return None
    caught = next(
        (int(line.split()[1], 16) for line in status.splitlines() if line.startswith(b"SigCgt:")), 0
    )
    catches = bool(caught >> (signal.SIGTERM - 1) & 1)
    return Worker(int(folder.name), int(fields[1]), name, fields[19], catches)


def _name(environ: list[bytes]) -> bytes:
    """The launcher's name of a worker; without a launcher there is one worker of a service in a container."""
    for prefix in (_MEMBER, _SERVICE):
        found = [one[len(prefix) :] for one in environ if one.startswith(prefix)]
        if found and (prefix == _MEMBER or any(one in environ for one in _ELASTIC)):
            return found[0]
    return b""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pid", type=int, help="only this worker (default: every one of this user on this host)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        metavar="S",
        help=f"until they have ended (default {WAIT_S:g} s)",
    )


def leave(arguments: argparse.Namespace) -> int:
    """Exit codes: 0 all that were asked have left, 1 one is still there or had not called init(), 2 wrong arguments."""
    workers = [one for one in find() if arguments.pid in (None, one.pid)]
    if not workers and arguments.pid is not None:
        say(f"process {arguments.pid} is no worker of an elastic job of this user", PROGRAM)
        return 2
    if not workers:
        say("no worker of an elastic job of this user is on this host", PROGRAM)
    asked = [one for one in workers if one.catches]
    for worker in workers:
        if worker not in asked:
            say(f"process {worker.pid} has not called init() and cannot be asked", PROGRAM)
    for worker in asked:
        _signal(worker)
    late = _wait(asked, time.monotonic() + arguments.wait)
    for worker in late:
        if arguments.wait > 0:
            say(f"process {worker.pid} has not left within {arguments.wait:g} s", PROGRAM)
    return 1 if len(asked) < len(workers) or (late and arguments.wait > 0) else 0


def _signal(worker: Worker) -> None:
    if _is_there(worker):
        try:
            os.kill(worker.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass


def _is_there(worker: Worker) -> bool:
    now = _read(Path(f"/proc/{worker.pid}"))
    return now is not None and now.started == worker.started


def _wait(workers: list[Worker], deadline: float) -> list[Worker]:
    """Those that are still there at the deadline."""
    left = workers
    while left := [one for one in left if _is_there(one)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    return left
