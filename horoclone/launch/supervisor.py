"""Keeps an elastic job running: the policy says who should run where, the membership coordinator who is in.

What starts and ends the processes is a ProcessBackend: the launcher's loop (elastic_job.py: local and ssh, and Spark's
tasks) and Ray's actors (ray/elastic_job.py). It has the loop, calls step() in every pass, and tells of each end by
exited(). Thread: the backend's.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from horoclone import failpoints
from horoclone.bootstrap.rendezvous import Server
from horoclone.launch.discovery import FlapFilter, HostPoller
from horoclone.launch.elastic_options import Elastic
from horoclone.launch.elastic_policy import Place, Policy
from horoclone.launch.environment import member_variables, rank_variables
from horoclone.launch.hosts import Host, Placement
from horoclone.launch.usage import LaunchError
from horoclone.membership import snapshot
from horoclone.membership.records import ID_BYTES, Limits, Record, Stop
from horoclone.membership.service import MembershipService
from horoclone.membership.states import NO_MEMBER

LAST_S = 2.0  # a host that goes is not used to the last moment
ROOM_IS_KNOWN_S = 3.0  # after the last process has ended: Ray tells of its place up to a second later
REPEAT_S = 30.0  # between two lines about the same trouble with the discovery of hosts
MAX_RANKS = 1 << 15


@dataclass(eq=False)
class Worker:
    """One process. number: of the job, each is given once. id: of its member; empty: the others do not expect it."""

    number: int
    place: Place
    began_s: float
    id: bytes = b""
    ended: bool = False
    has_finished: bool = False  # with success, and its work done
    has_failed: bool = False
    dismissed: bool = False  # it is not needed any more, so nothing follows from its end


class ProcessBackend(Protocol):
    """Starts and ends processes. Its calls come from within the supervisor's."""

    def start(self, worker: Worker) -> None:
        """Starts a process, and calls announce() for its variables, now or when it is up."""
        ...

    def kill(self, worker: Worker) -> None:
        """Ends the process and what it has started, at once."""
        ...

    def dismiss(self, worker: Worker) -> None:
        """Ends a process that has not begun its work, and need not any more."""
        ...

    def room(self, now: float) -> Mapping[str, int] | None:
        """Host -> how many more processes it can take now; None: as many as it has slots."""
        ...

    def more_hosts_to_come(self) -> bool | None:
        """Whether more hosts than those that are known are on their way; None: nobody knows."""
        ...

    def is_ending(self) -> bool:
        """Whether the job is being ended, by a signal or after fail()."""
        ...

    def fail(self, now: float) -> None:
        """The job has failed: ends its processes, after a while by force. `last` and `reason` say why."""
        ...

    def formed(self, number: int, ranks: Sequence[Worker], is_first: bool) -> None:
        """These are the ranks of a new generation."""
        ...

    def named(self, worker: Worker) -> str:
        """The worker, in a message: "slot 3 (node-a, pid 7)"."""
        ...

    def no_room_text(self, limit_s: float) -> str:
        """Why the job ends: for so long no process could be started."""
        ...

    def say(self, text: str) -> None:
        """Tells the user."""
        ...


class _MembershipService(MembershipService):
    """Tells of members that the others have lost at once, and not with the next generation: one that nobody has missed
    yet may have ended with them, and the generation would wait for it."""

    def newly_gone(self) -> list[Any]:
        with self.mutex:
            found = super().newly_gone()
            if found:
                self.tell()
            return found


class _End(NamedTuple):
    """What the end of a process means for the members. progressed: None until the others have said so."""

    why: str  # it was to leave
    was_last: bool
    progressed: bool | None
    has_formed: bool
    left: int


class Supervisor:
    """wake: called on any thread when step() has something to do. last, reason: why the job has failed."""

    def __init__(
        self,
        job: Elastic,
        backend: ProcessBackend,
        wake: Callable[[], None],
        flap_filter: FlapFilter | None = None,
    ) -> None:
        self._job, self._backend, self._wake = job, backend, wake
        self.policy = Policy(job.plan, job.cooldown)
        largest = job.plan.largest
        if job.outlives:
            largest = min(largest or snapshot.MAX_MEMBERS, snapshot.MAX_MEMBERS)
        limits = Limits(job.size or job.plan.smallest, job.plan.smallest, largest, job.timeout_s, job.resets)
        self._service = _MembershipService(limits, secrets.token_bytes)
        self._coordinator = self._service.coordinator  # guarded by the service's mutex
        self._coordinator.whole_hosts = job.plan.whole_host
        self._service.tell = wake
        self._server: Server | None = None
        self._job_name = ""
        self._flap_filter = flap_filter or FlapFilter()
        self._host_poller: HostPoller | None = None
        self._trouble = ("", -math.inf)
        self.workers: dict[int, Worker] = {}  # also those that have ended
        self._by_id: dict[bytes, Worker] = {}
        self._first_size = job.size
        self._unjudged: list[tuple[Worker, float]] = []  # those that have failed, and when
        self._due: dict[Worker, float] = {}  # workers of hosts that are about to go: when they are ended
        self._closed_host: Worker | None = None  # the one whose failure made those beside it leave
        self._generation = 0
        self._nobody_since = math.inf  # since when no process runs
        self.finishing = False  # a rank has done its work
        self.last: list[Worker] = []  # whose end is the end of the job
        self.reason = ""  # why the job ends, where its last workers do not say it

    # --- start and end

    def find_hosts(self) -> list[Host]:
        """The first look. LaunchError when the source cannot say."""
        hosts = self._flap_filter.take(self._job.source.find(), time.monotonic())
        self.policy.found(hosts)
        if self._job.size:
            slots, largest = sum(host.slots for host in hosts), self._job.plan.largest
            self._first_size = max(self._job.size, slots if largest is None else min(largest, slots))
        return hosts

    def serve(self, secret: bytes, job_name: str, addresses: Sequence[str], majority: bool = False) -> Server:
        """Listens for the job's ranks, until close(). majority: of a cut network at most one side goes on. OSError."""
        if self._job.outlives:
            with self._service.mutex:
                self._service.snapshot = snapshot.packed
                self._coordinator.limits = self._coordinator.limits._replace(majority=majority)
        self._job_name = job_name
        self._server = Server(secret, job_name, MAX_RANKS, list(addresses), self._service)
        return self._server

    def watch_hosts(self) -> None:
        """From now on step() also takes hosts that come and go."""
        if self._job.source.changes:
            self._host_poller = HostPoller(self._job.source, self._wake)
            self._host_poller.start()

    def stop(self, code: int, text: str) -> None:
        """Members that ask are told that the job is over."""
        with self._service.mutex:
            self._coordinator.stop(code, text)
        self._ring()

    def close(self) -> None:
        """Looks for hosts no more. The server is closed by who has got it from serve()."""
        if self._host_poller is not None:
            self._host_poller.close()

    # --- what a backend asks

    def running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.ended]

    def placement(self, worker: Worker) -> Placement:
        """Its numbers, as they are until the first generation."""
        place = worker.place
        local_size, cross_rank, cross_size = self.policy.sharing(place)
        size = max(self._first_size, place.number + 1)
        return Placement(place.number, size, place.local, local_size, cross_rank, cross_size, place.host)

    def announce(self, worker: Worker, is_near: bool = False) -> dict[str, str]:
        """The variables that hvd.init() of its process needs beside the secret; the others expect it from now on.

        is_near: no network is between it and us.
        """
        assert self._server is not None
        worker.id = secrets.token_bytes(ID_BYTES)
        with self._service.mutex:
            self._coordinator.start(
                worker.id, worker.place.host, worker.place.local, time.monotonic(), is_near, worker.number
            )
        self._by_id[worker.id] = worker
        rendezvous = ",".join(self._server.addresses)
        own = rank_variables(self.placement(worker), rendezvous, self._job_name)
        return own | member_variables(rendezvous, worker.id, self._job.timeout_s)

    def expect_announced(self) -> None:
        """The first generation does not wait for processes that have not been announced."""
        count = sum(bool(worker.id) for worker in self.running())
        with self._service.mutex:
            self._coordinator.expect(max(count, self._job.plan.smallest), "", time.monotonic())
        self._ring()

    def lost(self) -> dict[Worker, str]:
        """Workers whose connections the others have seen end, with what is known; nobody has told of their end."""
        with self._service.mutex:
            members = [(worker, self._coordinator.members.get(worker.id)) for worker in self.running()]
            return {
                worker: one.gone for worker, one in members if one is not None and one.out_code == NO_MEMBER
            }

    def reachable(self) -> set[int]:
        """Numbers of workers that this side of a cut network can go on with."""
        with self._service.mutex:
            return {self._by_id[one.id].number for one in self._coordinator.members.values() if not one.gone}

    @property
    def stopped(self) -> Stop | None:
        """How the coordinator has ended the job; None: it has not."""
        return self._coordinator.stopped

    def ranks(self) -> list[Worker]:
        """Of the newest generation, by rank. Where none was formed, because nobody called init(): who came last to each
        slot."""
        record = self._coordinator.record
        if record is not None:
            return [self._by_id[id_] for id_ in record.members]
        newest = {worker.place.number: worker for worker in self.workers.values()}
        return [newest[number] for number in sorted(newest)]

    @property
    def has_formed(self) -> bool:
        """Whether there has been a generation."""
        return self._coordinator.record is not None

    # --- the loop

    def step(self, now: float) -> None:
        """Everything that follows from what was found, told or has become due."""
        self._look_at_hosts(now)
        with self._service.mutex:
            record, stopped = self._coordinator.record, self._coordinator.stopped
            fenced, self._coordinator.fenced = self._coordinator.fenced, []
        for id_ in fenced:
            if not self._by_id[id_].ended:
                self._backend.kill(self._by_id[id_])
        if stopped is not None and not self._backend.is_ending():  # by the coordinator itself
            self.reason = stopped.text
            self._backend.fail(now)
        if record is not None and record.number != self._generation:
            self._formed(record)
        self._judge()
        self._end_overdue(now)
        self.start_workers(now)
        self._look_whether_anybody_is_left(now)

    def next_s(self, now: float) -> float:
        """When step() has something to do that only time brings."""
        known_s = self._nobody_since + ROOM_IS_KNOWN_S if self._generation else math.inf
        return min(
            [
                self._nobody_since + self._job.timeout_s,
                known_s if known_s > now else math.inf,
                self.policy.next_s(now),
                *self._due.values(),
            ]
        )

    def is_over(self, now: float) -> bool:
        """Whether the job has ended, where no process is left."""
        if self._backend.is_ending() or self.finishing:
            return True
        if self.policy.to_start(now) and (
            now < self._nobody_since + ROOM_IS_KNOWN_S or self.policy.to_start(now, self._backend.room(now))
        ):
            return False
        if self._generation and not self._coordinator.live():
            self.reason = self.reason or "every worker has left"
            self.last = [] if self._closed_host is None else [self._closed_host]
            return True
        return False

    def _formed(self, record: Record) -> None:
        is_first, self._generation = not self._generation, record.number
        self._backend.formed(record.number, [self._by_id[id_] for id_ in record.members], is_first)

    def start_workers(self, now: float) -> None:
        """In every place that should have one."""
        if self._backend.is_ending() or self.finishing or not self.policy.to_start(now):
            return
        places = self.policy.to_start(now, self._backend.room(now))
        if places and not self._first_size:  # as many as there is room for at first
            self._first_size = max(len(places), self._job.plan.smallest)
            with self._service.mutex:
                self._coordinator.limits = self._coordinator.limits._replace(size=self._first_size)
        for place in places:
            failpoints.reach("launcher.start")
            worker = Worker(len(self.workers), place, now)
            self.workers[worker.number] = worker
            self.policy.started(worker.number, place, now)
            self._backend.start(worker)

    def _look_whether_anybody_is_left(self, now: float) -> None:
        """Nobody to wait in the coordinator, whose limit would end the job: then it is ours."""
        self._nobody_since = math.inf if self.running() else min(self._nobody_since, now)
        limit_s = self._job.timeout_s
        if now >= self._nobody_since + limit_s and not (self._backend.is_ending() or self.finishing):
            self.end(now, self.workers.values(), self._backend.no_room_text(limit_s))

    # --- hosts

    def _look_at_hosts(self, now: float) -> None:
        for found in self._host_poller.take() if self._host_poller is not None else []:
            if isinstance(found, LaunchError):
                self._say_trouble(str(found), now)
            else:
                self._take_hosts(found, now)

    def _say_trouble(self, text: str, now: float) -> None:
        if text != self._trouble[0] or now >= self._trouble[1] + REPEAT_S:
            self._trouble = (text, now)
            self._backend.say(f"{text}; the hosts stay as they were")

    def _take_hosts(self, hosts: list[Host], now: float) -> None:
        displaced = self.policy.found(self._flap_filter.take(hosts, now))
        reasons = {one.id: displaced.get(one.number, "") for one in self.running() if one.id}
        with self._service.mutex:
            was_held = self._coordinator.is_handing_over()
            self._coordinator.displace(reasons, now)
            holders = [one.leave_reason for one in self._coordinator.last_holders()]
        if holders and not was_held:
            self._backend.say(
                f"{holders[0]}, and nobody else has the state of the training: its workers go on "
                f"until others have it, for {self._job.timeout_s:g} s at most (--elastic-timeout)"
            )
        self._ring()

    def seen_as(self, host: str, kind: str, mark: str) -> None:
        """What tells the machine behind this name from another one: see Policy.seen_as."""
        if self.policy.seen_as(host, kind, mark):
            self._backend.say(
                f"host {host} is another machine now, or was booted anew: its slots are used again"
            )

    def host_goes(self, host: str, left_s: float, now: float) -> None:
        """In so many seconds: its workers leave at their next commit, or when there is no time left."""
        workers = [self.workers[number] for number in self.policy.going(host, now)]
        new = [worker for worker in workers if worker not in self._due]
        self._due |= dict.fromkeys(new, now + max(0.0, left_s - LAST_S))
        self._drain(new, f"host {host} is about to go ({left_s:g} s)", now)

    def _end_overdue(self, now: float) -> None:
        """Workers whose host is about to go, and who have come to no commit."""
        for worker in [one for one, due_s in self._due.items() if now >= due_s]:
            del self._due[worker]
            if not worker.ended:
                self._backend.say(
                    f"the worker in {self._backend.named(worker)} came to no commit in time; it is ended"
                )
                if worker.id:
                    with self._service.mutex:
                        self._coordinator.leave(worker.id, "its host is about to go", now)
                    self._ring()
                worker.dismissed = True
                self._backend.kill(worker)

    def _drain(self, workers: Sequence[Worker], reason: str, now: float) -> None:
        with self._service.mutex:
            self._coordinator.drain_all({one.id: reason for one in workers if one.id}, now)
        self._ring()

    # --- processes that end

    def exited(self, worker: Worker, code: int, text: str, now: float, is_certain: bool = True) -> None:
        """Its process has ended; text: how. is_certain: that was seen, and not only that its host was lost."""
        failpoints.reach("launcher.ended")
        worker.ended = True
        end = self._leave(worker, code, text, now, is_certain)
        name = self._backend.named(worker)
        if self._backend.is_ending() or worker.dismissed:
            self.policy.done(worker.number)
        elif code == 0 and end.why:
            self.policy.left(worker.number, now)
            self._backend.say(f"the worker in {name} has left: {end.why}")
        elif code == 0:
            worker.has_finished = True
            self.policy.done(worker.number)
            if end.has_formed and not self.finishing:  # nobody does in their place what these had still to do
                self.last += [one for one in self.ranks() if one.has_failed]
            self.finishing = True  # it has a value, and nobody is started in its place
            if end.has_formed:
                self._finish()
            else:
                self._expect_fewer(now)
        else:
            left = f"{end.left} of the job's ranks {'is' if end.left == 1 else 'are'} left"
            self._backend.say(f"the worker in {name} {text}; {left}")
            self._failed(worker, end, now)

    def withdrawn(self, worker: Worker, text: str, now: float) -> None:
        """It was not announced, and never came up, through no fault of its own: another place is tried first."""
        worker.ended = True
        self.policy.left(worker.number, now)
        self._backend.say(f"the worker in {self._backend.named(worker)} {text}; another place is tried")

    def _leave(self, worker: Worker, code: int, text: str, now: float, is_certain: bool) -> _End:
        with self._service.mutex:
            table = self._coordinator
            if not worker.id:
                return _End("", False, False, table.record is not None, len(table.live()))
            mine = table.members[worker.id]
            why = mine.planned_end() if code == 0 else ""
            has_formed = table.record is not None
            was_last = mine in table.newest() and not set(table.live()) - {mine}
            progressed: bool | None = table.has_progressed(mine.id, worker.began_s, now)
            if code == 0 and not why and has_formed:
                table.finish(now)
            table.dead(mine.id, f"it {text}", now, is_certain=is_certain)
            if not progressed and not table.is_told(mine.id):
                progressed = None
            left = len(table.live())
        self._ring()
        return _End(why, was_last, progressed, has_formed, left)

    def _finish(self) -> None:
        """A rank has done its work: the others do theirs, and who has not begun need not."""
        for worker in self.running():
            member = self._coordinator.members.get(worker.id)
            if member is None or not member.generation:
                worker.dismissed = True
                self._backend.dismiss(worker)

    def _expect_fewer(self, now: float) -> None:
        """Before the first generation: a slot will send nobody any more, so the others need not wait for it."""
        come, why = max(self.policy.usable(), self._job.plan.smallest), ""
        if self.finishing:
            come = len(self.running())
            why = "the others ended with success and had not called init()"
        with self._service.mutex:
            self._coordinator.expect(come, why, now)
        self._ring()

    def _failed(self, worker: Worker, end: _End, now: float) -> None:
        worker.has_failed = True
        closed = self.policy.failed(worker.number, end.progressed, now)
        if end.progressed is None:
            self._unjudged.append((worker, now))
        self._retire(worker, *closed, now)
        record = self._coordinator.record
        if self.finishing:
            if worker in self.ranks():  # else the others have gone on without it
                self.last.append(worker)
        elif end.was_last:
            self.end(now, [worker] if record is None else self.ranks())
        elif record is None and self.policy.all_have_failed():
            self.end(now, self.workers.values())
        else:
            self._look_whether_it_can_go_on(now)

    def _look_whether_it_can_go_on(self, now: float) -> None:
        """A slot was closed, perhaps."""
        more = self._backend.more_hosts_to_come()
        if not more:
            self._expect_fewer(now)
        if more is False and not self.policy.can_reach_smallest():
            self.end(now, self.workers.values(), "too few slots are left for --min-np")

    def _retire(self, culprit: Worker, text: str, others: list[int], now: float) -> None:
        """A slot or host is not used any more, because of this worker; it takes others with it."""
        if text:
            self._backend.say(text)
        going = [self.workers[number] for number in others]
        if going:
            self._closed_host = culprit
            self._drain(going, text, now)
        for worker in [one for one in going if not one.id]:
            worker.dismissed = True
            self._backend.dismiss(worker)

    def _judge(self) -> None:
        """Those who have failed, once the others have said at which commit they are. While the ranks train they say so
        at most once a second; those of a worker that was lost when they form the next generation."""
        waiting, self._unjudged = self._unjudged, []
        for worker, ended_s in waiting:
            with self._service.mutex:
                progressed = self._coordinator.has_progressed(worker.id, worker.began_s, ended_s)
                is_known = progressed or self._coordinator.is_told(worker.id)
            if not is_known:
                self._unjudged.append((worker, ended_s))
                continue
            self._retire(worker, *self.policy.judged(worker.number, progressed, ended_s), ended_s)
            if not (self._backend.is_ending() or self.finishing):
                self._look_whether_it_can_go_on(ended_s)

    def end(self, now: float, last: Iterable[Worker], reason: str = "") -> None:
        """The job has failed: those who are left are told, and after a while made, to end."""
        with self._service.mutex:
            stopped = self._coordinator.stopped
            self._coordinator.stop(1, reason or "the job has failed")
        self.last, self.reason = list(last), reason or ("" if stopped is None else stopped.text)
        self._ring()
        self._backend.fail(now)

    def _ring(self) -> None:
        if self._server is not None:
            self._server.wake()
