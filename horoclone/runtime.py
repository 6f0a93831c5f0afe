"""The one pointer to the native runtime of this process, and what surrounds its life: init, exit, fork, exceptions.

The core has no globals; the comfort of `hvd.rank()` without an object lives here and nowhere else. Bindings call
`native()` for every operation. Thread: any; `_lock` serialises init and shutdown only.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from horoclone import errors
from horoclone.attached import attach as attach  # the bindings' native libraries
from horoclone.attached import publish
from horoclone.built import (
    ccl_built as ccl_built,
)
from horoclone.built import (
    cuda_built as cuda_built,
)
from horoclone.built import (
    ddl_built as ddl_built,
)
from horoclone.built import (
    gloo_built as gloo_built,
)
from horoclone.built import (
    mpi_built as mpi_built,
)
from horoclone.built import (
    nccl_built as nccl_built,
)
from horoclone.built import (
    rocm_built as rocm_built,
)
from horoclone.built import (
    sycl_built as sycl_built,
)
from horoclone.settings import flag, remarks, settings_of, start_timeout_s

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.bootstrap.exchange import Job
    from horoclone.process_sets import ProcessSet

EXIT_DEADLINE_S = 5.0
TELL_DEADLINE_S = 2.0  # how long a dying rank spends on telling its peers, and then its launcher
FAILURE_TEXT_BYTES = 16384

_native: Runtime | None = None
_job: Job | None = None  # kept between init calls: its server, secret and MPI survive shutdown()
_forked_from: int | None = None  # pid of the parent that had called init
_inherited: list[Any] = []  # a forked child keeps the parent's runtime, so that nothing is torn down here
_dynamic = False
_hooks_installed = False
_lock = threading.RLock()


# --- the pointer ---------------------------------------------------------------------------------------------------


def native() -> Runtime:
    """The native runtime. NotInitialized (naming the call) before init; HorovodInternalError in a forked child."""
    if _native is None:
        raise _absence()
    return _native


def _absence() -> errors.HorovodInternalError:
    if _forked_from is not None:
        return _forked_error()
    return errors.NotInitialized(
        f"Horovod has not been initialized; use hvd.init(). (The call was {_called()}().)"
    )


def _forked_error() -> errors.HorovodInternalError:
    return errors.HorovodInternalError(
        f"{_called()}(): this process (pid {os.getpid()}) was forked from pid {_forked_from} after hvd.init(), and the "
        "runtime does not survive a fork. Calling hvd.init() and then forking is not supported for processes that "
        "communicate: start them with the 'spawn' method, or fork first and call hvd.init() afterwards. Workers that "
        "only load data may be forked; pass them hvd.rank() and hvd.size() as values."
    )


def _called() -> str:
    """The public function through which the user came: the outermost frame of this package above the user's code."""
    frame, name = sys._getframe(1), "native"
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".", 1)[0] != "horoclone":
            break
        if not frame.f_code.co_name.startswith(("_", "<")):
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return f"hvd.{name}"


def is_initialized() -> bool:
    """True between init() and shutdown() in the process that called init()."""
    return _native is not None


# --- init and shutdown ---------------------------------------------------------------------------------------------


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts the runtime and connects this process with all others of the job. Does nothing when it is already up.

    comm: None = every process that the launcher started; a list of their ranks = only those (in that order); an mpi4py
    communicator = its members. process_sets: sets to register at once, or "dynamic" to allow add_process_set.
    Raises ValueError for wrong arguments; Timeout when ranks are missing after HOROCLONE_START_TIMEOUT seconds (300),
    naming them; Unsupported when the way in which this process was started cannot work. Process sets that cannot be
    (two with the same ranks, ranks outside the world: ValueError; others on another rank: Mismatch) are refused when
    everybody is connected: as in Horovod, rank() and size() answer then, and another init() needs shutdown() first.
    """
    global _native, _job, _dynamic
    from horoclone import process_sets as sets

    with _lock:
        if _forked_from is not None:
            raise _forked_error()
        if _native is not None:
            return
        _install_hooks()
        wanted = _checked_process_sets(process_sets, comm)
        deadline = time.monotonic() + start_timeout_s(os.environ)
        from horoclone.bootstrap import exchange

        _job = exchange.open_job(comm, os.environ, deadline, _say, _job)
        runtime = _connect(_job, deadline)
        _native = runtime
        _dynamic = flag(os.environ, "DYNAMIC_PROCESS_SETS")
        _remark()
        try:
            try:
                sets.on_init(runtime, wanted)
            finally:
                publish(runtime.address)  # after the sets: programs of an earlier life look for theirs
        except (ValueError, errors.Mismatch):
            raise  # every rank refuses the sets alike, and the world is up: size() and rank() answer, as in Horovod
        except BaseException:
            shutdown()
            raise


def _connect(job: Job, deadline: float) -> Runtime:
    """Opens a runtime and connects it with everybody's; on failure nothing of it stays open."""
    from horoclone import observe, selection
    from horoclone.bootstrap import mpi_link
    from horoclone.gpu_libraries import with_libraries

    settings, known = with_libraries({**preferred, **settings_of(os.environ)}), {}
    if job.rank == 0:  # its choice holds for all
        known = selection.known_ways(os.environ)
        settings = selection.with_remembered(settings, os.environ, job.size)
    runtime = _core().Runtime(job.listening(settings))
    try:
        observe.watch_stack(runtime, os.environ)
        own = mpi_link.offer(os.environ, job.name, known)
        endpoints, offers = mpi_link.split(job.gather(own.around(runtime.endpoint()), deadline, _say))
        if mpi_link.must_start(offers):
            mpi_link.start(deadline)
            own = mpi_link.offer(os.environ, job.name, known)
            _, offers = mpi_link.split(job.gather(own.around(b""), deadline, _say))
        mpi = mpi_link.agree(offers, job.name, deadline)
        remaining_s = max(0.1, deadline - time.monotonic())
        with job.connecting() as look:
            runtime.connect(job.rank, endpoints, job.secret, job.name, job.generation, remaining_s, mpi, look)
        if job.rank == 0 and job.size > 1:
            key = mpi_link.key_of(offers) if runtime.local_size < job.size else ""
            selection.learn(os.environ, job.size, json.loads(runtime.counters()), key)
    except BaseException:
        try:
            runtime.shutdown(0.0)
        except errors.HorovodInternalError:
            pass  # the first error is the one to report
        raise
    return runtime


_remarked = False


def _remark() -> None:
    """Rank 0 says once in its life which variables change nothing."""
    global _remarked
    if not _remarked and _job is not None and _job.rank == 0:
        _remarked = True
        for line in remarks(os.environ, json.loads(_core().knobs())):
            _say(line)


# Settings that a binding wishes for, by their whole names; what is set in the environment goes before. Read by init().
preferred: dict[str, str] = {}

_core_module: Any = None


def _core() -> Any:
    """The native module, with the exception classes handed over once."""
    global _core_module
    if _core_module is None:
        try:
            from horoclone import _core as core
        except ImportError as error:
            raise ImportError(
                f"horoclone's native module cannot be loaded: {error}. Reinstall horoclone for this Python "
                f"({sys.version_info.major}.{sys.version_info.minor}); in a source tree: pip install -e ."
            ) from error
        core.set_error_classes(_error_factories())
        _core_module = core
    return _core_module


def _error_factories() -> dict[int, Callable[[str, int], BaseException]]:
    """Code of the core (hc_code) -> maker of the exception."""
    return {
        1: lambda text, culprit: errors.NotInitialized(text),
        2: lambda text, culprit: ValueError(text),
        3: lambda text, culprit: errors.Mismatch(text),
        4: lambda text, culprit: errors.PeerLost(text, culprit),
        5: lambda text, culprit: errors.Timeout(text),
        6: lambda text, culprit: errors.Aborted(text),
        7: lambda text, culprit: errors.Unsupported(text),
        8: lambda text, culprit: errors.HorovodInternalError(text),
    }


def _checked_process_sets(process_sets: Sequence[ProcessSet] | str | None, comm: Any) -> list[ProcessSet]:
    from horoclone.process_sets import ProcessSet

    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f"process_sets={process_sets!r}: the only word allowed is 'dynamic'; else pass a list."
            )
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        return []
    wanted = list(process_sets)
    for index, entry in enumerate(wanted):
        if not isinstance(entry, ProcessSet):
            raise ValueError(f"process_sets[{index}] is {entry!r}, not a ProcessSet.")
        if entry.mpi_comm is not None and isinstance(comm, (list, tuple)):
            raise NotImplementedError(
                "process sets made of communicators need init() or init(comm=<communicator>), not a list of ranks"
            )
    return wanted


def shutdown() -> None:
    """Finishes what every rank has announced, says goodbye and closes everything. init() may follow. Never raises for
    what other ranks did; work that could not be finished within 5 s fails with Aborted on its handles."""
    if _forked_from is not None:
        raise _forked_error()
    _shutdown(EXIT_DEADLINE_S)


def _shutdown(timeout_s: float) -> None:
    global _native
    from horoclone import process_sets as sets

    with _lock:
        runtime, _native = _native, None
        if runtime is None:
            return
        sets.clear()
        publish(0)
        try:
            runtime.shutdown(timeout_s)
        except errors.HorovodInternalError as error:
            _say(f"shutdown: {error}")


def dynamic_process_sets() -> bool:
    """Whether add_process_set and remove_process_set are allowed in this life."""
    return _dynamic


def job_secret() -> bytes:
    """What the ranks of this job share and nobody else knows; empty before init()."""
    return _job.secret if _job is not None and _native is not None else b""


def world_ranks_of(comm: Any) -> list[int]:
    """World ranks of the members of an mpi4py communicator."""
    if _job is None:
        raise _absence()
    return _job.world_ranks_of(comm)


def _say(text: str) -> None:
    """One line for humans on stderr; a closed stderr is no reason to fail."""
    who = f"rank {_job.rank}" if _job is not None else f"pid {os.getpid()}"
    try:
        sys.stderr.write(f"horoclone [{who}]: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


# --- exit, fork, exceptions ----------------------------------------------------------------------------------------


def _install_hooks() -> None:
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_after_fork_in_child)
    previous = sys.excepthook

    def tell_and_chain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        try:
            _tell_failure(kind, error, trace)
        finally:
            previous(kind, error, trace)

    sys.excepthook = tell_and_chain


def _bounded(work: Callable[[], None], limit_s: float) -> bool:
    """Runs `work` for at most limit_s seconds: a process that is ending must end. False when it did not finish."""

    def quiet() -> None:
        try:
            work()
        except Exception:  # the process is ending; its own error is the one to show
            pass

    thread = threading.Thread(target=quiet, name="hc-exit", daemon=True)
    try:
        thread.start()
    except (
        RuntimeError
    ):  # an interpreter that is too far gone for threads; every call in `work` has its own deadline
        quiet()
        return True
    thread.join(limit_s)
    return not thread.is_alive()


def _at_exit() -> None:
    global _job
    if _forked_from is not None:
        return
    _bounded(lambda: _shutdown(EXIT_DEADLINE_S), EXIT_DEADLINE_S + 0.5)
    job, _job = _job, None
    if job is not None:
        _bounded(lambda: job.close(process_ends=True), TELL_DEADLINE_S)


def _after_fork_in_child() -> None:
    global _native, _job, _forked_from, _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    job, _job = _job, None
    if job is not None:
        job.after_fork_in_child()
        _inherited.append(job)
    runtime, _native = _native, None
    if runtime is not None:
        _forked_from = os.getppid()
        _inherited.append(runtime)
        runtime.after_fork_child()


def _tell_failure(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tells the peers why this rank is about to end, then the launcher with the whole traceback."""
    if _forked_from is not None:
        return
    runtime, job = _native, _job or _job_to_report_to()
    if job is None:
        return
    consequence = issubclass(kind, (errors.PeerLost, errors.Aborted))  # the peers have the root cause already
    if runtime is not None and not consequence:
        text = failure_line(job.rank, kind, error)
        _bounded(lambda: runtime.abort(text), TELL_DEADLINE_S)
    report = "".join(traceback.format_exception(kind, error, trace))[-FAILURE_TEXT_BYTES:]
    _bounded(lambda: job.report_failure(report, consequence), TELL_DEADLINE_S)


def _job_to_report_to() -> Job | None:
    """For a failure before init came to the job: with our launcher, its rendezvous can be told nevertheless."""
    if not os.environ.get("HOROCLONE_RENDEZVOUS"):
        return None
    from horoclone.bootstrap import exchange

    try:
        return exchange.open_job(None, os.environ, time.monotonic() + TELL_DEADLINE_S, None, None)
    except (errors.HorovodInternalError, ValueError):
        return None  # init has said what is wrong with the environment


def failure_line(rank: int, kind: type[BaseException], error: BaseException) -> str:
    """`rank 1 raised ValueError: bad batch 17`: one line, at most 500 characters."""
    if issubclass(kind, KeyboardInterrupt):
        return f"rank {rank} was interrupted (Ctrl-C)"
    lines = str(error).strip().splitlines()
    return f"rank {rank} raised {kind.__name__}{': ' + lines[0] if lines else ''}"[:500]


# --- facts ---------------------------------------------------------------------------------------------------------


def rank() -> int:
    """This process's number, 0..size-1."""
    return native().rank


def size() -> int:
    """Number of processes."""
    return native().size


def local_rank() -> int:
    """This process's number on its host."""
    return native().local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return native().local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process with my local rank."""
    return native().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process with my local rank."""
    return native().cross_size


def is_homogeneous() -> bool:
    """Whether every host runs the same number of processes."""
    return native().is_homogeneous


def mpi_enabled() -> bool:
    """Whether this job was started by an MPI launcher or from an MPI communicator."""
    if _job is not None:
        return _job.uses_mpi
    from horoclone.bootstrap import detect

    try:
        return detect.detect(os.environ).uses_mpi
    except errors.HorovodInternalError:
        return False


def mpi_threads_supported() -> bool:
    """Whether MPI may be used from several threads. ValueError when MPI is not in use."""
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
    """Whether the job runs without MPI."""
    return not mpi_enabled()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Writes a Chrome trace of what the engine does to `file_path` from now on (docs/timeline.md); ends the one before.

    Rank 0 writes; on other ranks nothing happens unless HOROCLONE_TIMELINE_ALL_RANKS=1. ValueError before init, when
    HOROVOD_TIMELINE was not set (DYNAMIC, or a path), or when the file cannot be written.
    """
    native().start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Completes and closes the file of the timeline; nothing happens when none is being written. ValueError before
    init, or when HOROVOD_TIMELINE was not set."""
    native().stop_timeline()
