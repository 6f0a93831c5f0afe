"""The processes of an elastic job on this host, over ssh, or where a scheduler has put us: starts and ends them.

The loop is that of job.py; what has to run and what follows from an end is the supervisor's matter (supervisor.py).
"""

from __future__ import annotations

import math
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from horoclone.bootstrap.rendezvous import Server
from horoclone.launch import report, termination
from horoclone.launch.discovery import FlapFilter
from horoclone.launch.elastic_options import Elastic, needs_majority
from horoclone.launch.environment import thread_variables
from horoclone.launch.host_identity import MACHINE, HostIdentities
from horoclone.launch.hosts import usable_cores
from horoclone.launch.job import Job, JobRequest, JobResult, Member
from horoclone.launch.link import REFUSED, Link
from horoclone.launch.notice_script import NoticeScript
from horoclone.launch.process import LocalRanks
from horoclone.launch.supervisor import Supervisor, Worker
from horoclone.launch.usage import LaunchError, counted, say
from horoclone.membership.states import NO_MEMBER
from horoclone.settings import seconds


class ElasticJob(Job):
    """Use once: ElasticJob(request, elastic).run(). The placements of the request are not read."""

    def __init__(self, request: JobRequest, elastic: Elastic) -> None:
        super().__init__(request)
        self._elastic, self._outlives = elastic, elastic.outlives
        # What a scheduler has lost, is so for sure.
        flap_filter = None if request.transport is None else FlapFilter(0.0)
        self._supervisor = Supervisor(elastic, self, self._wake, flap_filter)
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._wakeup_sender.setblocking(False)
        self._wakeup.setblocking(False)
        self._has_majority_rule = False
        self._is_minority = False  # of a cut network
        self._notices: NoticeScript | None = None
        self._host_identities = HostIdentities(request.ssh, self._wake)
        request.screen.number_in_errors = self._number_in_errors

    def _start(self) -> None:
        hosts = self._supervisor.find_hosts()
        all_local = not self._elastic.source.changes and all(self._is_here(host.name) for host in hosts)
        if self._outlives:
            quorum = self._request.environment.get("HOROCLONE_ELASTIC_QUORUM", "")
            self._has_majority_rule = needs_majority(quorum, all_local)
        self._server = self._open_server(self._secret, secrets.token_hex(8), all_local)
        self._owner = LocalRanks(
            self._secret, self._request.function, self._request.ssh.bind_to_us, self._outlives
        )
        self._selector.register(self._wakeup, 1, self._hear)
        self._supervisor.watch_hosts()
        command, ssh = self._elastic.notice_script, self._request.ssh
        if command is not None:
            self._notices = NoticeScript(command, self._host_goes, self._selector, ssh, self._owner.reaper)
        self._supervisor.start_workers(time.monotonic())

    def _serve(self, secret: bytes, job: str, addresses: list[str]) -> Server:
        return self._supervisor.serve(secret, job, addresses, self._has_majority_rule)

    # --- the supervisor calls these (supervisor.py, ProcessBackend)

    def start(self, worker: Worker) -> None:
        assert self._owner is not None
        request, host = self._request, worker.place.host
        place = self._supervisor.placement(worker)
        again = any(
            one.place == worker.place for one in self._supervisor.workers.values() if one is not worker
        )
        self._members[worker.number] = self._member(place, worker.number, again)
        own = self._supervisor.announce(worker, self._is_here(host))
        if self._elastic.plan.spares:
            own["HOROCLONE_SPARES"] = "1"
        if self._elastic.notice_signal:
            own["HOROCLONE_NOTICE_SIGNAL"] = self._elastic.notice_signal
        if self._outlives:
            own["HOROCLONE_SURVIVE_LAUNCHER"] = "1"
        if self._is_here(host):
            cores = usable_cores()
            threads = thread_variables(request.environment, request.threads, place.local_size, cores)
            self._start_local(worker.number, {**request.environment, **threads, **own})
        else:
            self._open_link(host, {worker.number: own}, self._secret, place.local_size)

    def kill(self, worker: Worker) -> None:
        self._members[worker.number].signal(signal.SIGKILL, True)

    def dismiss(self, worker: Worker) -> None:
        self._members[worker.number].signal(signal.SIGTERM, False)

    def room(self, now: float) -> Mapping[str, int] | None:
        transport = self._request.transport
        if transport is None:
            return None
        return {host: 1 for host in self._supervisor.policy.hosts() if transport.is_ready(host)}

    def more_hosts_to_come(self) -> bool | None:
        return None if self._elastic.source.changes else False

    def is_ending(self) -> bool:
        return self._termination.begun

    def fail(self, now: float) -> None:
        self._termination.fail(now)

    def formed(self, number: int, ranks: Sequence[Worker], is_first: bool) -> None:
        self._metrics.formed(number, len(ranks))
        if self._request.verbose or not is_first:
            slots = ",".join(str(worker.place.number) for worker in ranks)
            slots = f"{'slot' if len(ranks) == 1 else 'slots'} {slots}"
            say(f"generation {number}: {counted(len(ranks), 'rank')}, in {slots}")

    def named(self, worker: Worker) -> str:
        member = self._members[worker.number]
        pid = f", pid {member.pid}" if member.pid else ""
        return f"slot {worker.place.number} ({worker.place.host}{pid})"

    def no_room_text(self, limit_s: float) -> str:
        return f"no host had a free slot for {limit_s:g} s; --elastic-timeout (seconds) waits longer"

    def say(self, text: str) -> None:
        say(text)

    # --- what happens

    def _wake(self) -> None:
        try:
            self._wakeup_sender.send(b"x")
        except OSError:
            pass

    def _hear(self) -> None:
        try:
            self._wakeup.recv(4096)
        except BlockingIOError:
            pass
        for identity in self._host_identities.take():
            self._supervisor.seen_as(*identity)

    def started(self, rank: int, pid: int) -> None:
        super().started(rank, pid)
        link = self._members[rank].link
        if link is not None and link.machine:
            self._supervisor.seen_as(link.host, MACHINE, link.machine)

    def _host_goes(self, host: str, left_s: float | None) -> None:
        """Its notice script says so."""
        left_s = seconds(self._request.environment, "NOTICE", 30.0) if left_s is None else left_s
        self._supervisor.host_goes(host, left_s, time.monotonic())

    def _number_in_errors(self, slot: int) -> int:
        """The rank of who has this slot in the newest generation; -1: nobody."""
        ranks = [worker.place.number for worker in self._supervisor.ranks()]
        return ranks.index(slot) if slot in ranks else -1

    def _after_exit(self, member: Member, now: float) -> None:
        worker, code = self._supervisor.workers[member.key], member.code or 0
        is_certain = not member.note  # a note: its host was lost
        self._supervisor.exited(worker, code, report.end_of_process(code), now, is_certain)

    def _on_signal(self, number: int, now: float) -> None:
        super()._on_signal(number, now)
        if self._termination.begun:
            self._supervisor.stop(128 + number, "the launcher was told to end the job")

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
        now, policy = time.monotonic(), self._supervisor.policy
        self._let_go()
        if self._notices is not None:
            self._notices.watch([] if self._termination.begun else policy.hosts(), now)
        if self._request.transport is None:
            self._host_identities.watch(policy.hosts(), policy.closed_hosts(now))
        self._supervisor.step(now)
        stopped = self._supervisor.stopped
        if stopped is not None and stopped.code == NO_MEMBER and not self._is_minority:
            self._is_minority, self._supervisor.reason = True, stopped.text
            self._leave_the_others_alone()

    def _leave_the_others_alone(self) -> None:
        """The others may be the job: what is told to their hosts once the network is whole again must not end them."""
        here = self._supervisor.reachable()
        for link in self._links:
            if not link.over and not link.ranks & here:
                link.abandon("is on the other side of a cut network")

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
        return super()._is_over() and self._supervisor.is_over(time.monotonic())

    def _timeout_s(self) -> float:
        now = time.monotonic()
        notices_s = math.inf if self._notices is None else self._notices.next_s()
        due_s = min(notices_s, self._supervisor.next_s(now))
        return max(0.0, min(super()._timeout_s(), due_s - now))

    def _close(self) -> None:
        self._supervisor.close()
        self._host_identities.close()
        if self._notices is not None:
            self._notices.close()
        super()._close()
        self._wakeup.close()
        self._wakeup_sender.close()

    def _result(self) -> JobResult:
        result, supervisor = super()._result(), self._supervisor
        if self._termination.exit_code is not None:  # a signal ended it
            return result
        order = supervisor.ranks()[: self._elastic.plan.smallest]
        results = {rank: self._members[worker.number].result for rank, worker in enumerate(order)}
        ends = dict(zip(self._members, result.ends, strict=True))
        last = supervisor.last if supervisor.has_formed or not supervisor.finishing else order
        failed = [
            ends[one.number]._replace(in_errors=self._number_in_errors(one.place.number))
            for one in last
            if ends[one.number].code != 0 and not ends[one.number].by_us
        ]
        if failed:
            slots = {one.place.number: one.place.local for one in supervisor.workers.values()}
            arguments = (failed, self._request.output_folder, lambda end: slots[end.rank], supervisor.reason)
            text, code = report.elastic_failure(*arguments)
            screen = self._request.screen
            brief, _ = report.elastic_failure(*arguments, screen.in_sight(), screen.whole_in_sight())
            return JobResult(code, text, result.ends, results, brief)
        if self._termination.reason == termination.FAILURE or supervisor.reason:
            code = NO_MEMBER if supervisor.stopped is None else supervisor.stopped.code
            return JobResult(code, supervisor.reason, result.ends, results)
        return JobResult(0, None, result.ends, results)
