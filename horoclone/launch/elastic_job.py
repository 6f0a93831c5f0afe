"""An elastic job: where a worker ends the others go on, and its slot gets a new worker.

The loop is that of job.py. The membership coordinator (membership/coordinator.py) decides who is in, elastic_policy.py
who should be; this module starts and ends processes and keeps the two informed.
"""

from __future__ import annotations

import math
import secrets
import signal
import socket
import time
from collections.abc import Sequence

from horoclone import failpoints
from horoclone.bootstrap.rendezvous import Server
from horoclone.launch import ending, report
from horoclone.launch.discovery import Lookout, Settled
from horoclone.launch.elastic_options import Elastic, needs_majority
from horoclone.launch.elastic_policy import Place, Policy
from horoclone.launch.environment import member_variables, rank_variables, thread_variables
from horoclone.launch.hosts import Host, Placement, usable_cores
from horoclone.launch.incarnation import MACHINE, Incarnations
from horoclone.launch.job import Job, JobRequest, JobResult, Member
from horoclone.launch.link import REFUSED, Link
from horoclone.launch.notice_script import NoticeScript
from horoclone.launch.process import LocalRanks
from horoclone.launch.usage import LaunchError, say
from horoclone.membership import snapshot
from horoclone.membership.coordinator import ID_BYTES, NO_MEMBER, Limits, Record
from horoclone.membership.service import MembershipService
from horoclone.settings import seconds

LAST_S = 2.0  # a host that goes is not used to the last moment
REPEAT_S = 30.0  # between two lines about the same trouble with the discovery of hosts
MOST_RANKS = 1 << 15


class ElasticJob(Job):
    """Use once: ElasticJob(request, elastic).run(). The placements of the request are not read."""

    def __init__(self, request: JobRequest, elastic: Elastic) -> None:
        super().__init__(request)
        self._elastic = elastic
        self._policy = Policy(elastic.plan, elastic.cooldown)
        largest, self._outlives = elastic.plan.largest, elastic.outlives
        if elastic.outlives:
            largest = min(largest or snapshot.MAX_MEMBERS, snapshot.MAX_MEMBERS)
        limits = Limits(elastic.size, elastic.plan.smallest, largest, elastic.timeout_s, elastic.resets)
        self._service = MembershipService(limits, secrets.token_bytes)
        self._service.coordinator.whole_hosts = elastic.plan.whole_host
        self._service.tell = self._wake
        self._settled = Settled() if request.reach is None else Settled(0.0)  # what is lost, is so for sure
        self._bell, self._rope = socket.socketpair()
        self._rope.setblocking(False)
        self._bell.setblocking(False)
        self._lookout: Lookout | None = None
        self._places: dict[int, Place] = {}
        self._ids: dict[int, bytes] = {}
        self._born_s: dict[int, float] = {}
        self._unjudged: list[tuple[int, float]] = []  # workers that have failed, and when
        self._dismissed: set[int] = set()  # workers that are not needed any more
        self._used: set[int] = set()  # numbers of slots that have had a worker
        self._trouble = ("", -math.inf)
        self._reason = ""  # why the job ends, where its last workers do not say it
        self._last: list[int] = []  # workers whose end is the end of the job
        self._closed_host: int | None = None  # the worker whose failure made those beside it leave
        self._finishing = False
        self._is_minority = False  # of a cut network
        self._job = secrets.token_hex(8)
        self._generation = 0
        self._nobody_since = math.inf  # since when no worker runs
        self._notices: NoticeScript | None = None
        self._incarnations = Incarnations(request.ssh, self._wake)
        self._due: dict[int, float] = {}  # workers of hosts that are about to go: when they are ended

    # --- start

    def _start(self) -> None:
        hosts = self._settled.take(self._elastic.source.find(), time.monotonic())
        self._policy.found(hosts)
        largest = self._elastic.plan.largest
        slots = sum(host.slots for host in hosts)
        self._first_size = max(self._elastic.size, slots if largest is None else min(largest, slots))
        all_local = not self._elastic.source.changes and all(self._is_here(host.name) for host in hosts)
        self._server = self._open_server(self._secret, self._job, all_local)
        if self._outlives:
            majority = needs_majority(
                self._request.environment.get("HOROCLONE_ELASTIC_QUORUM", ""), all_local
            )
            with self._service.mutex:
                self._service.snapshot = snapshot.packed
                self._service.coordinator.limits = self._service.coordinator.limits._replace(
                    majority=majority
                )
        self._owner = LocalRanks(
            self._secret, self._request.function, self._request.ssh.bind_to_us, self._outlives
        )
        self._selector.register(self._bell, 1, self._hear)
        if self._elastic.source.changes:
            self._lookout = Lookout(self._elastic.source, self._wake)
            self._lookout.start()
        command, ssh = self._elastic.notice_script, self._request.ssh
        if command is not None:
            self._notices = NoticeScript(command, self._host_goes, self._selector, ssh, self._owner.reaper)
        self._start_workers(time.monotonic())

    def _serve(self, secret: bytes, job: str, addresses: list[str]) -> Server:
        return Server(secret, job, MOST_RANKS, addresses, self._service)

    def _start_workers(self, now: float) -> None:
        if self._ending.begun or self._finishing:
            return
        reach = self._request.reach
        for place in self._policy.to_start(now):
            if reach is None or reach.is_ready(place.host):
                self._start_worker(place, now)

    def _start_worker(self, place: Place, now: float) -> None:
        assert self._server is not None and self._owner is not None
        failpoints.reach("launcher.start")
        id_ = secrets.token_bytes(ID_BYTES)
        with self._service.mutex:
            key = self._service.coordinator.start(
                id_, place.host, place.local, now, self._is_here(place.host)
            )
        local_size, cross_rank, cross_size = self._policy.sharing(place)
        placement = Placement(
            place.number,
            max(self._first_size, place.number + 1),
            place.local,
            local_size,
            cross_rank,
            cross_size,
            place.host,
        )
        self._members[key] = self._member(placement, key, again=place.number in self._used)
        self._places[key], self._ids[key], self._born_s[key] = place, id_, now
        self._used.add(place.number)
        self._policy.started(key, place, now)
        rendezvous = ",".join(self._server.addresses)
        own = rank_variables(placement, rendezvous, self._job)
        own |= member_variables(rendezvous, id_, self._elastic.timeout_s)
        if self._elastic.plan.spares:
            interval = self._request.environment.get("HOROCLONE_REPLICA_INTERVAL") or "0"
            own["HOROCLONE_REPLICA_INTERVAL"] = interval
        if self._elastic.notice_signal:
            own["HOROCLONE_NOTICE_SIGNAL"] = self._elastic.notice_signal
        if self._outlives:
            own["HOROCLONE_SURVIVE_LAUNCHER"] = "1"
        if self._is_here(place.host):
            request = self._request
            threads = thread_variables(request.environment, request.threads, local_size, usable_cores())
            self._start_local(key, {**request.environment, **threads, **own})
        else:
            self._open_link(place.host, {key: own}, self._secret, local_size)

    # --- what happens

    def _wake(self) -> None:
        try:
            self._rope.send(b"x")
        except OSError:
            pass

    def _hear(self) -> None:
        try:
            self._bell.recv(4096)
        except BlockingIOError:
            pass
        for found in self._lookout.take() if self._lookout is not None else []:
            if isinstance(found, LaunchError):
                self._say_trouble(str(found))
            else:
                self._take_hosts(found, time.monotonic())

        for mark in self._incarnations.take():
            self._seen_as(*mark)

    def _seen_as(self, host: str, kind: str, mark: str) -> None:
        if self._policy.seen_as(host, kind, mark):
            say(f"host {host} is another machine now, or was booted anew: its slots are used again")

    def started(self, rank: int, pid: int) -> None:
        super().started(rank, pid)
        link = self._members[rank].link
        if link is not None and link.machine:
            self._seen_as(link.host, MACHINE, link.machine)

    def _say_trouble(self, text: str) -> None:
        now = time.monotonic()
        if text != self._trouble[0] or now >= self._trouble[1] + REPEAT_S:
            self._trouble = (text, now)
            say(f"{text}; the hosts stay as they were")

    def _take_hosts(self, hosts: list[Host], now: float) -> None:
        displaced = self._policy.found(self._settled.take(hosts, now))
        workers = [key for key, member in self._members.items() if member.code is None]
        with self._service.mutex:
            coordinator = self._service.coordinator
            was_held = coordinator.is_handing_over()
            coordinator.displace({self._ids[key]: displaced.get(key, "") for key in workers}, now)
            is_held = coordinator.is_handing_over()
        if is_held and not was_held:
            say(
                f"{next(iter(displaced.values()))}, and nobody else has the state of the training: its workers go on "
                f"until others have it, for {self._elastic.timeout_s:g} s at most (--elastic-timeout)"
            )
        self._ring()

    def _host_goes(self, host: str, left_s: float | None) -> None:
        """Its notice script says so: its workers leave at their next commit, or when there is no time left."""
        now = time.monotonic()
        left_s = seconds(self._request.environment, "NOTICE", 30.0) if left_s is None else left_s
        new = [worker for worker in self._policy.going(host, now) if worker not in self._due]
        self._due |= dict.fromkeys(new, now + max(0.0, left_s - LAST_S))
        self._drain(new, f"host {host} is about to go ({left_s:g} s)", now)

    def _end_overdue(self, now: float) -> None:
        """Workers whose host is about to go, and who have come to no commit."""
        for worker in [one for one, due_s in self._due.items() if now >= due_s]:
            del self._due[worker]
            if self._members[worker].code is None:
                say(
                    f"the worker in slot {self._where(self._members[worker])} came to no commit in time; it is ended"
                )
                with self._service.mutex:
                    self._service.coordinator.leave(self._ids[worker], "its host is about to go", now)
                self._ring()
                self._dismissed.add(worker)
                self._members[worker].signal(signal.SIGKILL, True)

    def _drain(self, workers: Sequence[int], reason: str, now: float) -> None:
        with self._service.mutex:
            self._service.coordinator.drain_all({self._ids[one]: reason for one in workers}, now)
        self._ring()

    def _ring(self) -> None:
        if self._server is not None:
            self._server.ring()

    def _after_exit(self, member: Member, now: float) -> None:
        failpoints.reach("launcher.ended")
        key, code = member.key, member.code or 0
        text = report.end_of_process(code)
        with self._service.mutex:
            coordinator = self._service.coordinator
            mine = coordinator.members[self._ids[key]]
            is_planned = code == 0 and bool(
                mine.leaving or mine.unwanted or (mine.waits_after == 0 and not mine.generation)
            )
            was_last = mine in coordinator.live() and len(coordinator.live()) == 1
            progressed: bool | None = coordinator.has_progressed(mine.id, self._born_s[key], now)
            alone = code == 0 and not is_planned and coordinator.record is None
            if code == 0 and not (is_planned or alone):
                coordinator.finish(now)
            coordinator.dead(
                mine.id, f"it {text}", now, is_certain=not member.note
            )  # a note: its host was lost
            left = len(coordinator.live())
            if not progressed and not coordinator.is_told(mine.id):
                progressed = None
        self._ring()
        if self._ending.begun or key in self._dismissed:
            self._policy.done(key)
        elif is_planned:
            self._policy.left(key, now)
            say(f"the worker in slot {self._where(member)} has left: {mine.leaving or mine.unwanted}")
        elif alone:
            self._policy.done(key)
            self._finishing = True  # it has a value, and nobody is started in its place
            self._expect_fewer(now)
        elif code == 0:
            self._policy.done(key)
            self._finish()
        else:
            self._failed(member, progressed, was_last, left, now)

    def _finish(self) -> None:
        """A rank has done its work: the others do theirs, and who has not begun need not."""
        self._finishing = True
        for key, member in self._members.items():
            if member.code is None and not self._service.coordinator.members[self._ids[key]].generation:
                self._dismissed.add(key)
                member.signal(signal.SIGTERM, False)

    def _expect_fewer(self, now: float) -> None:
        """Before the first generation: a slot will send nobody any more, so the others need not wait for it."""
        come, why = max(self._policy.usable(), self._elastic.plan.smallest), ""
        if self._finishing:
            come = sum(member.code is None for member in self._members.values())
            why = "the others ended with success and had not called init()"
        with self._service.mutex:
            self._service.coordinator.expect(come, why, now)
        self._ring()

    def _where(self, member: Member) -> str:
        where = f"{member.placement.rank} ({member.placement.host}"
        return where + (f", pid {member.pid})" if member.pid else ")")

    def _failed(self, member: Member, progressed: bool | None, was_last: bool, left: int, now: float) -> None:
        text = report.end_of_process(member.code or 0)
        closed = self._policy.failed(member.key, progressed, now)
        if progressed is None:
            self._unjudged.append((member.key, now))
        say(f"the worker in slot {self._where(member)} {text}; {left} of the job's ranks are left")
        self._retire(member.key, *closed, now)
        if self._finishing:
            self._last.append(member.key)
        elif was_last:
            record = self._service.coordinator.record
            self._end(now, record.indexes if record is not None else [member.key])
        elif self._service.coordinator.record is None and self._policy.all_have_failed():
            self._end(now, list(self._members))
        else:
            self._look_whether_it_can_go_on(member.key, now)

    def _look_whether_it_can_go_on(self, culprit: int, now: float) -> None:
        """A slot was closed, perhaps, because of this worker."""
        self._expect_fewer(now)
        if not self._elastic.source.changes and not self._policy.can_reach_smallest():
            self._end(now, list(self._members), "too few slots are left for --min-np")

    def _retire(self, culprit: int, text: str, others: list[int], now: float) -> None:
        """A slot or host is not used any more, because of this worker; it takes others with it."""
        if text:
            say(text)
        if others:
            self._drain(others, text, now)
            self._closed_host = culprit

    def _judge(self) -> None:
        """Those who have failed, once the others have said at which commit they are."""
        waiting, self._unjudged = self._unjudged, []
        for key, ended_s in waiting:
            with self._service.mutex:
                coordinator, id_ = self._service.coordinator, self._ids[key]
                is_told = coordinator.is_told(id_)
                progressed = coordinator.has_progressed(id_, self._born_s[key], ended_s)
            if not is_told:
                self._unjudged.append((key, ended_s))
            else:
                self._retire(key, *self._policy.judged(key, progressed, ended_s), ended_s)
                if not (self._ending.begun or self._finishing):
                    self._look_whether_it_can_go_on(key, ended_s)

    def _end(self, now: float, last: Sequence[int], reason: str = "") -> None:
        """The job has failed: those who are left are told, and after a while made, to end."""
        with self._service.mutex:
            stopped = self._service.coordinator.stopped
            self._service.coordinator.stop(1, reason or "the job has failed")
        self._last, self._reason = list(last), reason or ("" if stopped is None else stopped.text)
        self._ring()
        self._ending.fail(now)

    def _on_signal(self, number: int, now: float) -> None:
        super()._on_signal(number, now)
        if self._ending.begun:
            with self._service.mutex:
                self._service.coordinator.stop(128 + number, "the launcher was told to end the job")
            self._ring()

    def host_lost(self, link: Link, why: LaunchError, stage: str) -> None:
        if stage == REFUSED:  # one host of several: its slot has a strike, and the job waits for others
            say(str(why))
            for key in link.ranks:
                member = self._members[key]
                member.note = str(why)
                self.exited(key, 255, 0)
                self.gone(key)
                for stream in list(member.open_streams):
                    self.output(key, stream, b"")
            return
        super().host_lost(link, why, stage)

    # --- the loop

    def _turn(self) -> None:
        super()._turn()
        now = time.monotonic()
        with self._service.mutex:
            record, stopped = self._service.coordinator.record, self._service.coordinator.stopped
            fenced, self._service.coordinator.fenced = self._service.coordinator.fenced, []
        for key in [key for key, id_ in self._ids.items() if id_ in fenced] if fenced else ():
            self._members[key].signal(signal.SIGKILL, True)
        if stopped is not None and not self._ending.begun:  # by the membership coordinator itself
            self._reason = stopped.text
            self._ending.fail(now)
        if stopped is not None and stopped.code == NO_MEMBER and not self._is_minority:
            self._is_minority, self._reason = True, stopped.text
            self._leave_the_others_alone()
        if record is not None and record.number != self._generation:
            self._formed(record)
        if self._unjudged:
            self._judge()
        self._let_go()
        if self._notices is not None:
            self._notices.watch([] if self._ending.begun else self._policy.hosts(), now)
        self._end_overdue(now)
        if self._request.reach is None:
            self._incarnations.watch(self._policy.hosts(), self._policy.closed_hosts(now))
        self._start_workers(now)
        self._look_whether_anybody_is_left(now)

    def _leave_the_others_alone(self) -> None:
        """The others may be the job: what is told to their hosts once the network is whole again must not end them."""
        with self._service.mutex:
            here = {one.index for one in self._service.coordinator.members.values() if not one.gone}
        for link in self._links:
            if not link.over and not link.ranks & here:
                link.abandon("is on the other side of a cut network")

    def _look_whether_anybody_is_left(self, now: float) -> None:
        """Nobody to wait in the membership coordinator, whose limit would end the job: then it is ours."""
        if not all(member.done for member in self._members.values()):
            self._nobody_since = math.inf
        else:
            self._nobody_since = min(self._nobody_since, now)
        limit_s = self._elastic.timeout_s
        if now >= self._nobody_since + limit_s and not (self._ending.begun or self._finishing):
            text = f"no host had a free slot for {limit_s:g} s; --elastic-timeout (seconds) waits longer"
            self._end(now, list(self._members), text)

    def _formed(self, record: Record) -> None:
        before, self._generation = self._generation, record.number
        self._pages.formed(record.number, len(record.members))
        if self._request.verbose or before:
            slots = ",".join(str(self._places[key].number) for key in record.indexes)
            say(f"generation {record.number}: {len(record.members)} ranks, in slots {slots}")

    def _let_go(self) -> None:
        """Of what has ended: its descriptors, and the places where it is looked at in every turn."""
        for member in self._members.values():
            if member.done and member.local is not None and self._owner is not None:
                self._owner.forget(member.local)
                member.local = None
        for link in [one for one in self._links if one.over]:
            link.close()
            self._links.remove(link)

    def _is_over(self) -> bool:
        if not super()._is_over():
            return False
        if self._ending.begun or self._finishing:
            return True
        now = time.monotonic()
        if self._policy.to_start(now):
            return False
        if self._generation and not self._service.coordinator.live():
            self._reason = self._reason or "every worker has left"
            self._last = [] if self._closed_host is None else [self._closed_host]
            return True
        return False

    def _timeout_s(self) -> float:
        now = time.monotonic()
        limit_s = self._nobody_since + self._elastic.timeout_s
        notices_s = math.inf if self._notices is None else self._notices.next_s()
        due_s = min([limit_s, notices_s, self._policy.next_s(now), *self._due.values()])
        return max(0.0, min(super()._timeout_s(), due_s - now))

    def _close(self) -> None:
        if self._lookout is not None:
            self._lookout.close()
        self._incarnations.close()
        if self._notices is not None:
            self._notices.close()
        super()._close()
        self._bell.close()
        self._rope.close()

    # --- the end

    def _result(self) -> JobResult:
        result = super()._result()
        if self._ending.exit_code is not None:  # a signal ended it
            return result
        stopped, record = self._service.coordinator.stopped, self._service.coordinator.record
        order = self._newest_of_slots() if record is None else record.indexes
        order = order[: self._elastic.plan.smallest]
        results = {rank: self._members[key].result for rank, key in enumerate(order)}
        ends = dict(zip(self._members, result.ends, strict=True))
        last = order if record is None and self._finishing else self._last
        failed = [ends[key] for key in last if ends[key].code != 0 and not ends[key].by_us]
        if failed:
            slots = {id(end): self._places[key].local for key, end in ends.items()}
            text, code = report.elastic_failure(
                failed, self._request.output_folder, lambda end: slots[id(end)], self._reason
            )
            return JobResult(code, text, result.ends, results)
        if self._ending.reason == ending.FAILURE or self._reason:
            code = NO_MEMBER if stopped is None else stopped.code
            return JobResult(code, self._reason, result.ends, results)
        return JobResult(0, None, result.ends, results)

    def _newest_of_slots(self) -> list[int]:
        """Where no generation was formed, because nobody called init(): who came last to each slot."""
        newest = {self._places[key].number: key for key in self._members}
        return [newest[number] for number in sorted(newest)]
