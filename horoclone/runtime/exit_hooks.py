"""What happens when a process exits, raises or forks: hooks that tell the peers and the launcher, within deadlines.

After fork() the child forgets the runtime without disturbing the parent. Thread: the interpreter's main one, at exit
and in its excepthook; the only thread of a forked child.
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horoclone import errors, tensor_names
from horoclone.bootstrap import exchange
from horoclone.runtime import current, logs, telemetry
from horoclone.runtime.native_module import bytes_of

if TYPE_CHECKING:
    from horoclone.bootstrap.exchange import Job

EXIT_DEADLINE_S = 5.0  # for what is left when every rank ends
OTHERS_GO_ON_S = 3 * EXIT_DEADLINE_S  # at most, for slower ranks: as kWhileOthersGoOn in engine.cc
EXIT_HOOK_S = 6.0  # above the own deadline of the hook
TELL_DEADLINE_S = 2.0  # how long a dying rank spends on telling its peers, and then its launcher
FAILURE_TEXT_BYTES = 16384

_inherited: list[Any] = []  # a forked child keeps the parent's runtime, so that nothing is torn down here
_hooks_installed = False
_told: BaseException | None = None  # what has ended this process, once the others know


def install_hooks(
    finish: Callable[[], None], shut_down: Callable[[float], None], fails: Callable[[], None]
) -> None:
    """Called once in a process. finish: waits for what frameworks have yet to run; shut_down: ends the runtime; fails:
    says that an exception ends this process."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_at_exit, finish, shut_down)
    os.register_at_fork(after_in_child=_after_fork_in_child)
    previous = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        global _told
        if error is not _told:
            _told = error
            _tell_failure(kind, error, trace)
            _bounded(fails, TELL_DEADLINE_S)

    def tell_and_chain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        try:
            tensor_names.complete(error)
            # Somebody who has caught it may call the hook, too, to have it printed.
            if sys.exc_info()[1] is not error and threading.current_thread() is threading.main_thread():
                tell(kind, error, trace)
        finally:
            previous(kind, error, trace)

    def tell_in_place_of_the_hook() -> None:
        if (error := _uncaught()) is not None:
            tell(type(error), error, error.__traceback__)

    sys.excepthook = tell_and_chain
    atexit.register(tell_in_place_of_the_hook)


def _uncaught() -> BaseException | None:
    """The exception that ends this process, where the script has put another hook in the place of ours. The traceback
    of one that was caught, as by a shell or a test runner, begins above the bottom of the stack."""
    error = getattr(sys, "last_value", None)
    if (trace := getattr(error, "__traceback__", None)) is None:
        return None
    frame = trace.tb_frame
    is_bottom = frame.f_back is None and not frame.f_code.co_flags & inspect.CO_COROUTINE  # IPython has one
    return error if is_bottom else None


def end_when_told() -> None:
    """The first process of a container has no default action for SIGTERM: the kernel would ignore it."""
    is_first = os.getpid() == 1 and threading.current_thread() is threading.main_thread()
    if is_first and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


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
    except RuntimeError:
        # an interpreter that is too far gone for threads; every call in `work` has its own deadline
        quiet()
        return True
    thread.join(limit_s)
    return not thread.is_alive()


def _at_exit(finish: Callable[[], None], shut_down: Callable[[float], None]) -> None:
    if current.forked_from is not None:
        return
    try:
        finish()
    except BaseException as error:  # Ctrl-C; the others wait for what was not finished
        _tell_failure(type(error), error, error.__traceback__)
    _bounded(lambda: shut_down(EXIT_DEADLINE_S), OTHERS_GO_ON_S + EXIT_DEADLINE_S + 0.5)
    job, current.job = current.job, None
    if job is not None:
        _bounded(lambda: job.close(process_ends=True), TELL_DEADLINE_S)
    telemetry.wait_at_exit()
    if current.exit_hook is not None:
        _bounded(current.exit_hook, EXIT_HOOK_S)


def _after_fork_in_child() -> None:
    current.lock = threading.RLock()  # another thread of the parent may have held it
    job, current.job = current.job, None
    if job is not None:
        job.after_fork_in_child()
        _inherited.append(job)
    telemetry.forget()
    logs.forget()
    runtime, current.runtime = current.runtime, None
    if runtime is not None:
        current.forked_from, current.parent = os.getppid(), current.here
        _inherited.append(runtime)
        runtime.after_fork_child()


def _tell_failure(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Tells the peers why this rank is about to end, then the launcher with the whole traceback."""
    if current.forked_from is not None:
        return
    runtime, job = current.runtime, current.job or _job_to_report_to()
    if job is None:
        return
    consequence = issubclass(kind, (errors.PeerLost, errors.Aborted))  # the peers have the root cause already
    if runtime is not None and not consequence:
        text = failure_line(job.rank, kind, error)
        _bounded(lambda: runtime.abort(bytes_of(text)), TELL_DEADLINE_S)
    report = "".join(traceback.format_exception(kind, error, trace))[-FAILURE_TEXT_BYTES:]
    _bounded(lambda: job.report_failure(report, consequence), TELL_DEADLINE_S)


def _job_to_report_to() -> Job | None:
    """For a failure before init came to the job: with our launcher, its rendezvous can be told nevertheless."""
    if not os.environ.get("HOROCLONE_RENDEZVOUS") or os.environ.get("HOROCLONE_MEMBER"):
        return None  # of an elastic job the launcher knows members, and this one has not joined
    try:
        return exchange.open_job(None, os.environ, time.monotonic() + TELL_DEADLINE_S, None, None)
    except (errors.HorovodInternalError, ValueError):
        return None  # init has said what is wrong with the environment


def failure_line(rank: int, kind: type[BaseException], error: BaseException) -> str:
    """`rank 1 raised ValueError: bad batch 17`: one line, at most 500 characters."""
    if issubclass(kind, KeyboardInterrupt):
        return f"rank {rank} was interrupted (Ctrl-C)"
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the class is the user's
        lines = []
    return f"rank {rank} raised {kind.__name__}{': ' + lines[0] if lines else ''}"[:500]
