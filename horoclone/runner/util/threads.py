"""Under Horovod's name: functions in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls fn(*args) for every entry of args_list, in at most max_concurrent_executions threads at once.

    Returns place in args_list -> value when all are done, and raises the first call's exception that failed (Horovod
    prints it and says only that "some threads" did not finish). With block_until_all_done=False it returns None at
    once, and the threads do not keep the process alive.
    """
    if max_concurrent_executions < 1:
        raise ValueError(f"max_concurrent_executions must be at least 1, not {max_concurrent_executions}")
    calls = [tuple(args) for args in args_list]
    if not block_until_all_done:
        slots = threading.Semaphore(max_concurrent_executions)

        def guarded(*args: Any) -> None:
            with slots:
                fn(*args)

        for args in calls:
            in_thread(guarded, args)
        return None
    if not calls:
        return {}
    with ThreadPoolExecutor(min(max_concurrent_executions, len(calls))) as pool:
        return dict(enumerate(pool.map(lambda args: fn(*args), calls)))


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts target(*args) in a thread and returns it. silent: its exceptions are dropped rather than printed.

    ValueError when args is no tuple: `(x)` instead of `(x,)`.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}; for a single argument use (arg,)")

    def quiet(*given: Any) -> None:
        try:
            target(*given)
        except Exception:
            pass

    thread = threading.Thread(target=quiet if silent else target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: Any = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls func(*args) once `event` is set, unless `stop` was set before.

    event, stop: with wait() and is_set(), as of threading or multiprocessing. `stop` is looked at every
    check_stop_interval_s seconds. ValueError for args that are no tuple, and for daemon=False without `stop`, which
    could keep the process alive for ever.
    """
    if event is None:
        raise ValueError("event must not be None")
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}; for a single argument use (arg,)")
    if stop is None and not daemon:
        raise ValueError("a thread that is no daemon needs the event `stop`")

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)
