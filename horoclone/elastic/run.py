"""The loop of elastic.run: training is called anew in every generation, from the state that all ranks share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from horoclone import errors, failpoints, runtime
from horoclone.elastic import member, replicas
from horoclone.elastic.generation import ALONE, generation
from horoclone.elastic.notice import notification_manager
from horoclone.elastic.recovery import watch
from horoclone.elastic.state import root_of_sync
from horoclone.runtime import joining_rank, lifecycle

_P = ParamSpec("_P")
_T = TypeVar("_T")

SAME_FAILURES = 3  # in a row and without a commit between them: it would fail for ever


class _Progress:
    """Counts failures that repeat. A commit between two of them means that there is progress."""

    def __init__(self) -> None:
        self._last: tuple[type[BaseException], str, Any] | None = None
        self._count = 0

    def failed(self, error: errors.HorovodInternalError, commits: Any) -> None:
        """Raises the error when it has come SAME_FAILURES times without a commit, or is worth no retry.

        That a rank is lost is never the same twice: there is one less, and the launcher knows how many may be lost.
        """
        if isinstance(error, (errors.Mismatch, errors.Unsupported)):
            raise error
        text = re.sub(r"\d+(\.\d+)?|0x[0-9a-f]+", "#", str(error))
        this = (type(error), text, commits)
        self._count = self._count + 1 if this == self._last else 1
        self._last = this
        if self._count >= SAME_FAILURES and not isinstance(error, errors.PeerLost):
            raise errors.HorovodInternalError(
                f"elastic.run: the same failure came {self._count} times without a commit between, so the job ends: "
                f"{type(error).__name__}: {error}"
            ) from error


def run_fn(func: Callable[_P, _T], reset: Callable[[], Any]) -> Callable[_P, _T]:
    """Turns func(state, *args, **kwargs) into a function that carries on when ranks are lost or added.

    After HorovodInternalError the state is restored, reset() begins another generation, and func is called again with
    a synchronised state. After HostsUpdatedInterrupt likewise, with the state as it is. Mismatch, Unsupported, every
    other exception, and the same failure for the third time without a commit, leave it. It returns func's value.
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        joining_rank.allow_collectives()
        notification_manager.init()
        notification_manager.register_listener(state)
        progress, skip_sync = _Progress(), False
        watch.starts()
        try:
            while True:
                try:
                    _synchronise(state, skip_sync)
                    value = func(state, *args, **kwargs)
                    state._come_to_an_end()
                    replicas.finish(state)
                    if getattr(state, "_disk", None) is not None:
                        state._disk.wait()
                    return value
                except (errors.HorovodInternalError, errors.HostsUpdatedInterrupt) as reason:
                    # In here: an error that another generation begins with does not hide why it had to begin.
                    skip_sync = _begin_again(state, reset, progress, reason)
        finally:
            notification_manager.remove_listener(state)

    return wrapper  # type: ignore[return-value]  # func's first argument is the state


def _synchronise(state: Any, skip: bool) -> None:
    """Gives every rank the same state, and says in the record where this rank's came from."""
    watch.synchronises()
    source = "memory" if getattr(state, "_commit_number", 0) else "start"
    if skip:
        state._go_on()
    else:
        failpoints.reach("elastic.sync.begin")
        if getattr(state, "_disk", None) is not None and state._disk.begin(state, root_of_sync()):
            source = "disk"
        state._look_for_shards()
        replicas.synchronise(state)
        failpoints.reach("elastic.sync.done")
    now = generation() if member.is_elastic() or runtime.is_initialized() else ALONE
    if source == "start" and now.commit:
        source = "peers"
    watch.synchronised(now, source)


Reason = errors.HorovodInternalError | errors.HostsUpdatedInterrupt


def _begin_again(state: Any, reset: Callable[[], Any], progress: _Progress, reason: Reason) -> bool:
    """Makes the state fit for another generation and begins one, as often as it takes; whether sync can be skipped."""
    watch.failed(isinstance(reason, errors.HorovodInternalError))
    first = reason
    while True:
        if isinstance(reason, errors.HorovodInternalError):
            progress.failed(reason, getattr(state, "_commits_made", None))
        try:
            _prepare(state, reason)
            watch.restored()
            reset()
            failpoints.reach("elastic.run.reset")
            watch.connected()
            _agree_on_commit(state)
            state.on_reset()
        except (errors.HorovodInternalError, errors.HostsUpdatedInterrupt) as error:
            if not (member.is_elastic() or runtime.is_initialized()):
                if isinstance(first, (errors.NotInitialized, errors.HostsUpdatedInterrupt)):
                    raise  # nothing had failed before: init() was left to elastic.run, or others were to come
                raise first from error  # a job of a fixed size cannot go on with fewer ranks
            reason = error
            continue
        if member.is_elastic():
            return generation().skip_sync
        return isinstance(reason, errors.HostsUpdatedInterrupt) and reason.skip_sync


def _prepare(state: Any, reason: Reason) -> None:
    if isinstance(reason, errors.HorovodInternalError):
        failpoints.reach("elastic.run.failed")
        state._settle()
        state.restore()
        failpoints.reach("elastic.run.restored")
        return
    if member.is_elastic() and not getattr(reason, "committed", False):
        state._keep()  # a rank that fails now goes back to its commit, and must not meet others that are further
    leaving = member.leave_requested()
    if not member.is_elastic() and state._somebody_leaves:
        state._save_last()  # all ranks end here
        leaving = leaving or "another rank was asked to leave"
    if leaving is not None and not state._nobody_stays:
        member.leave(leaving)
        lifecycle.shutdown()
        raise SystemExit(member.code_of_leaving())


def _agree_on_commit(state: Any) -> None:
    """Where a rank was lost between the commits of two others, those who are further go one commit back."""
    if not member.is_elastic():
        return
    common = generation().commit
    if 0 < common < getattr(state, "_commit_number", 0):
        state._step_back(common)


def reset_world() -> None:
    """Begins another generation: shutdown(), init()."""
    lifecycle.shutdown()
    failpoints.reach("elastic.run.between")
    lifecycle.init()


def run(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates func(state, ...) so that it carries on when ranks are lost or added. See run_fn."""
    return run_fn(func, reset_world)
