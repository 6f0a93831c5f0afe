"""This process as a member of an elastic job: its generation, what it holds, and whether it has to leave.

The thread hc-membership hears from the coordinator that another generation is wanted, and shows it that this process is
alive. Thread: init() and shutdown() with current.lock held; the rest any.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from horoclone import errors
from horoclone.bootstrap import service, wire
from horoclone.bootstrap.client import HELLO_S, SLICE_S, Client
from horoclone.membership import client, snapshot
from horoclone.membership.client import GenerationJob, Identity, MembershipClient
from horoclone.membership.failover import Failover
from horoclone.membership.peer_discovery import PeerDiscovery
from horoclone.membership.records import Assignment, Evicted, Loss, Stop
from horoclone.membership.states import NO_MEMBER
from horoclone.membership.timeouts import ASK_AGAIN_S, COORDINATOR_TIMEOUT_S, FED_S, SAY_EVERY_S
from horoclone.runtime import current, replica
from horoclone.runtime.current import say
from horoclone.runtime.native_module import core
from horoclone.settings import flag, notice_signal, seconds, with_own_files

Listener = Callable[[int, int], None]


class ElasticMember:
    """The one of a process; lifecycle.py owns it. In a job of a fixed size it only knows who asks the ranks to end."""

    def __init__(self) -> None:
        self.assignment: Assignment | None = None  # the newest generation that held this process
        self.offered: tuple[int, ...] = ()  # commits that this process holds, ascending
        self.failover: Failover | None = None  # where members go on without their launcher
        self._asked = ""  # in a job of a fixed size: the signal that asks all ranks to end
        self._standing = (0, 0)  # the newest notice: generation wanted, update
        self._listeners: list[Listener] = []
        self._mutex = threading.Lock()  # guards the notice and its listeners
        self._who: Identity | None = None
        self._moves = 0  # of the failover, when _link was made
        self._link: MembershipClient | None = None
        self._thread: _MembershipThread | None = None
        self._feeder: replica.Feeder | None = None  # since this process was rank 0
        self._feeds_since = 0  # the generation in which that was
        self._feed: replica.Feed | None = None  # since this process waits to be one of the ranks

    def is_elastic(self) -> bool:
        """Whether this job goes on when ranks are lost or come: its launcher said so and gave this process a name, or
        it has none and its processes are behind a service."""
        return flag(os.environ, "ELASTIC") and (
            "HOROCLONE_MEMBER" in os.environ or service.is_set(os.environ)
        )

    def host(self) -> str:
        """The launcher's name of the host that this process is on; empty where it is no member of an elastic job."""
        return self._who.host if self._who is not None else ""

    def next_job(self) -> GenerationJob:
        """Waits for a generation that holds this process. SystemExit when the others go on without it, when the job
        ends, or when the coordinator cannot be reached; Unsupported outside of an elastic job."""
        if self._who is None:
            self._begin()
        assert self._who is not None and self._link is not None and self._thread is not None
        answer = self._wait(self._thread)
        if not isinstance(answer, Assignment):
            _end(answer)
        self.assignment = answer
        if self.failover is not None:
            self.failover.learn(self.assignment)
        if self._feed is not None and self.assignment.commit:
            self._feed.finish(self.assignment.commit)
        elif self._feed is not None:
            self.take_replica(waits=False)  # nobody has trained yet: this is no newcomer
        one_host = all(address.startswith(("127.", "unix:")) for address in self._who.addresses)
        if self.assignment.rank == 0:
            self._start_feeding(self._who, self.assignment.number, one_host)
        return GenerationJob(client.rendezvous(self._who, self._link, one_host), self.assignment)

    def settings_of_generation(self, settings: dict[str, str]) -> dict[str, str]:
        """From the second generation on there are other files: those of the one before tell how it ended."""
        return settings if self.number() < 2 else with_own_files(settings, f"generation{self.number()}")

    def _begin(self) -> None:
        self._who = client.identity(os.environ)._replace(build=json.loads(core().build_info())["build"])
        if service.is_elastic(os.environ):
            self.failover = self._discover(self._who)
        elif flag(os.environ, "SURVIVE_LAUNCHER"):
            is_one_host = all(address.startswith("127.") for address in self._who.addresses)
            bindings = ["127.0.0.1"] if is_one_host else wire.bindings(os.environ)
            self.failover = Failover(self._who, bindings, snapshot.MAX_MEMBERS, say)
            os.register_at_fork(after_in_child=self.failover.after_fork_in_child)
        if self.failover is not None:
            self._who, self._moves = self.failover.who, self.failover.moves
        self._link = MembershipClient(
            self._who, _timeout_s() if self.failover is None else HELLO_S, shows=True
        )
        self._thread = _MembershipThread(self, self._who)
        self._thread.begin()

    def _discover(self, who: Identity) -> PeerDiscovery:
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
        current.exit_hook = discovery.hand_over
        return discovery

    def connected(self) -> None:
        """The ranks of the newest generation are connected."""
        if self.failover is not None:
            self.failover.connected()

    @staticmethod
    def not_connected(error: errors.HorovodInternalError) -> None:
        """Why the ranks of the newest generation could not be connected."""
        if isinstance(error, errors.PeerLost) and error.rank >= 0:
            current.lost.setdefault(error.rank, Loss.UNREACHABLE)

    def _wait(self, thread: _MembershipThread) -> Assignment | Evicted | Stop:
        seen = self.assignment.number if self.assignment is not None else 0
        is_ready = self.assignment is not None
        began = reached = time.monotonic()
        say_at = began + SAY_EVERY_S
        announced = False
        while True:
            if thread.leaving and not announced:
                # the coordinator says whether others have what this process has
                self.announce(thread.leaving)
                announced = True
            link, answer, trouble = self._follow(), None, ""
            try:
                tells = self.assignment is None or all(
                    link.suspect(self.assignment.number, rank, how) for rank, how in current.lost.items()
                )
                if self.failover is not None and not tells:
                    raise errors.Timeout(link.where())
                answer = link.form(seen, self.offered[-2:], SLICE_S if is_ready else FED_S, is_ready)
                reached = time.monotonic()
                current.lost.clear()
                is_ready = is_ready or self._is_fed()
            except errors.Timeout as error:
                if self.failover is None:
                    return Stop(
                        NO_MEMBER, f"the membership coordinator of this job cannot be reached: {error}"
                    )
                trouble = str(error)
            except (errors.PeerLost, client.NotCoordinator) as error:
                if self.failover is None:
                    raise
                trouble = str(error)
            if isinstance(answer, Evicted) and thread.leaving and not answer.code:
                self.leave(thread.leaving)
                return Evicted(self.code_of_leaving(), thread.leaving)
            if answer is not None:
                return answer
            if trouble and self.failover is not None:
                if self.assignment is None and not isinstance(self.failover, PeerDiscovery):
                    return Stop(
                        NO_MEMBER, f"the launcher was gone before this process was in the job: {trouble}"
                    )
                if time.monotonic() - reached >= _timeout_s():
                    return Stop(
                        NO_MEMBER,
                        f"for {_timeout_s():g} s there was no membership coordinator of this job: {trouble}",
                    )
                if self.failover.find(self._moves, SLICE_S):
                    reached = time.monotonic()
            if self.assignment is None and isinstance(self.failover, PeerDiscovery):
                self.failover.look_again()
            if time.monotonic() >= say_at:
                why = f" ({link.reason})" if link.reason else ""
                say(f"waiting for generation {seen + 1} of the job for {time.monotonic() - began:.0f} s{why}")
                say_at += SAY_EVERY_S

    def _is_fed(self) -> bool:
        """Whether this process, which waits for its first generation, has a commit of the others, or gets none. Who is
        in the first generation of a job is in it before this is asked."""
        if self._feed is None and self._who is not None:
            self._feed = replica.Feed(self._who.addresses, self._who.secret, self._who.job)
            self._feed.start()
        return self._feed is None or self._feed.has_what_it_can()

    def has_spares(self) -> bool:
        """Whether workers wait for a loss: the launcher says so."""
        return flag(os.environ, "SPARES")

    def _start_feeding(self, who: Identity, number: int, one_host: bool) -> None:
        """This process is rank 0: who waits finds it under a key of the rendezvous. Without it there is a sync."""
        if self._feeder is not None:
            return
        try:
            # on one host by a socket that takes a third of the time of TCP's
            near = f"unix:horoclone-replica-{secrets.token_hex(16)}"
            bindings = [near] if one_host else wire.bindings(os.environ)
            feeder = replica.Feeder(
                who.secret, who.job, bindings, seconds(os.environ, "REPLICA_INTERVAL", 0.0)
            )
            client = Client(list(who.addresses), who.secret, who.job, HELLO_S)
            client.put(replica.KEY, number.to_bytes(8, "little") + ",".join(feeder.addresses).encode())
            client.close()
            self._feeder, self._feeds_since = feeder, number
        except (OSError, errors.HorovodInternalError) as error:
            say(f"newcomers are not given commits while they wait: {error}")

    def feeds(self) -> bool:
        """Whether this process is rank 0, which gives commits to those who wait."""
        return self._feeder is not None and self.assignment is not None and self.assignment.rank == 0

    def offer_replica(self, commit: int, pack: replica.Pack) -> None:
        """All ranks hold this commit: rank 0 gives it to those who wait. pack is called on another thread, or never."""
        if self._feeder is not None:
            self._feeder.offer(commit, pack)

    def hurry_replica(self) -> None:
        """Training waits for those who wait for the newest offer."""
        if self._feeder is not None:
            self._feeder.hurry()

    def digest_of_replica(self, commit: int) -> int:
        """Of a commit that this process has given to a spare; 0: it has not."""
        return self._feeder.digest(commit) if self._feeder is not None else 0

    def holds_replica(self) -> bool:
        """Whether this process was given a commit while it waited, which nobody has taken yet."""
        return self._feed is not None and self._feed.has_commit()

    def feeder(self) -> int:
        """Of this process, if it is rank 0: the generation since which it gives commits to those who wait; 0: none."""
        return self._feeds_since if self.feeds() else 0

    def finish_feeding(self) -> None:
        """Training is over: who was let in gets what it was promised before this process ends."""
        if self._feeder is not None:
            self._feeder.finish()

    def promised_replica(self) -> tuple[replica.Replica | None, int]:
        """The newest commit that this process was given while it waited, and the feeder() of whom the next come."""
        return self._feed.promised() if self._feed is not None else (None, 0)

    def take_replica(self, waits: bool = True) -> replica.Replica | None:
        """The newest commit that this process was given while it waited, once; waits: for that of this generation."""
        feed, self._feed = self._feed, None
        return feed.take(waits) if feed is not None else None

    def _follow(self) -> MembershipClient:
        """The connection of init() to the coordinator of now."""
        assert self._link is not None
        if self.failover is not None and self.failover.moves != self._moves:
            self._link.close()
            self._moves, self._who = self.failover.moves, self.failover.who
            self._link = MembershipClient(self._who, HELLO_S, shows=True)
        return self._link

    def code_of_leaving(self, is_elastic: bool = True) -> int:
        """With which a process ends that leaves as planned: 0 for a launcher, which knows of it. A Job of Kubernetes
        would count 0 as work that is done, and start nobody in its place; so does Slurm."""
        return 0 if is_elastic and not service.is_elastic(os.environ) else NO_MEMBER

    def leave(self, reason: str) -> None:
        """Tells the coordinator that this process leaves now, as planned: its end is no failure, and nobody waits for
        it."""
        self._depart(reason, at_once=True)

    def announce(self, reason: str) -> None:
        """Tells the coordinator that this process is to leave as soon as others have its state."""
        self._depart(reason, at_once=False)

    def finished(self) -> None:
        """Tells the coordinator that this process has done its work, where nobody sees that it ends."""
        self._tell(MembershipClient.finished)

    def fails(self) -> None:
        """Tells the coordinator that an exception ends this process: with a large framework its interpreter takes
        seconds to end, for which the others need not wait."""
        one = self.assignment
        if one is not None and current.forked_from is None:
            self._tell(lambda link: link.suspect(one.number, one.rank, Loss.ENDED))

    def _depart(self, reason: str, at_once: bool) -> None:
        current.has_left = current.has_left or at_once
        self._tell(lambda link: link.depart(reason, at_once))

    def _tell(self, what: Callable[[MembershipClient], object]) -> None:
        if self._who is not None:
            link = MembershipClient(self._now(self._who), HELLO_S, shows=False)
            what(link)
            link.close()

    def _now(self, who: Identity) -> Identity:
        """With the addresses of the coordinator of now."""
        return self.failover.who if self.failover is not None else who

    def leave_requested(self) -> str | None:
        """Why this process should leave at its next commit (SIGTERM came); None: it need not."""
        return self._thread.leaving or None if self._thread is not None else self._asked or None

    def hear_signal(self) -> None:
        """In a job of a fixed size HOROCLONE_NOTICE_SIGNAL asks its ranks to end, all at the same commit: a time limit
        comes. Main thread only, and only where nobody else handles the signal."""
        number = notice_signal(os.environ)
        if number is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self._asked = signal.Signals(number).name

    def listen(self, listener: Listener) -> None:
        """listener(wanted, update), on the thread hc-membership, for each notice from now on, and one that stands."""
        with self._mutex:
            self._listeners.append(listener)
            standing = self._standing
        if standing[0] > self.number():
            listener(*standing)

    def tell_listeners(self, wanted: int, update: int) -> None:
        with self._mutex:
            self._standing, listeners = (wanted, update), list(self._listeners)
        if wanted > self.number():
            for listener in listeners:
                try:
                    listener(wanted, update)
                except Exception:  # the user's; who is silent from then on would be lost to the others
                    threading.excepthook(
                        threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                    )

    def number(self) -> int:
        """Of the newest generation that held this process; 0: none did yet."""
        return self.assignment.number if self.assignment is not None else 0


class _MembershipThread(threading.Thread):
    """Long polls for notices; in its breaks it looks whether this process has to go."""

    def __init__(self, member: ElasticMember, who: Identity) -> None:
        super().__init__(name="hc-membership", daemon=True)
        self._member = member
        self.leaving = ""  # why this process is to leave
        self._who, self._pid = who, os.getpid()
        self._link = MembershipClient(who, HELLO_S, shows=False)
        self._moves = 0  # of the failover, when the link was made
        self._asked_s = 0.0  # when SIGTERM came
        self._ends = False  # the job does
        self._wakeup = threading.Event()

    def begin(self) -> None:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM] if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else []
            other = notice_signal(os.environ)
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
        self._wakeup.set()

    def _announce(self) -> None:
        """Thread hc-notice: tells the coordinator of the wish to leave, and leaves when no commit comes."""
        self._wakeup.wait()
        self._member.announce(self.leaving)
        limit_s = seconds(os.environ, "NOTICE", 30.0)
        time.sleep(max(0.0, self._asked_s + limit_s - time.monotonic()))
        say(f"{limit_s:g} s after {self.leaving} there was no commit; this process leaves (HOROCLONE_NOTICE)")
        self._member.leave(self.leaving)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        os._exit(self._member.code_of_leaving())

    def _follow(self) -> bool:
        """Whether there is another coordinator; then it has been turned to."""
        if self._member.failover is None or self._member.failover.moves == self._moves:
            return False
        self._link.close()
        self._moves = self._member.failover.moves
        self._link = MembershipClient(self._member.failover.who, HELLO_S, shows=False)
        return True

    def run(self) -> None:
        seq, heard_s = 0, time.monotonic()
        while True:
            if self._follow():
                seq = 0
            failover = self._member.failover
            try:
                answer = self._link.notice(seq, max(self._member.offered, default=0))
            except (errors.PeerLost, client.NotCoordinator):
                has_begun = self._member.assignment is not None or isinstance(failover, PeerDiscovery)
                if failover is None or not has_begun:
                    return  # the launcher is gone, and soon we are
                failover.find(self._moves, SLICE_S)
                continue
            except (errors.HorovodInternalError, OSError):
                if failover is not None and time.monotonic() - heard_s >= COORDINATOR_TIMEOUT_S:
                    failover.find(self._moves, SLICE_S)
                time.sleep(ASK_AGAIN_S)
                continue
            heard_s = time.monotonic()
            if failover is not None:
                failover.heard()
            if isinstance(answer, Stop):
                self._ends = True
                if self.leaving:  # it was the end of the job, not of this process only
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            if answer is not None:
                seq = answer.seq
                self._member.tell_listeners(answer.wanted, answer.update)


def _timeout_s() -> float:
    return seconds(os.environ, "ELASTIC_TIMEOUT", 600.0)


def _end(answer: Evicted | Stop) -> NoReturn:
    current.has_left = not answer.code
    if answer.code:
        say(answer.text)
    raise SystemExit(answer.code) from (errors.HorovodInternalError(answer.text) if answer.code else None)
