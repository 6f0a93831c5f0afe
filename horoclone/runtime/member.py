"""This process as a member of an elastic job: which generation it is in, what it holds, and whether it has to go.

The thread hc-roster hears from the roster that another generation is wanted, and shows it that this process lives.
Thread: init() and shutdown() with current.lock held; the rest any.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from horoclone import errors
from horoclone.bootstrap import membership
from horoclone.bootstrap.client import HELLO_S, SLICE_S
from horoclone.bootstrap.desk import Told
from horoclone.bootstrap.membership import SAY_EVERY_S, GenerationJob, Identity, Membership
from horoclone.bootstrap.roster import NO_MEMBER, Out, Stop
from horoclone.runtime import current
from horoclone.runtime.current import say
from horoclone.settings import flag, seconds

Listener = Callable[[int, int], None]
RETRY_S = 0.2

told: Told | None = None  # the newest generation that held this process
offered: tuple[int, ...] = ()  # commits that this process holds, ascending
dropped: tuple[int, ...] = ()  # process sets of the generation before that do not exist in this one
_listeners: list[Listener] = []
_mutex = threading.Lock()  # guards the listeners
_who: Identity | None = None
_link: Membership | None = None
_thread: _RosterThread | None = None


def is_elastic() -> bool:
    """Whether the launcher said that this job goes on when ranks are lost or come, and gave this process a name."""
    return flag(os.environ, "ELASTIC") and "HOROCLONE_MEMBER" in os.environ


def next_job() -> GenerationJob:
    """Waits for a generation that holds this process. SystemExit when the others go on without it, when the job
    ends, or when the roster cannot be reached; Unsupported when this process was not started for an elastic job."""
    global told, _who, _link, _thread
    if _who is None:
        _who = membership.identity(os.environ)
        _link = Membership(_who, _timeout_s(), shows=True)
        _thread = _RosterThread(_who)
        _thread.begin()
    assert _link is not None and _thread is not None
    if told is not None:
        for rank in current.lost:
            _link.suspect(told.number, rank)
    current.lost.clear()
    answer = _wait(_link, _thread)
    if not isinstance(answer, Told):
        _end(answer)
    told = answer
    one_host = all(address.startswith(("127.", "unix:")) for address in _who.addresses)
    return GenerationJob(membership.meeting(_who, _link, one_host), told)


def _timeout_s() -> float:
    return seconds(os.environ, "ELASTIC_TIMEOUT", 600.0)


def _wait(link: Membership, thread: _RosterThread) -> Told | Out | Stop:
    seen = told.number if told is not None else 0
    began = time.monotonic()
    say_at = began + SAY_EVERY_S
    while True:
        if thread.leaving:
            leave(thread.leaving)
            return Out(0, thread.leaving)
        try:
            answer = link.form(seen, offered[-2:], SLICE_S)
        except errors.Timeout as error:
            return Stop(NO_MEMBER, f"the roster of this job cannot be reached: {error}")
        if answer is not None:
            return answer
        if time.monotonic() >= say_at:
            say(f"waiting for generation {seen + 1} of the job for {time.monotonic() - began:.0f} s")
            say_at += SAY_EVERY_S


def _end(answer: Out | Stop) -> NoReturn:
    if answer.code:
        say(answer.text)
    raise SystemExit(answer.code)


def leave(reason: str) -> None:
    """Tells the roster that this process leaves now, as planned: its end is no failure, and nobody waits for it."""
    if _who is not None:
        link = Membership(_who, HELLO_S, shows=False)
        link.depart(reason, at_once=True)
        link.close()


def leave_requested() -> str | None:
    """Why this process should leave at its next commit (SIGTERM came); None: it need not."""
    return _thread.leaving or None if _thread is not None else None


def listen(listener: Listener) -> None:
    """listener(wanted, update), on the thread hc-roster, for each notice from now on, and for one that stands."""
    with _mutex:
        _listeners.append(listener)
        standing = _thread.standing if _thread is not None else (0, 0)
    if standing[0] > number():
        listener(*standing)


class _RosterThread(threading.Thread):
    """Long polls for notices; in its breaks it looks whether this process has to go."""

    def __init__(self, who: Identity) -> None:
        super().__init__(name="hc-roster", daemon=True)
        self.leaving = ""  # why this process is to leave
        self._who, self._pid = who, os.getpid()
        self._link = Membership(who, HELLO_S, shows=False)
        self.standing = (0, 0)  # the newest notice: generation wanted, update
        self._asked_s = 0.0  # when SIGTERM came
        self._ends = False  # the job does
        self._bell = threading.Event()

    def begin(self) -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, self._asked_to_leave)
            threading.Thread(target=self._announce, name="hc-notice", daemon=True).start()
        os.register_at_fork(after_in_child=self._link.close)
        self.start()

    def _asked_to_leave(self, number: int, _frame: object) -> None:
        """SIGTERM: a notice, unless the whole job ends, it is the second, or this is a fork's child."""
        if self._ends or self.leaving or os.getpid() != self._pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._asked_s, self.leaving = time.monotonic(), "SIGTERM"
        self._bell.set()

    def _announce(self) -> None:
        """Thread hc-notice: tells the roster of the wish to leave, and leaves when no commit comes."""
        self._bell.wait()
        link = Membership(self._who, HELLO_S, shows=False)
        link.depart(self.leaving, at_once=False)
        link.close()
        limit_s = seconds(os.environ, "NOTICE", 30.0)
        time.sleep(max(0.0, self._asked_s + limit_s - time.monotonic()))
        say(f"{limit_s:g} s after {self.leaving} there was no commit; this process leaves (HOROCLONE_NOTICE)")
        leave(self.leaving)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        os._exit(0)

    def run(self) -> None:
        seq = 0
        while True:
            try:
                answer = self._link.notice(seq)
            except errors.PeerLost:
                return  # the launcher is gone, and soon we are
            except (errors.HorovodInternalError, OSError):
                time.sleep(RETRY_S)
                continue
            if isinstance(answer, Stop):
                self._ends = True
                if self.leaving:  # it was the end of the job, not of this process only
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            if answer is not None:
                seq = answer.seq
                with _mutex:
                    self.standing = (answer.wanted, answer.update)
                    listeners = list(_listeners)
                if answer.wanted > number():
                    for listener in listeners:
                        listener(answer.wanted, answer.update)


def number() -> int:
    """Of the newest generation that held this process; 0: none did yet."""
    return told.number if told is not None else 0
