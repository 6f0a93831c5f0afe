"""Failpoints: named points of the code where a test can inject a failure. reach(NAME) does nothing unless it is armed.

HOROCLONE_FAILPOINTS is read once, when this module is imported, and refused by check() and by the first reach():
entries NAME=ACTION, separated by semicolons. ACTION is one of

    kill         SIGKILL to this process
    stop         SIGSTOP to this process
    exit:CODE    the process ends at once with this code, without any cleaning up
    raise:CLASS  an exception of horoclone.errors or a builtin one, as HorovodInternalError or OSError
    delay:S      S seconds pass

and may be followed by @N (only the N-th time that the point is reached in a process), or @N+ (from the N-th time on),
and by #R (only in the process that was started as rank R). The failure happens on the thread that reaches the point.
"""

from __future__ import annotations

import builtins
import difflib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from horoclone import errors

VARIABLE = "HOROCLONE_FAILPOINTS"

POINTS: dict[str, str] = {
    "elastic.run.failed": "`run` has caught an error, and the state is not restored yet",
    "elastic.run.restored": "the state is back at the last commit; the old generation is still connected",
    "elastic.run.reset": "the next generation is connected, and the reset callbacks have not run",
    "elastic.run.between": "the old generation is shut down, and `init()` has not begun",
    "elastic.commit.begin": "`commit()` begins",
    "elastic.commit.saved": "the new copy is saved, and the membership coordinator does not know of it yet",
    "elastic.commit.agree": "the copy counts on this rank; the ranks have not agreed yet",
    "elastic.commit.done": "the ranks have agreed, and `commit()` returns",
    "elastic.sync.begin": "attributes are about to be broadcast",
    "elastic.sync.received": "attributes are received, and not saved",
    "elastic.sync.done": "the synchronised state is saved as a commit",
    "elastic.replica.wait": "the others train on, and this new rank is about to wait for the commit that it is sent",
    "elastic.replica.taken": "this new rank has its state; it was in no collective with the others yet",
    "init.wait": "`init()` is about to wait for a generation",
    "init.told": "the record of the generation is there; nothing is connected",
    "init.gathered": "the addresses of all ranks are there; nothing is connected",
    "init.connected": "the ranks are connected; process sets are not registered",
    "membership.form": "a process asks the membership coordinator for the next generation; each try counts",
    "membership.notice": "the thread hc-membership asks for news; each try counts",
    "membership.suspect": "a process tells the membership coordinator which rank it has lost",
    "membership.leave": "a process tells the membership coordinator that it leaves now",
    "discovery.look": "the launcher looks for hosts",
    "launcher.start": "the launcher starts a worker",
    "launcher.ended": "the launcher has seen the end of a worker, and the membership coordinator does not know of it",
    "checkpoint.begun": "the directory of a save is there; nothing is written",
    "checkpoint.written": "this rank's file of a save is on disk, and the others do not know",
    "checkpoint.publish": "rank 0 has seen all files; there is no manifest yet",
    "checkpoint.complete": "the save has its name on rank 0, and the others do not know",
}

_ENTRY = re.compile(r"([\w.]+)=(\w+)(?::([^@#;]*))?(?:@([1-9]\d*)(\+?))?(?:#(\d+))?")
_USAGE = "an entry is NAME=ACTION[:ARGUMENT][@N[+]][#RANK], and N is at least 1"


class _Armed(NamedTuple):
    act: Callable[[], None]
    first: int  # the first and the last time that it acts, from 1
    last: float


_mutex = threading.Lock()  # guards both
_armed: dict[str, list[_Armed]] = {}
_reached: dict[str, int] = {}  # how often, since something was armed
_refused = ""  # what is wrong with the variable


def _nothing(name: str) -> None:
    pass


def _reach(name: str) -> None:
    with _mutex:
        count = _reached[name] = _reached.get(name, 0) + 1
        acts = [one.act for one in _armed.get(name, ()) if one.first <= count <= one.last]
    for act in acts:
        act()


def _refuse(name: str) -> None:
    raise ValueError(_refused)


reach: Callable[[str], None] = _nothing


def check() -> None:
    """ValueError, with one line, when HOROCLONE_FAILPOINTS makes no sense. What has failpoints calls it when it begins:
    an import that fails would show the user where the modules are, and not what is wrong.
    """
    if _refused:
        raise ValueError(_refused)


def on(name: str, act: Callable[[], None], first: int = 1, last: float = float("inf")) -> None:
    """act() is called when the point is reached for the first-th to the last-th time from now on."""
    global reach
    if name not in POINTS:
        raise ValueError(_no_such(name))
    with _mutex:
        _armed.setdefault(name, []).append(_Armed(act, first, last))
    reach = _reach


def arm(text: str, rank: str = "") -> None:
    """What HOROCLONE_FAILPOINTS says. rank: as which this process was started. ValueError for what makes no sense."""
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{VARIABLE}: {entry!r} is not understood; {_USAGE}.")
        name, action, argument, count, onwards, only = match.groups()
        act = _action(entry, action, argument)
        if name not in POINTS:
            raise ValueError(f"{VARIABLE}: {_no_such(name)}")
        if only is None or only == rank:
            last = int(count) if count and not onwards else float("inf")
            on(name, act, int(count or 1), last)


def disarm() -> None:
    """Disarms all failpoints, resets their counts, and forgets what the environment said."""
    global reach, _refused
    reach = _nothing
    _refused = ""
    with _mutex:
        _armed.clear()
        _reached.clear()


def _no_such(name: str) -> str:
    near = difflib.get_close_matches(name, POINTS, 1)
    return f"there is no failpoint {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"there are {', '.join(POINTS)}."
    )


def _action(entry: str, action: str, argument: str | None) -> Callable[[], None]:
    try:
        if action in ("kill", "stop") and argument is None:
            number = signal.SIGKILL if action == "kill" else signal.SIGSTOP
            return lambda: os.kill(os.getpid(), number)
        if action == "exit" and argument is not None and 0 <= (code := int(argument)) < 256:
            return lambda: os._exit(code)
        if action == "delay" and argument is not None and 0 <= (delay_s := float(argument)) < 1e6:
            return lambda: time.sleep(delay_s)
        if action == "raise" and argument is not None:
            return _raising(argument, entry)
    except ValueError:
        pass
    raise ValueError(
        f"{VARIABLE}: {entry!r} has no such action: kill, stop, exit:CODE, raise:CLASS, delay:SECONDS."
    )


def _raising(name: str, entry: str) -> Callable[[], None]:
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise ValueError

    def act() -> None:
        raise kind(f"failpoint {entry}")

    return act


def _read(environ: Mapping[str, str]) -> None:
    global reach, _refused
    try:
        arm(environ.get(VARIABLE, ""), environ.get("HOROVOD_RANK", ""))
    except ValueError as error:
        disarm()  # the entries before the wrong one
        _refused = str(error)
        reach = _refuse


_read(os.environ)
