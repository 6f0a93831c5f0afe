"""Which job saves to a directory: at most one that lives, since each removes what it takes for its own old saves.

PATH/.owner is locked by the process that is rank 0 for as long as it lives; in it stands who that is. The kernel lets
go when the process ends, however it ends, so a job that is started again goes on at once. Thread: any."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import secrets
import threading
import time
from pathlib import Path

from horoclone.checkpoint.failures import CheckpointError
from horoclone.runtime import current

NAME = ".owner"
_BUSY = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_alone = secrets.token_hex(8)  # with its number, the job of a process that is in none
_mutex = threading.Lock()
# (process, device, inode) -> a descriptor that stays open: closing any of a file gives up the process's lock on it.
_held: dict[tuple[int, int, int], int] = {}


def claim(path: Path) -> bool:
    """Makes this job the owner of a directory; False where its file system has no locks, so that nobody can tell.

    CheckpointError where another job that lives is the owner. OSError for what the file system says.
    """
    with _mutex:
        place = path / NAME
        try:
            if _key(os.stat(place)) in _held:
                return True
        except FileNotFoundError:
            pass
        file = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # A record lock, which children that were forked do not have: they may outlive a rank that was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = os.pread(file, 4096, 0)
            os.close(file)
            if error.errno in _BUSY:
                return _is_of_this_job(path, found)
            if error.errno in _NO_LOCKS:
                return False
            raise
        _held[_key(os.fstat(file))] = file
        record = {"job": _job(), "host": platform.node(), "process": os.getpid(), "since": time.time()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(record).encode(), 0)
        return True


def _key(status: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), status.st_dev, status.st_ino


def _job() -> str:
    """What no other job has, the same on all ranks and in all generations of this one."""
    job = current.job
    if job is None or job.rendezvous.client is None:
        return f"{_alone}-{os.getpid()}"
    return hashlib.sha256(
        b"checkpoint owner\0" + job.rendezvous.name.encode() + b"\0" + job.rendezvous.secret
    ).hexdigest()[:16]


def _is_of_this_job(path: Path, found: bytes) -> bool:
    """Where rank 0 was another process in the generation before, which still lives."""
    try:
        record = json.loads(found)
        if record["job"] == _job():
            return True
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"]))
        who = f"process {record['process']} on {record['host']}, since {since}"
    except (ValueError, KeyError, TypeError):
        who = "which has not said who it is"
    raise CheckpointError(
        f"another job that is still running saves to {path} ({who}), and each would remove the other's saves. Give "
        "each job a directory of its own, or end that one first."
    )
