"""The one pointer to the native runtime of this process, and the job that it belongs to.

The core has no globals; only this module makes `hvd.rank()` work without an object. Bindings call `native()` for every
operation. lifecycle.py and exit_hooks.py write these variables, with `lock` held. Thread: any.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horoclone import errors
from horoclone.runtime import logs

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.bootstrap.exchange import Job
    from horoclone.membership.records import Loss


@dataclass(frozen=True)
class Parent:
    """The rank that has started this process as a part of it, and what it knew of its place."""

    pid: int
    launch: str  # of the variables with which the rank was started: another launcher's are another job
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


runtime: Runtime | None = None
job: Job | None = None  # kept between init calls: its server, secret and MPI survive shutdown()
forked_from: int | None = None  # pid of the parent that had called init
here: Parent | None = None  # this rank, as processes that it forks need it
parent: Parent | None = None  # the rank that has started this process, which is none
named_ranks: list[int] = []  # that init(comm=[...]) of this life has named; empty: it has named none
has_remarked = False  # rank 0: on variables that change nothing
dynamic = False  # whether add_process_set and remove_process_set are allowed in this life
lock = threading.RLock()
formed_s = 0.0  # until the members of this life's generation were known, in an elastic job
connected_s = 0.0  # until they were connected
exit_hook: Callable[[], None] | None = None  # what others need of this process yet when it ends
has_left = False  # whether this process has left its elastic job, as planned
lost: dict[int, Loss] = {}  # ranks whose loss an error of this life has told; only an elastic job asks


def native() -> Runtime:
    """The native runtime. NotInitialized (naming the call) before init; HorovodInternalError in a forked child."""
    if runtime is None:
        raise absence()
    return runtime


def is_initialized() -> bool:
    """Returns True between init() and shutdown() in the process that called init()."""
    return runtime is not None


def absence() -> errors.HorovodInternalError:
    """Why there is no runtime."""
    if forked_from is not None:
        return forked_error()
    if parent is not None:
        return errors.HorovodInternalError(
            f"{_called()}(): this process (pid {os.getpid()}) was started by rank {parent.rank} (pid {parent.pid}) and "
            "is not a rank of the job. Where multiprocessing starts it by 'spawn' or 'forkserver', it imports the "
            "script again: put what only ranks do, hvd.init() and the training, under "
            '`if __name__ == "__main__":`. hvd.rank() and hvd.size() give rank '
            f"{parent.rank}'s values here."
        )
    return errors.NotInitialized(
        f"Horovod has not been initialized; use hvd.init(). (The call was {_called()}().)"
    )


def forked_error() -> errors.HorovodInternalError:
    """What every call of a forked child gets whose parent had a runtime."""
    return errors.HorovodInternalError(
        f"{_called()}(): this process (pid {os.getpid()}) was forked from pid {forked_from} after hvd.init(), and the "
        "runtime does not survive a fork. Calling hvd.init() and then forking is not supported for processes that "
        "communicate: start them with the 'spawn' method, or fork first and call hvd.init() afterwards. Workers that "
        "only load data may be forked: hvd.rank() and hvd.size() are the parent's there."
    )


def _called() -> str:
    """The public function through which the user came: the outermost frame of this package above the user's code, also
    where a framework has called it back."""
    frame, name = sys._getframe(1), "native"
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".", 1)[0]
        if package not in ("horoclone", "jax", "keras", "tensorflow", "torch"):
            break
        if package == "horoclone" and not frame.f_code.co_name.startswith(("_", "<")):
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return f"hvd.{name}"


def job_secret() -> bytes:
    """The secret of this job, which only its ranks know; empty before init()."""
    return job.secret if job is not None and runtime is not None else b""


def lasting_secret() -> bytes:
    """The same in all generations of an elastic job, each of which has one of its own; empty before init()."""
    return job.rendezvous.secret if job is not None and runtime is not None else b""


def world_ranks_of(comm: Any) -> list[int]:
    """World ranks of the members of an mpi4py communicator."""
    if job is None:
        raise absence()
    return job.world_ranks_of(comm)


def say(text: str) -> None:
    """One line for humans: on stderr, or in Python's logging as a warning; a closed stderr is no reason to fail."""
    if logs.told(text):
        return
    who = f"rank {job.rank}" if job is not None else f"pid {os.getpid()}"
    try:
        sys.stderr.write(f"horoclone [{who}]: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


def _rank() -> int:
    return job.rank if job is not None else -1


logs.rank = _rank
