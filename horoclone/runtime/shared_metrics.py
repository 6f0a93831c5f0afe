"""Puts this rank's measurements where others can read them: into the job's metrics segment or the runtime directory.

Where neither can be, they stay in this process, and nothing is said: the job is not disturbed. Thread: that of init().
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from horoclone import errors
from horoclone.live import job_segment, rank_metrics, runtime_directory
from horoclone.live.job import read_blocks
from horoclone.live.processes import own_identity
from horoclone.runtime.native_module import bytes_of

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.bootstrap.exchange import Job


class _Memory(NamedTuple):
    """Where the metrics block of this process lies, for all its lives. path: of its own file, "" in a segment."""

    descriptor: int
    offset: int
    path: str
    pid: int


_memory: _Memory | None = None
_PROGRAM_CHARACTERS = 64


def share(runtime: Runtime, job: Job, environ: Mapping[str, str]) -> None:
    """From now on the metrics of this runtime, which is not connected yet, can be read by others. Never raises."""
    global _memory
    if _memory is None or _memory.pid != os.getpid():
        _memory = _in_job_segment(environ) or _in_runtime_directory(job, environ)
    if _memory is not None:
        try:
            runtime.share_rank_metrics(_memory.descriptor, _memory.offset, bytes_of(program()))
        except (errors.HorovodInternalError, ValueError):
            _memory = None


def note_elastic(began_ns: int, lost_ms: Sequence[int]) -> None:
    """Shows how the time of an elastic job has gone by; see rank_metrics.elastic_at(). Never raises."""
    if _memory is not None and _memory.pid == os.getpid():
        at, content = rank_metrics.elastic_at(_memory.offset, began_ns, lost_ms)
        with contextlib.suppress(OSError):
            os.pwrite(_memory.descriptor, content, at)


def note_phases(content: bytes) -> None:
    """Shows where the time of this rank goes: what phases.packed() has made. Never raises."""
    if _memory is not None and _memory.pid == os.getpid():
        with contextlib.suppress(OSError):
            os.pwrite(_memory.descriptor, content, _memory.offset + rank_metrics.BYTES)


def of_all() -> list[rank_metrics.RankMetrics]:
    """The metrics of the job's ranks as far as they can be seen from here: with horoclonerun all that the launcher's
    host has for those on that host, and otherwise those of this host."""
    if _memory is None or _memory.pid != os.getpid():
        return []
    if not _memory.path:
        return read_blocks(job_segment.Reader(f"/proc/self/fd/{_memory.descriptor}").blocks())
    return read_blocks(runtime_directory.blocks_beside(_memory.path))


def stalled_seconds(runtime: Runtime) -> float:
    """What the job has lost to stalls so far, those before this life included, as note_elastic() was told of them."""
    goodput = rank_metrics.read(runtime.rank_metrics()).goodput
    return goodput.stalled_seconds if goodput else 0.0


def program() -> str:
    """What runs in this process, as the metrics call it: the script's name and arguments."""
    words = [os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]] if sys.argv else ["python"]
    return " ".join(words)[:_PROGRAM_CHARACTERS]


def _in_job_segment(environ: Mapping[str, str]) -> _Memory | None:
    """The launcher's, whose descriptor this process has inherited; another process of the rank may not have it."""
    descriptor, _, offset = environ.get("HOROCLONE_RANK_METRICS", "").partition(":")
    try:
        number, at = int(descriptor), int(offset)
        if os.readlink(f"/proc/self/fd/{number}") != f"/memfd:{job_segment.NAME} (deleted)":
            return None
        os.set_inheritable(number, False)  # nothing that this process starts has a use for it
        return _Memory(number, at, "", os.getpid())
    except (OSError, ValueError):
        return None


def _in_runtime_directory(job: Job, environ: Mapping[str, str]) -> _Memory | None:
    origin = rank_metrics.Origin(job.rank, job.size, 0, socket.gethostname(), program(), own_identity())
    created = runtime_directory.create(
        environ, runtime_directory.job_id(job.name), rank_metrics.initial(origin)
    )
    if created is None:
        return None
    descriptor, path = created
    memory = _Memory(descriptor, 0, path, os.getpid())
    atexit.register(_remove, memory)
    return memory


def _remove(memory: _Memory) -> None:
    if memory.pid == os.getpid():  # not a forked child
        runtime_directory.remove(memory.path)
