"""This process as a member of an elastic job: its generation, what it holds, and whether it has to leave.

The thread hc-membership hears from the coordinator that another generation is wanted, and shows it that this process is
alive. Thread: init() and shutdown() with current.lock held; the rest any.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from horoclone import errors
from horoclone.bootstrap import replica, service, wire
from horoclone.bootstrap.client import HELLO_S, SLICE_S, Client
from horoclone.membership import client, snapshot
from horoclone.membership.client import GenerationJob, Identity, MembershipClient
from horoclone.membership.failover import Failover
from horoclone.membership.peer_discovery import PeerDiscovery
from horoclone.membership.records import Assignment, Evicted, Stop
from horoclone.membership.states import NO_MEMBER
from horoclone.membership.timeouts import ASK_AGAIN_S, COORDINATOR_TIMEOUT_S, SAY_EVERY_S
from horoclone.runtime import current
from horoclone.runtime.current import say
from horoclone.runtime.native_module import core
from horoclone.settings import flag, seconds, setting, with_own_files

Listener = Callable[[int, int], None]

assignment: Assignment | None = None  # the newest generation that held this process
offered: tuple[int, ...] = ()  # commits that this process holds, ascending
dropped: tuple[int, ...] = ()  # process sets of the generation before that do not exist in this one
_asked = ""  # in a job of a fixed size: the signal that asks all ranks to end at their next commit
_listeners: list[Listener] = []
_mutex = threading.Lock()  # guards the listeners
_who: Identity | None = None
_failover: Failover | None = None  # where members go on without their launcher
_moves = 0  # of the failover, when _link was made
_link: MembershipClient | None = None
_thread: _MembershipThread | None = None
_feeder: replica.Feeder | None = None  # while this process is rank 0 and spares may wait
_feed: replica.Feed | None = None  # since this process waits to be one of the ranks


def is_elastic() -> bool:
    """Whether this job goes on when ranks are lost or come: its launcher said so and gave this process a name, or it
    has none and its processes are behind a service."""
    return flag(os.environ, "ELASTIC") and ("HOROCLONE_MEMBER" in os.environ or service.is_set(os.environ))


def host() -> str:
    """The launcher's name of the host that this process is on; empty where it is no member of an elastic job."""
    return _who.host if _who is not None else ""


def next_job() -> GenerationJob:
    """Waits for a generation that holds this process. SystemExit when the others go on without it, when the job
    ends, or when the coordinator cannot be reached; Unsupported outside of an elastic job."""
    global assignment, _who, _link, _thread
    if _who is None:
        _begin()
    assert _who is not None and _link is not None and _thread is not None
    answer = _wait(_thread)
    if not isinstance(answer, Assignment):
        _end(answer)
    assignment = answer
    if _failover is not None:
        _failover.learn(assignment)
    if _feed is not None and assignment.commit:
        _feed.finish(assignment.commit)
    elif _feed is not None:
        take_replica()  # nobody has trained yet: this is no spare
    one_host = all(address.startswith(("127.", "unix:")) for address in _who.addresses)
    if assignment.rank == 0 and feeds_spares():
        _start_feeding(_who, assignment.number, one_host)
    return GenerationJob(client.rendezvous(_who, _link, one_host), assignment)


def settings_of_generation(settings: dict[str, str]) -> dict[str, str]:
    """From the second generation on there are other files: those of the one before tell what happened at its end."""
    return settings if number() < 2 else with_own_files(settings, f"generation{number()}")


def _begin() -> None:
    global _who, _link, _thread, _failover, _moves
    _who = client.identity(os.environ)._replace(build=json.loads(core().build_info())["build"])
    if service.is_elastic(os.environ):
        _failover = _discover(_who)
    elif flag(os.environ, "SURVIVE_LAUNCHER"):
        is_one_host = all(address.startswith("127.") for address in _who.addresses)
        bindings = ["127.0.0.1"] if is_one_host else wire.bindings(os.environ)
        _failover = Failover(_who, bindings, snapshot.MAX_MEMBERS, say)
        os.register_at_fork(after_in_child=_failover.after_fork_in_child)
    if _failover is not None:
        _who, _moves = _failover.who, _failover.moves
    _link = MembershipClient(_who, _timeout_s() if _failover is None else HELLO_S, shows=True)
    _thread = _MembershipThread(_who)
    _thread.begin()


def _discover(who: Identity) -> PeerDiscovery:
    """Without a launcher: until the coordinator is found, or this process is it. SystemExit after the elastic
    timeout."""
    place = service.place_of(os.environ)
    discovery = PeerDiscovery(who, place, os.environ, say)
    os.register_at_fork(after_in_child=discovery.after_fork_in_child)
    began = time.monotonic()
    say_at = began + SAY_EVERY_S
    while not discovery.find(0, SLICE_S):
        waited = time.monotonic() - began
        if waited >= _timeout_s():
            _end(
                Stop(
                    NO_MEMBER,
                    f"{place.host}: for {waited:.0f} s there was no job to join: {discovery.trouble}",
                )
            )
        if time.monotonic() >= say_at:
            say(f"{place.host} looks for its job for {waited:.0f} s: {discovery.trouble}")
            say_at += SAY_EVERY_S
    current.farewell = discovery.hand_over
    return discovery


def connected() -> None:
    """The ranks of the newest generation are connected."""
    if _failover is not None:
        _failover.connected()


def _timeout_s() -> float:
    return seconds(os.environ, "ELASTIC_TIMEOUT", 600.0)


def _wait(thread: _MembershipThread) -> Assignment | Evicted | Stop:
    global _feed
    seen = assignment.number if assignment is not None else 0
    if assignment is None and _feed is None and feeds_spares() and _who is not None:
        _feed = replica.Feed(_who.addresses, _who.secret, _who.job)
        _feed.start()
    began = reached = time.monotonic()
    say_at = began + SAY_EVERY_S
    announced = False
    while True:
        if thread.leaving and not announced:  # the coordinator says whether others have what this process has
            announce(thread.leaving)
            announced = True
        link, answer, trouble = _follow(), None, ""
        try:
            tells = assignment is None or all(link.suspect(assignment.number, rank) for rank in current.lost)
            if _failover is not None and not tells:
                raise errors.Timeout(link.where())
            answer = link.form(seen, offered[-2:], SLICE_S)
            reached = time.monotonic()
            current.lost.clear()
        except errors.Timeout as error:
            if _failover is None:
                return Stop(NO_MEMBER, f"the membership coordinator of this job cannot be reached: {error}")
            trouble = str(error)
        except (errors.PeerLost, client.NotCoordinator) as error:
            if _failover is None:
                raise
            trouble = str(error)
        if isinstance(answer, Evicted) and thread.leaving and not answer.code:
            leave(thread.leaving)
            return Evicted(code_of_leaving(), thread.leaving)
        if answer is not None:
            return answer
        if trouble and _failover is not None:
            if assignment is None and not isinstance(_failover, PeerDiscovery):
                return Stop(NO_MEMBER, f"the launcher was gone before this process was in the job: {trouble}")
            if time.monotonic() - reached >= _timeout_s():
                return Stop(
                    NO_MEMBER,
                    f"for {_timeout_s():g} s there was no membership coordinator of this job: {trouble}",
                )
            if _failover.find(_moves, SLICE_S):
                reached = time.monotonic()
        if assignment is None and isinstance(_failover, PeerDiscovery):
            _failover.look_again()
        if time.monotonic() >= say_at:
            why = f" ({link.reason})" if link.reason else ""
            say(f"waiting for generation {seen + 1} of the job for {time.monotonic() - began:.0f} s{why}")
            say_at += SAY_EVERY_S


def feeds_spares() -> bool:
    """Whether spares are given commits while they wait: the launcher says so where there are any."""
    return is_elastic() and "HOROCLONE_REPLICA_INTERVAL" in os.environ


def _start_feeding(who: Identity, number: int, one_host: bool) -> None:
    """This process is rank 0: spares find it under a key of the rendezvous. Without it they take part in a sync."""
    global _feeder
    if _feeder is not None:
        return
    try:
        bindings = ["127.0.0.1"] if one_host else wire.bindings(os.environ)
        feeder = replica.Feeder(who.secret, who.job, bindings, seconds(os.environ, "REPLICA_INTERVAL", 0.0))
        client = Client(list(who.addresses), who.secret, who.job, HELLO_S)
        client.put(replica.KEY, number.to_bytes(8, "little") + ",".join(feeder.addresses).encode())
        client.close()
        _feeder = feeder
    except (OSError, errors.HorovodInternalError) as error:
        say(f"spares are not given commits: {error}")


def offer_replica(commit: int, pack: replica.Pack) -> None:
    """All ranks hold this commit: rank 0 gives it to the spares. pack is called on another thread, later or never."""
    if _feeder is not None and assignment is not None and assignment.rank == 0:
        _feeder.offer(commit, pack)


def digest_of_replica(commit: int) -> int:
    """Of a commit that this process has given to a spare; 0: it has not."""
    return _feeder.digest(commit) if _feeder is not None else 0


def take_replica() -> replica.Replica | None:
    """The newest commit that this process was given while it waited; once."""
    global _feed
    feed, _feed = _feed, None
    return feed.take() if feed is not None else None


def _end(answer: Evicted | Stop) -> NoReturn:
    if answer.code:
        say(answer.text)
    raise SystemExit(answer.code)


def _follow() -> MembershipClient:
    """The connection of init() to the coordinator of now."""
    global _who, _link, _moves
    assert _link is not None
    if _failover is not None and _failover.moves != _moves:
        _link.close()
        _moves, _who = _failover.moves, _failover.who
        _link = MembershipClient(_who, HELLO_S, shows=True)
    return _link


def code_of_leaving(is_elastic: bool = True) -> int:
    """With which a process ends that leaves as planned: 0 for a launcher, which knows of it. A Job of Kubernetes would
    count 0 as work that is done, and start nobody in its place; so does Slurm."""
    return 0 if is_elastic and not service.is_elastic(os.environ) else NO_MEMBER


def leave(reason: str) -> None:
    """Tells the coordinator that this process leaves now, as planned: its end is no failure, and nobody waits for
    it."""
    _depart(reason, at_once=True)


def announce(reason: str) -> None:
    """Tells the coordinator that this process is to leave as soon as others have its state."""
    _depart(reason, at_once=False)


def _depart(reason: str, at_once: bool) -> None:
    if _who is not None:
        link = MembershipClient(_now(_who), HELLO_S, shows=False)
        link.depart(reason, at_once)
        link.close()


def _now(who: Identity) -> Identity:
    """With the addresses of the coordinator of now."""
    return _failover.who if _failover is not None else who


def leave_requested() -> str | None:
    """Why this process should leave at its next commit (SIGTERM came); None: it need not."""
    return _thread.leaving or None if _thread is not None else _asked or None


def hear_signal() -> None:
    """In a job of a fixed size HOROCLONE_NOTICE_SIGNAL asks its ranks to end, all at the same commit: a time limit
    comes. Main thread only, and only where nobody else handles the signal."""
    number = _notice_signal()
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, _note)


def _note(number: int, _frame: object) -> None:
    global _asked
    _asked = signal.Signals(number).name


def _notice_signal() -> signal.Signals | None:
    name = setting(os.environ, "NOTICE_SIGNAL", "").removeprefix("sig")
    return signal.Signals[f"SIG{name.upper()}"] if name in ("usr1", "usr2") else None


def listen(listener: Listener) -> None:
    """listener(wanted, update), on the thread hc-membership, for each notice from now on, and for one that stands."""
    with _mutex:
        _listeners.append(listener)
        standing = _thread.standing if _thread is not None else (0, 0)
    if standing[0] > number():
        listener(*standing)


class _MembershipThread(threading.Thread):
    """Long polls for notices; in its breaks it looks whether this process has to go."""

    def __init__(self, who: Identity) -> None:
        super().__init__(name="hc-membership", daemon=True)
        self.leaving = ""  # why this process is to leave
        self._who, self._pid = who, os.getpid()
        self._link = MembershipClient(who, HELLO_S, shows=False)
        self._moves = 0  # of the failover, when the link was made
        self.standing = (0, 0)  # the newest notice: generation wanted, update
        self._asked_s = 0.0  # when SIGTERM came
        self._ends = False  # the job does
        self._bell = threading.Event()

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM] if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else []
            other = _notice_signal()
            numbers += [] if other is None else [other]
            for number in numbers:
                signal.signal(number, self._asked_to_leave)
            if numbers:
                threading.Thread(target=self._announce, name="hc-notice", daemon=True).start()
        os.register_at_fork(after_in_child=lambda: self._link.close())
        self.start()

    def _asked_to_leave(self, number: int, _frame: object) -> None:
        """SIGTERM: a notice, unless the whole job ends, it is the second, or this is a fork's child. The other signal
        that may be one ends nobody: it comes to a whole process group, and more than once."""
        is_second = bool(self._ends or self.leaving or os.getpid() != self._pid)
        if is_second and number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if is_second:
            return
        self._asked_s, self.leaving = time.monotonic(), signal.Signals(number).name
        self._bell.set()

    def _announce(self) -> None:
        """Thread hc-notice: tells the coordinator of the wish to leave, and leaves when no commit comes."""
        self._bell.wait()
        announce(self.leaving)
        limit_s = seconds(os.environ, "NOTICE", 30.0)
        time.sleep(max(0.0, self._asked_s + limit_s - time.monotonic()))
        say(f"{limit_s:g} s after {self.leaving} there was no commit; this process leaves (HOROCLONE_NOTICE)")
        leave(self.leaving)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        os._exit(code_of_leaving())

    def _follow(self) -> bool:
        """Whether there is another coordinator; then it has been turned to."""
        if _failover is None or _failover.moves == self._moves:
            return False
        self._link.close()
        self._moves = _failover.moves
        self._link = MembershipClient(_failover.who, HELLO_S, shows=False)
        return True

    def run(self) -> None:
        seq, heard_s = 0, time.monotonic()
        while True:
            if self._follow():
                seq = 0
            try:
                answer = self._link.notice(seq, max(offered, default=0))
            except (errors.PeerLost, client.NotCoordinator):
                if _failover is None or (assignment is None and not isinstance(_failover, PeerDiscovery)):
                    return  # the launcher is gone, and soon we are
                _failover.find(self._moves, SLICE_S)
                continue
            except (errors.HorovodInternalError, OSError):
                if _failover is not None and time.monotonic() - heard_s >= COORDINATOR_TIMEOUT_S:
                    _failover.find(self._moves, SLICE_S)
                time.sleep(ASK_AGAIN_S)
                continue
            heard_s = time.monotonic()
            if _failover is not None:
                _failover.heard()
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
    return assignment.number if assignment is not None else 0
