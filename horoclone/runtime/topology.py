"""What this process knows about its place in the job: ranks, sizes, MPI or not, and the timeline's switch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from horoclone import errors
from horoclone.runtime import current, offspring
from horoclone.runtime.current import native

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.runtime.current import Parent


def _place() -> Runtime | Parent:
    """Where the topology is: in a process that a rank has started they are the rank's."""
    if current.runtime is None and current.parent is None:
        offspring.recognise()  # a loader's worker by 'spawn' need not have called init()
    return current.runtime or current.parent or native()


def rank() -> int:
    """Returns this process's number, from 0 to size() - 1."""
    return _place().rank


def size() -> int:
    """Returns the number of processes of the job."""
    return _place().size


def local_rank() -> int:
    """Returns this process's number on its host, from 0 to local_size() - 1."""
    return _place().local_rank


def local_size() -> int:
    """Returns the number of processes on this host."""
    return _place().local_size


def cross_rank() -> int:
    """Returns this host's number among the hosts that have a process with my local rank."""
    return _place().cross_rank


def cross_size() -> int:
    """Returns the number of hosts that have a process with this local rank."""
    return _place().cross_size


def is_homogeneous() -> bool:
    """Returns whether every host runs the same number of processes."""
    return _place().is_homogeneous


def mpi_enabled() -> bool:
    """Returns whether this job was started by an MPI launcher or from an MPI communicator."""
    if current.job is not None:
        return current.job.uses_mpi
    from horoclone.bootstrap import detect

    try:
        return detect.detect(os.environ).uses_mpi
    except errors.HorovodInternalError:
        return False


def mpi_threads_supported() -> bool:
    """Returns whether MPI may be used from several threads. ValueError when MPI is not in use."""
    native()
    if not mpi_enabled():
        raise ValueError(
            "mpi_threads_supported: MPI is not in use; start the job with mpirun, or pass init(comm=...)."
        )
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return True  # horoclone itself makes no MPI call then
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def gloo_enabled() -> bool:
    """Returns whether the job runs without MPI."""
    return not mpi_enabled()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes a Chrome trace of what the engine does to `file_path` from now on (docs/timeline.md); ends the one before.

    Rank 0 writes; on other ranks nothing happens unless HOROCLONE_TIMELINE_ALL_RANKS=1. ValueError before init, when
    HOROVOD_TIMELINE was not set (DYNAMIC, or a path), or when the file cannot be written.
    """
    native().start_timeline(os.fsencode(file_path), mark_cycles)


def stop_timeline() -> None:
    """Completes and closes the file of the timeline; nothing happens when none is being written. ValueError before
    init, or when HOROVOD_TIMELINE was not set."""
    native().stop_timeline()
