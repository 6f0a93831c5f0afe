"""The core's lines and say()'s in Python's logging, under `horoclone`, where the program has set that logger up.

The core hands its lines over without the interpreter's lock; a thread of ours takes them from there, so that no thread
of the core ever waits for a handler. Thread: those of init() and of the exit; _take() is ours.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections.abc import Mapping
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
_END_S = 2.0  # for handlers to take what is left
_core: Any = None
_thread: threading.Thread | None = None


def is_set_up() -> bool:
    """Whether the program has given the logger a handler, or a level and a handler that it can reach."""
    logger = logging.getLogger(LOGGER)
    return bool(logger.handlers) or (logger.level != logging.NOTSET and logger.hasHandlers())


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The core's level follows the logger's where the environment does not name one."""
    if not is_set_up() or environ.get("HOROVOD_LOG_LEVEL") or environ.get("HOROCLONE_LOG_LEVEL"):
        return {}
    level = logging.getLogger(LOGGER).getEffectiveLevel()
    names = [name for name, number in _LEVELS.items() if name != "trace" and number >= level]
    return {"HOROVOD_LOG_LEVEL": names[0] if names else "fatal"}


def begin(core: Any) -> None:
    """From now on, in this process. core: the native module."""
    global _core, _thread
    if _thread is None and is_set_up():
        _core = core
        core.take_log(True)
        _thread = threading.Thread(target=_take, name="hc-log", daemon=True)
        _thread.start()


def end() -> None:
    """The process ends: lines go to stderr again; those that wait for a handler have two seconds."""
    global _thread
    if _thread is not None:
        _core.take_log(False)
        _thread.join(_END_S)
        _thread = None


def forget() -> None:
    """In a forked child, which has no such thread; its core knows."""
    global _thread
    _thread = None


atexit.register(end)  # before exit_hooks.py is told of its own, so after that


def told(text: str, rank: int) -> bool:
    """Whether a line of say()'s goes to the log. By the same way: a handler that waits must not hold up who says it."""
    if _thread is None:
        return False
    _core.log_warning(rank, text.encode("utf-8", "backslashreplace"))
    return True


def _take() -> None:
    while lines := json.loads(_core.log_lines()):
        for level, rank, unix_ns, text in lines:
            _log(level, rank, unix_ns, text)


def _log(level: str, rank: int, unix_ns: int, text: str) -> None:
    logger, number = logging.getLogger(LOGGER), _LEVELS[level]
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
