"""A process that a rank has started, with the rank's environment: a data loader's worker, a pool's process, a script.

It is no rank. multiprocessing's spawn and forkserver import the script again in it, and with it an hvd.init() at the
top level; to take part there would mean to be the same rank twice. So init() leaves such a process without a runtime:
it may ask which rank it belongs to, and every operation says what to do. Thread: the one that is in init().
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from horoclone import errors
from horoclone.bootstrap import detect
from horoclone.runtime import current
from horoclone.runtime.current import Parent

if TYPE_CHECKING:
    from horoclone._core import Runtime

_MARK = "_HOROCLONE_RANK_PROCESS"
_OURS = ("HOROCLONE_RENDEZVOUS", "HOROCLONE_SERVICE", "HOROCLONE_MEMBER")
_MAX_ANCESTORS = 64


def mark(runtime: Runtime) -> None:
    """Lets processes that this rank starts know whose they are."""
    launch = _launch()
    place = (
        runtime.rank, runtime.size, runtime.local_rank, runtime.local_size, runtime.cross_rank, runtime.cross_size,
    )  # fmt: skip
    current.here = Parent(os.getpid(), launch, *place, runtime.is_homogeneous)
    if launch:
        os.environ[_MARK] = json.dumps(asdict(current.here))


def recognise() -> bool:
    """Whether this process was started by a rank, as a part of it; current.parent is that rank then."""
    text = os.environ.get(_MARK, "")
    if not text:
        return False
    try:
        parent = Parent(**json.loads(text))
    except (ValueError, TypeError):  # of another build
        return False
    if parent.pid == os.getpid() or parent.launch != _launch() or not _descends_from(parent.pid):
        return False
    current.parent = parent
    return True


def _launch() -> str:
    """Of the variables that make this process a rank; empty where it is a job of its own."""
    try:
        placement = detect.detect(os.environ)
    except errors.HorovodInternalError:
        return ""
    ours = [os.environ.get(name, "") for name in _OURS]
    if placement.launcher == "single" and not any(ours):
        return ""
    return hashlib.sha256(repr((placement, ours)).encode()).hexdigest()[:16]


def _descends_from(pid: int) -> bool:
    starter = multiprocessing.parent_process()
    if starter is not None and starter.pid == pid:
        return True
    at = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        if at == pid:
            return True
        try:
            with open(f"/proc/{at}/stat", "rb") as file:
                at = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False
