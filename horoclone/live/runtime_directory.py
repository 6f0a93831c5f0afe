"""The runtime directory, for the metrics of ranks that no launcher of ours has started: in memory, mode 0700.

$XDG_RUNTIME_DIR/horoclone/JOB/NAMESPACE-PID.metrics, a block of 8 KiB (rank_metrics.py); XDG_RUNTIME_DIR is
/run/user/UID where it is not set. A block is dead when its process is: it has the pid, when that process was started,
and in which namespace. A rank removes its own at exit; those of killed ranks are removed, once no rank of their job
lives, by the next rank of any job that comes, or by whoever looks at jobs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping

from horoclone.live import rank_metrics
from horoclone.live.processes import lives, own_identity

_TRIES = 5  # somebody else may remove the directory, empty still, before our block is in it
_SUFFIX = ".metrics"
_ON_MEMORY = ("tmpfs", "ramfs")


def place(environ: Mapping[str, str]) -> str | None:
    """The runtime directory of this user; None: nobody says where, or it belongs to somebody else."""
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    try:
        found = os.stat(runtime)
    except (OSError, ValueError):
        return None
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return os.path.join(runtime, "horoclone") if ours and os.path.isabs(runtime) else None


def job_id(name: str) -> str:
    """The name of a job's directory."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:10]


def create(environ: Mapping[str, str], job: str, initial: bytes) -> tuple[int, str] | None:
    """A metrics block of this process in the directory of `job`: (its descriptor, which the caller owns, and its path).

    initial: its first bytes, see rank_metrics.initial. None where it cannot be: no directory, no memory left, a disk in
    the place of memory. Never raises OSError.
    """
    base = place(environ)
    if base is None:
        return None
    try:
        _make_private(base)
        remove_dead(environ)
        if not _is_on_memory(base):
            return None  # writes would wait for the disk
        return _create(os.path.join(base, job), initial)
    except OSError:
        return None


def _create(directory: str, initial: bytes) -> tuple[int, str] | None:
    process = own_identity()
    path = os.path.join(directory, f"{process.namespace}-{process.pid}{_SUFFIX}")
    for _ in range(_TRIES):
        try:
            _make_private(directory)
            # It has no name before it has all its bytes: nobody sees half a block, and nothing is left of it.
            descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            # a full file system says so here, not by SIGBUS later
            os.posix_fallocate(descriptor, 0, rank_metrics.BLOCK_BYTES)
            os.pwrite(descriptor, initial, 0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a dead process with our number
            _give_name(descriptor, path)
            return descriptor, path
        except FileNotFoundError:
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    return None


def _give_name(descriptor: int, path: str) -> None:
    """To a file without one. With a directory's descriptor Python calls linkat(2), which follows the link in /proc."""
    open_files = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(descriptor), path, src_dir_fd=open_files, follow_symlinks=True)
    finally:
        os.close(open_files)


def _make_private(directory: str) -> None:
    """PermissionError when it is there and is not ours alone."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{directory} is not a directory of this user")
    if found.st_mode & 0o777 != 0o700:  # a umask, or somebody's chmod
        os.chmod(directory, 0o700)


def _is_on_memory(directory: str) -> bool:
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0] in _ON_MEMORY
    return False


def remove(path: str) -> None:
    """Removes one block, and the directory of its job when it was the last one."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def contents(paths: Iterable[str]) -> Iterator[bytes]:
    """Of those blocks that are still there."""
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            yield rank_metrics.copy_from_file(file.fileno(), 0)


def blocks_beside(path: str) -> Iterator[bytes]:
    """The blocks of the job that has this one."""
    folder = os.path.dirname(path)
    return contents(os.path.join(folder, name) for name in _names(folder) if name.endswith(_SUFFIX))


def block_paths(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(job, path) of every block there is, dead ones too."""
    base = place(environ)
    if base is None:
        return
    for job in _names(base):
        for name in _names(os.path.join(base, job)):
            if name.endswith(_SUFFIX):
                yield job, os.path.join(base, job, name)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def remove_dead(environ: Mapping[str, str]) -> None:
    """The directories of jobs of which no process lives. While one does, the block of a dead rank tells that it is
    lost."""
    base = place(environ)
    for job in _names(base) if base is not None else ():
        directory = os.path.join(str(base), job)
        paths = [os.path.join(directory, name) for name in _names(directory) if name.endswith(_SUFFIX)]
        if not any(_lives(path) for path in paths):
            for path in paths:
                remove(path)
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _lives(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return lives(rank_metrics.identity_of(file.read(rank_metrics.BYTES)))
    except OSError:
        return False  # somebody else has removed it
