"""An elastic job: a worker that ends is taken out of the roster, the others go on, and its slot gets a new one.

The loop is that of job.py. Who is in is the roster's matter (bootstrap/roster.py), who should be in that of
elastic_policy.py; here processes are started and ended, and each tells the other.
"""

from __future__ import annotations

import argparse
import math
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from horoclone.bootstrap import roster
from horoclone.bootstrap.desk import Desk
from horoclone.bootstrap.rendezvous import Server
from horoclone.launch import ending, report
from horoclone.launch.discovery import File, Fixed, Lookout, Script, Settled, Source
from horoclone.launch.elastic_policy import Cooldown, Place, Plan, Policy
from horoclone.launch.environment import rank_variables, thread_variables
from horoclone.launch.hosts import (
    Host,
    Placement,
    automatic_size,
    is_local,
    parse_hostfile,
    parse_hosts,
    usable_cores,
)
from horoclone.launch.job import Job, JobRequest, JobResult, Member
from horoclone.launch.link import REFUSED, HostLink
from horoclone.launch.process import LocalRanks
from horoclone.launch.usage import LaunchError, say

PROGRESS_S = 10.0  # a worker that was in the job for so long has not failed at once
REPEAT_S = 30.0  # between two lines about the same trouble with the discovery of hosts
MOST_RANKS = 1 << 15
HOROVODS_FAILURE = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
    "The first process to do so was:\nProcess name: {}\nExit code: {}\n"
)


class Elastic(NamedTuple):
    """What --min-np and its companions say. size: of the first generation."""

    source: Source
    size: int
    plan: Plan
    cooldown: Cooldown
    timeout_s: float = 600.0
    resets: int | None = None


class ElasticJob(Job):
    """Use once: ElasticJob(request, elastic).run(). The placements of the request are not read."""

    def __init__(self, request: JobRequest, elastic: Elastic) -> None:
        super().__init__(request)
        self._elastic = elastic
        self._policy = Policy(elastic.plan, elastic.cooldown)
        limits = roster.Limits(
            elastic.size, elastic.plan.smallest, elastic.plan.largest, elastic.timeout_s, elastic.resets
        )
        self._desk = Desk(limits, secrets.token_bytes)
        self._desk.tell = self._wake
        self._settled = Settled()
        self._bell, self._rope = socket.socketpair()
        self._rope.setblocking(False)
        self._bell.setblocking(False)
        self._lookout: Lookout | None = None
        self._places: dict[int, Place] = {}
        self._ids: dict[int, bytes] = {}
        self._born_s: dict[int, float] = {}
        self._commits: dict[int, int] = {}  # the newest when the worker was started
        self._dismissed: set[int] = set()  # workers that are not needed any more
        self._used: set[int] = set()  # numbers of slots that have had a worker
        self._trouble = ("", -math.inf)
        self._reason = ""  # why the job ends, where its last workers do not say it
        self._last: list[int] = []  # workers whose end is the end of the job
        self._closed_host: int | None = None  # the worker whose failure made those beside it leave
        self._finishing = False
        self._job = secrets.token_hex(8)
        self._secret = secrets.token_bytes(32)
        self._generation = 0
        self._nobody_since = math.inf  # since when no worker runs

    # --- start

    def _start(self) -> None:
        hosts = self._settled.take(self._elastic.source.find(), time.monotonic())
        self._policy.found(hosts)
        all_local = not self._elastic.source.changes and all(is_local(host.name) for host in hosts)
        self._server = self._open_server(self._secret, self._job, all_local)
        self._owner = LocalRanks(self._secret, self._request.function, self._request.ssh.bind_to_us)
        self._selector.register(self._bell, 1, self._hear)
        if self._elastic.source.changes:
            self._lookout = Lookout(self._elastic.source, self._wake)
            self._lookout.start()
        self._start_workers(time.monotonic())

    def _serve(self, secret: bytes, job: str, addresses: list[str]) -> Server:
        return Server(secret, job, MOST_RANKS, addresses, self._desk)

    def _start_workers(self, now: float) -> None:
        if self._ending.begun or self._finishing:
            return
        for place in self._policy.to_start(now):
            self._start_worker(place, now)

    def _start_worker(self, place: Place, now: float) -> None:
        assert self._server is not None and self._owner is not None
        id_ = secrets.token_bytes(roster.ID_BYTES)
        with self._desk.mutex:
            key = self._desk.roster.start(id_, place.host, place.local, now)
            self._commits[key] = self._desk.roster.newest_commit
        local_size, cross_rank, cross_size = self._policy.sharing(place)
        placement = Placement(
            place.number,
            max(self._elastic.size, place.number + 1),
            place.local,
            local_size,
            cross_rank,
            cross_size,
            place.host,
        )
        self._members[key] = self._member(placement, key, again=place.number in self._used)
        self._places[key], self._ids[key], self._born_s[key] = place, id_, now
        self._used.add(place.number)
        self._policy.started(key, place)
        own = rank_variables(placement, ",".join(self._server.addresses), self._job)
        own |= {
            "HOROCLONE_MEMBER": id_.hex(),
            "HOROCLONE_ELASTIC": "1",
            "HOROVOD_ELASTIC": "1",
            "HOROCLONE_ELASTIC_TIMEOUT": f"{self._elastic.timeout_s:g}",
            "HOROVOD_ELASTIC_TIMEOUT": f"{self._elastic.timeout_s:g}",
        }
        if is_local(place.host):
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

    def _say_trouble(self, text: str) -> None:
        now = time.monotonic()
        if text != self._trouble[0] or now >= self._trouble[1] + REPEAT_S:
            self._trouble = (text, now)
            say(f"{text}; the hosts stay as they were")

    def _take_hosts(self, hosts: list[Host], now: float) -> None:
        for worker, reason in self._policy.found(self._settled.take(hosts, now)).items():
            self._unwant(worker, reason, now)

    def _unwant(self, worker: int, reason: str, now: float) -> None:
        with self._desk.mutex:
            self._desk.roster.unwant(self._ids[worker], reason, now)
        self._ring()

    def _ring(self) -> None:
        if self._server is not None:
            self._server.ring()

    def _after_exit(self, member: Member, now: float) -> None:
        key, code = member.key, member.code or 0
        text = report.end_of_process(code)
        with self._desk.mutex:
            roster_ = self._desk.roster
            mine = roster_.members[self._ids[key]]
            is_planned = code == 0 and bool(
                mine.leaving or mine.unwanted or (mine.waits_after == 0 and not mine.generation)
            )
            was_last = mine in roster_.live() and len(roster_.live()) == 1
            progressed = mine.generation > 0 and (
                now - self._born_s[key] >= PROGRESS_S or roster_.newest_commit > self._commits[key]
            )
            if code == 0 and not is_planned:
                roster_.finish(now)
            roster_.dead(mine.id, f"it {text}", now)
            left = len(roster_.live())
        self._ring()
        if self._ending.begun or key in self._dismissed:
            self._policy.done(key)
        elif is_planned:
            self._policy.left(key, now)
            say(f"the worker in slot {self._where(member)} has left: {mine.leaving or mine.unwanted}")
        elif code == 0:
            self._policy.done(key)
            self._finish()
        else:
            self._failed(member, progressed, was_last, left, now)

    def _finish(self) -> None:
        """A rank has done its work: the others do theirs, and who has not begun need not."""
        self._finishing = True
        for key, member in self._members.items():
            if member.code is None and not self._desk.roster.members[self._ids[key]].generation:
                self._dismissed.add(key)
                member.signal(signal.SIGTERM, False)

    def _where(self, member: Member) -> str:
        where = f"{member.placement.rank} ({member.placement.host}"
        return where + (f", pid {member.pid})" if member.pid else ")")

    def _failed(self, member: Member, progressed: bool, was_last: bool, left: int, now: float) -> None:
        text = report.end_of_process(member.code or 0)
        closed, others = self._policy.failed(member.key, progressed, now)
        say(f"the worker in slot {self._where(member)} {text}; {left} of the job's ranks are left")
        if closed:
            say(closed)
        for worker in others:
            self._unwant(worker, closed, now)
            self._closed_host = member.key
        if self._finishing:
            self._last.append(member.key)
        elif was_last:
            record = self._desk.roster.record
            self._end(now, record.indexes if record is not None else [member.key])
        elif self._desk.roster.record is None and self._policy.all_have_failed():
            self._end(now, list(self._members))
        elif not self._elastic.source.changes and not self._policy.can_reach_smallest():
            self._end(now, list(self._members), "too few slots are left for --min-np")

    def _end(self, now: float, last: Sequence[int], reason: str = "") -> None:
        """The job has failed: those who are left are told, and after a while made, to end."""
        self._last, self._reason = list(last), reason
        with self._desk.mutex:
            self._desk.roster.stop(1, reason or "the job has failed")
        self._ring()
        self._ending.fail(now)

    def _on_signal(self, number: int, now: float) -> None:
        super()._on_signal(number, now)
        if self._ending.begun:
            with self._desk.mutex:
                self._desk.roster.stop(128 + number, "the launcher was told to end the job")
            self._ring()

    def host_lost(self, link: HostLink, why: LaunchError, stage: str) -> None:
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
        with self._desk.mutex:
            record, stopped = self._desk.roster.record, self._desk.roster.stopped
            given_up, self._desk.roster.given_up = self._desk.roster.given_up, []
        for key in [key for key, id_ in self._ids.items() if id_ in given_up] if given_up else ():
            self._members[key].signal(signal.SIGKILL, True)
        if stopped is not None and not self._ending.begun:  # by the roster itself
            self._reason = stopped.text
            self._ending.fail(now)
        if record is not None and record.number != self._generation:
            self._formed(record)
        self._let_go()
        self._start_workers(now)
        self._look_whether_anybody_is_left(now)

    def _look_whether_anybody_is_left(self, now: float) -> None:
        """Nobody to wait in the roster, whose limit would end the job: then it is ours."""
        if not all(member.done for member in self._members.values()):
            self._nobody_since = math.inf
        else:
            self._nobody_since = min(self._nobody_since, now)
        limit_s = self._elastic.timeout_s
        if now >= self._nobody_since + limit_s and not (self._ending.begun or self._finishing):
            text = f"no host had a free slot for {limit_s:g} s; --elastic-timeout (seconds) waits longer"
            self._end(now, list(self._members), text)

    def _formed(self, record: roster.Record) -> None:
        before, self._generation = self._generation, record.number
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
        if self._generation and not self._desk.roster.live():
            self._reason = self._reason or "every worker has left"
            self._last = [] if self._closed_host is None else [self._closed_host]
            return True
        return False

    def _timeout_s(self) -> float:
        now = time.monotonic()
        limit_s = self._nobody_since + self._elastic.timeout_s
        return max(0.0, min(super()._timeout_s(), self._policy.next_s(now) - now, limit_s - now))

    def _close(self) -> None:
        if self._lookout is not None:
            self._lookout.close()
        super()._close()
        self._bell.close()
        self._rope.close()

    # --- the end

    def _result(self) -> JobResult:
        result = super()._result()
        if self._ending.exit_code is not None:  # a signal ended it
            return result
        record = self._desk.roster.record
        order = record.indexes[: self._elastic.plan.smallest] if record is not None else ()
        results = {rank: self._members[key].result for rank, key in enumerate(order)}
        ends = dict(zip(self._members, result.ends, strict=True))
        failed = [ends[key] for key in self._last if ends[key].code != 0 and not ends[key].by_us]
        if failed:
            text, code = report.failure_report(failed, self._request.output_folder)
            first = report.culprit(failed)
            assert first is not None
            slot = next(self._places[key].local for key, end in ends.items() if end is first)
            name = f"{first.host}[{slot}]"
            text += "\n" + HOROVODS_FAILURE.format(name, first.code).rstrip()
            if self._reason:
                text = f"{self._reason}\n{text}"
            return JobResult(code, text, result.ends, results)
        if self._ending.reason == ending.FAILURE or self._reason:
            left = self._ending.reason != ending.FAILURE
            return JobResult(roster.NO_MEMBER if left else 1, self._reason, result.ends, results)
        return JobResult(0, None, result.ends, results)


def elastic_of(arguments: argparse.Namespace, program: str) -> Elastic | None:
    """What the flags ask for; None: a job that is not elastic. LaunchError when they do not fit together."""
    script = arguments.host_discovery_script
    if not (arguments.min_np or arguments.max_np or script):
        for flag in (
            "slots_per_host",
            "elastic_timeout",
            "reset_limit",
            "blacklist_cooldown_range",
            "spares",
        ):
            if getattr(arguments, flag):
                raise LaunchError(
                    f"--{flag.replace('_', '-')} is for elastic jobs; --min-np N makes the job elastic"
                )
        return None
    source, slots = _source_of(arguments)
    size = slots if arguments.num_proc == "auto" else arguments.num_proc or arguments.min_np
    if not size:
        raise LaunchError("how many ranks at first? -np N, or -np auto where the hosts are given")
    smallest, largest = arguments.min_np or size, arguments.max_np
    if smallest > size or (largest is not None and largest < size):
        raise LaunchError(f"--min-np {smallest} <= -np {size} <= --max-np {largest or 'N'} does not hold")
    if isinstance(source, Fixed) and slots < smallest:
        raise LaunchError(f"--min-np {smallest} needs {smallest} slots, but the hosts have {slots}")
    bounds = arguments.blacklist_cooldown_range
    try:
        cooldown = Cooldown((bounds[0], bounds[1]) if bounds else None)
    except ValueError as error:
        raise LaunchError(f"--blacklist-cooldown-range: {error}") from None
    timeout_s = 600.0 if arguments.elastic_timeout is None else arguments.elastic_timeout
    plan = Plan(smallest, largest, arguments.spares or 0, program == "horovodrun")
    return Elastic(source, size, plan, cooldown, timeout_s, arguments.reset_limit)


def _source_of(arguments: argparse.Namespace) -> tuple[Source, int]:
    """Where hosts come from, and the slots that are known before anybody has looked."""
    if sum(map(bool, (arguments.host_discovery_script, arguments.hosts, arguments.hostfile))) > 1:
        raise LaunchError("-H, --hostfile and --host-discovery-script all name the hosts; give one of them")
    if arguments.host_discovery_script:
        return Script(arguments.host_discovery_script, arguments.slots_per_host), 0
    if arguments.hostfile:
        return File(arguments.hostfile), sum(host.slots for host in parse_hostfile(arguments.hostfile))
    if arguments.hosts:
        hosts = parse_hosts(arguments.hosts)
    else:
        size = arguments.num_proc if isinstance(arguments.num_proc, int) else automatic_size(None)
        hosts = [Host("localhost", max(size, arguments.max_np or 0) + (arguments.spares or 0))]
    return Fixed(hosts), sum(host.slots for host in hosts)
