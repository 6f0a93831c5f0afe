"""The core's lines and say()'s in Python's logging, under `horoclone`, where the program has set that logger up.

The core hands its lines over without the interpreter's lock; a thread of ours takes them from there, so that no thread
of the core ever waits for a handler. Thread: those of init() and of the exit; _take() is ours.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

LOGGER = "horoclone"
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
_END_S = 2.0  # for handlers to take what is left, and then to end
_core: Any = None
_thread: threading.Thread | None = None
_left: deque[tuple[str, int, int, str]] = deque()  # (level, rank, Unix ns, text) that _take() has yet to log


def _no_rank() -> int:
    return -1


rank: Callable[[], int] = _no_rank  # of this process; current.py, which imports this module, knows it


def is_set_up() -> bool:
    """Whether the program has given the logger a handler, or a level and a handler that it can reach."""
    logger = logging.getLogger(LOGGER)
    has_been = bool(logger.handlers) or (logger.level != logging.NOTSET and logger.hasHandlers())
    return has_been and not logger.disabled


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The core's level follows the logger's where the environment does not name one."""
    if not is_set_up() or environ.get("HOROVOD_LOG_LEVEL") or environ.get("HOROCLONE_LOG_LEVEL"):
        return {}
    level = logging.getLogger(LOGGER).getEffectiveLevel()
    names = [name for name, number in _LEVELS.items() if name != "trace" and number >= level]
    return {"HOROVOD_LOG_LEVEL": names[0] if names else "fatal"}


def logger(name: str = LOGGER) -> logging.Logger:
    """For our own code in Python, so that its records have a rank as the core's have; -1 where there is none."""
    found = logging.getLogger(name)
    found.addFilter(_as_the_cores)
    return found


def _as_the_cores(record: logging.LogRecord) -> bool:
    if not hasattr(record, "rank"):
        record.rank = rank()
    if not logging.getLogger(record.name).hasHandlers():  # it goes to stderr as it is
        record.msg = f"horoclone: {record.msg}"
    return True


def begin(core: Any) -> None:
    """From now on, in this process. core: the native module."""
    global _core, _thread
    if _thread is None and is_set_up():
        _core = core
        core.take_log(True)
        _thread = threading.Thread(target=_take, name="hc-log", daemon=True)
        _thread.start()


def end() -> None:
    """The process ends: lines go to stderr again; those that wait for a handler have two seconds until they do."""
    global _thread
    if _thread is None:
        return
    _core.take_log(False)
    _thread.join(_END_S)
    if _thread.is_alive():
        # logging's own end would wait for the handler without a limit.
        atexit.unregister(logging.shutdown)
        ends = threading.Thread(target=logging.shutdown, name="hc-log-end", daemon=True)
        ends.start()
        ends.join(_END_S)
        for line in [*_left, *json.loads(_core.log_lines())]:
            _show(*line)
        _left.clear()
    _thread = None


def forget() -> None:
    """In a forked child, which has no such thread; its core knows. Its parent logs what is left."""
    global _thread
    _thread = None
    _left.clear()


atexit.register(end)  # before exit_hooks.py is told of its own, so after that


def told(text: str) -> bool:
    """Whether a line of say()'s goes to the log. By the same way: a handler that waits must not hold up who says it."""
    if _thread is None:
        return False
    _core.log_warning(rank(), text.encode("utf-8", "backslashreplace"))
    return True


def _take() -> None:
    while lines := json.loads(_core.log_lines()):
        _left.extend(lines)
        while _left:
            _log(*_left[0])
            if _left:  # not where it has come too late, and end() has shown them all
                _left.popleft()


def _show(level: str, rank: int, unix_ns: int, text: str) -> None:
    who = f"[rank {rank}] " if rank >= 0 else ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"[horoclone] {who}{level}: {text}\n")
        sys.stderr.flush()


def _log(level: str, rank: int, unix_ns: int, text: str) -> None:
    logger, number = logging.getLogger(LOGGER), _LEVELS[level]
    if logger.disabled or not logger.hasHandlers():  # as logging.config leaves it, unless told otherwise
        return _show(level, rank, unix_ns, text)
    if not logger.isEnabledFor(number):
        return
    try:
        record = logger.makeRecord(LOGGER, number, LOGGER, 0, text, (), None, "")
        # Not as `extra`, which refuses what the program's record factory has set already.
        record.rank, record.core_level = rank, level
        record.created, record.msecs = unix_ns / 1e9, float(unix_ns % 1_000_000_000 // 1_000_000)
        logger.handle(record)
    except Exception:  # a factory or filter that raises; handlers have handleError() for theirs
        pass
