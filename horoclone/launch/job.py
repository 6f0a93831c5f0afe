"""One job from start to end: starts the ranks, carries their output, ends them, reports. One loop, one thread.

Everything that happens (output, an exit, a frame from another host, a signal to us, a deadline) is an event of this
loop; when to signal whom is decided in termination.py, what to print about a failure in report.py.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from horoclone.bootstrap import wire
from horoclone.bootstrap.detect import torch_port
from horoclone.bootstrap.rendezvous import Server
from horoclone.launch import frames, report, termination
from horoclone.launch.environment import exported, rank_variables, thread_variables, torch_variables
from horoclone.launch.hosts import Placement, is_local, is_loopback, usable_cores
from horoclone.launch.job_metrics import LOOK_EVERY_S, JobMetrics
from horoclone.launch.link import LOST, REFUSED, HostLink, Link, RemoteTransport, SshOptions
from horoclone.launch.output import STDERR, STDOUT, RankStream, Screen, open_files, rank_folder
from horoclone.launch.process import LocalRank, LocalRanks, memory_kills, read_memory
from horoclone.launch.signals import FORWARDED, Signals, empty
from horoclone.launch.usage import (
    LaunchError,
    is_out_of_descriptors,
    out_of_descriptors,
    ranks_text,
    say,
)

_POLL_S = 0.05  # while a group has to disappear, or where the kernel has no pidfd
_OUTPUT_AFTER_END_S = 1.0  # a pipe that outlives its rank's group is held by a daemon; nobody waits for it


class JobRequest(NamedTuple):
    """What to run. environment: of every rank, without the variables that differ by rank. transport: None for ssh."""

    placements: Sequence[Placement]
    command: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    screen: Screen
    ssh: SshOptions = SshOptions()
    output_folder: str | None = None
    grace_s: float = 30.0
    threads: str = "auto"
    interfaces: str | None = None
    function: bytes | None = None
    verbose: bool = False
    give_stdin: bool = True  # rank 0 reads our stdin, as under mpirun
    transport: RemoteTransport | None = None
    adds_python: bool = False  # command[0] is the launcher's; on other hosts ssh.python takes its place


def _new_job(first_is_here: bool) -> str:
    """A name for it whose torch_port() is free here, where rank 0 runs here."""
    for _ in range(20):
        job = secrets.token_hex(8)
        with socket.socket() as probe:
            try:
                probe.bind(("", torch_port(job) if first_is_here else 0))
                break
            except OSError:
                pass
    return job


class JobResult(NamedTuple):
    """exit_code as the launcher's own. text: the failure report, one line on an interrupt, or None; brief: without what
    stands on the screen right above it."""

    exit_code: int
    text: str | None
    ends: list[report.RankEnd]
    results: dict[int, bytearray]
    brief: str | None = None


class Member:
    """The launcher's view of one rank, local or not."""

    def __init__(self, placement: Placement, streams: dict[int, RankStream], key: int | None = None) -> None:
        self.placement, self.streams = placement, streams
        self.key = placement.rank if key is None else key  # the job's number of it
        self.open_streams = set(streams)
        self.pid = 0
        self.code: int | None = None
        self.ended_s = 0.0
        self.by_us = False
        self.gone = False  # the rank and everything in its process group
        self.gone_s = 0.0
        self.memory_kills = 0
        self.note = ""
        self.result = bytearray()
        self.local: LocalRank | None = None
        self.link: Link | None = None
        self.leftover_signal = 0

    @property
    def done(self) -> bool:
        return self.gone and not self.open_streams

    def signal(self, number: int, group: bool) -> None:
        if self.gone:
            return
        if self.local is not None:
            self.local.signal(number, group)
        elif self.link is not None:
            self.link.signal(self.key, number, group)


class Job:
    """Use once: Job(request).run()."""

    _outlives = False  # whether the ranks go on when we die

    def __init__(self, request: JobRequest) -> None:
        self._request = request
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, Member] = {}
        self._links: list[Link] = []
        self._owner: LocalRanks | None = None
        self._server: Server | None = None
        self._metrics = JobMetrics(request.command)
        self._secret = secrets.token_bytes(32) if request.transport is None else request.transport.secret
        self._termination = termination.TerminationPolicy(request.grace_s)
        self._launch_error: LaunchError | None = None
        self._signals: list[int] = []
        self._failures: list[Any] = []
        self._kills_before = memory_kills()
        request.screen.may_drop = lambda: self._termination.begun or bool(self._signals)

    def run(self) -> JobResult:
        """Blocks until every rank and everything it started is gone. LaunchError when a rank could not be started."""
        with Signals(self._signals) as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, lambda: empty(wakeup))
            try:
                self._start()
                while not self._is_over():
                    self._turn()
            except LaunchError as error:
                self._launch_error = error
            except OSError as error:
                if not is_out_of_descriptors(error):
                    raise
                self._launch_error = out_of_descriptors(len(self._request.placements))
            finally:
                self._close()
        for member in self._members.values():
            for stream in member.streams.values():
                if stream.file_error:
                    say(f"rank {member.placement.rank}: its log is incomplete: {stream.file_error}")
        if self._launch_error is not None and self._termination.exit_code is None:
            raise self._launch_error
        return self._result()

    def _is_over(self) -> bool:
        return all(member.done for member in self._members.values())

    # --- start

    def _start(self) -> None:
        request = self._request
        by_host: dict[str, list[Placement]] = {}
        for placement in request.placements:
            by_host.setdefault(placement.host, []).append(placement)
        local = {host for host in by_host if self._is_here(host)}
        first = request.placements[0].host
        secret, job = self._secret, _new_job(first in local)
        self._server = self._open_server(secret, job, all_local=len(local) == len(by_host))
        rendezvous = ",".join(self._server.addresses)
        variables = {one.rank: rank_variables(one, rendezvous, job) for one in request.placements}
        if request.transport is None:  # Spark's hosts have names of its own
            if first in local:
                first = self._reachable_name(first, next((one for one in by_host if one not in local), None))
            first, nodes = first.rpartition("@")[2], list(by_host)
            for one in request.placements:
                node = nodes.index(one.host)
                variables[one.rank] |= torch_variables(one, node, first, job, request.environment)
        for placement in request.placements:
            self._members[placement.rank] = self._member(placement)
        self._owner = LocalRanks(secret, request.function, request.ssh.bind_to_us)
        for host, placements in by_host.items():  # ssh is slow; it works while the local ranks start
            if host not in local:
                theirs = {one.rank: variables[one.rank] for one in placements}
                self._open_link(host, theirs, secret, len(placements))
        for host in local:
            share = len(by_host[host])
            threads = thread_variables(request.environment, request.threads, share, usable_cores())
            for placement in by_host[host]:
                own = {**request.environment, **threads, **variables[placement.rank]}
                self._start_local(placement.rank, own)

    def _is_here(self, host: str) -> bool:
        return self._request.transport is None and is_local(host)

    def _reachable_name(self, host: str, other: str | None) -> str:
        """Of this host, for torch's store at rank 0: addresses of bridges and tunnels may lead nowhere from `other`."""
        assert self._server is not None
        served = self._server.addresses[0].rpartition(":")[0].strip("[]")
        if other is None or self._request.interfaces:
            return served
        if not is_loopback(host):
            return host
        return wire.address_towards(other.rpartition("@")[2]) or served

    def _open_server(self, secret: bytes, job: str, all_local: bool) -> Server:
        addresses = [wire.loopback()]
        if self._request.transport is not None:
            addresses = list(self._request.transport.addresses)
        elif not all_local:
            try:
                addresses = wire.routable_addresses(self._request.interfaces or "")
            except ValueError as error:
                raise LaunchError(f"--network-interfaces: {error}") from None
            addresses = [one for one in addresses if not wire.is_loopback(one)] or addresses
        try:
            return self._serve(secret, job, addresses)
        except OSError as error:
            if is_out_of_descriptors(error):
                raise
            where = ", ".join(addresses)
            raise LaunchError(
                f"cannot listen on {where}: {error.strerror}; --network-interfaces chooses others", 1
            ) from None

    def _serve(self, secret: bytes, job: str, addresses: list[str]) -> Server:
        return Server(secret, job, len(self._request.placements), addresses)

    def _member(self, placement: Placement, key: int | None = None, again: bool = False) -> Member:
        request = self._request
        self._metrics.add(placement.rank if key is None else key, placement)
        try:
            files = open_files(request.output_folder, placement.rank, placement.size, again)
        except OSError as error:
            raise LaunchError(
                f"--output-filename {request.output_folder}: {error.filename}: {error.strerror}"
            ) from None
        return Member(
            placement,
            {
                STDOUT: RankStream(placement.rank, STDOUT, request.screen, files[0]),
                STDERR: RankStream(placement.rank, STDERR, request.screen, files[1]),
            },
            key,
        )

    def _start_local(self, rank: int, environment: Mapping[str, str]) -> None:
        assert self._owner is not None
        member, request = self._members[rank], self._request
        stdin = 0 if rank == 0 and request.give_stdin else None
        folder, metrics = self._folder_of(member), self._metrics.passed(rank)
        local = self._owner.start(rank, request.command, environment, request.cwd, stdin, folder, metrics)
        member.local = local
        self.started(rank, local.pid)
        for stream, pipe in ((STDOUT, local.stdout), (STDERR, local.stderr)):
            self._selector.register(
                pipe, selectors.EVENT_READ, functools.partial(self._read_local, member, stream)
            )
        if local.pidfd >= 0:
            # _attend looks at every rank
            self._selector.register(local.pidfd, selectors.EVENT_READ, lambda: None)

    def _folder_of(self, member: Member) -> str:
        """Of its files of output; empty: it has none."""
        folder, placement = self._request.output_folder, member.placement
        return os.path.abspath(rank_folder(folder, placement.rank, placement.size)) if folder else ""

    def _open_link(
        self, host: str, variables: Mapping[int, Mapping[str, str]], secret: bytes, share: int
    ) -> None:
        """variables: of each member that is started there. share: among how many the cores of the host are shared."""
        assert self._owner is not None
        request = self._request
        link: Link
        if request.transport is not None:
            link = request.transport.link(host, self)
        else:
            link = HostLink(host, request.ssh, self, self._owner.reaper)
        self._links.append(link)
        command = [request.ssh.python, *request.command[1:]] if request.adds_python else [*request.command]
        spec = {
            "command": command,
            "cwd": request.cwd,
            "environment": exported(request.environment),
            "threads": request.threads,
            "share": share,
            "ranks": {str(key): own for key, own in variables.items()},
            "outlive_us": self._outlives,
            "folders": {str(key): self._folder_of(self._members[key]) for key in variables},
        }
        for key in variables:
            link.ranks.add(key)
            self._members[key].link = link
        opening = frames.frames(frames.SPEC, frames.WHOLE_HOST, json.dumps(spec).encode())
        if link.gives_secret:
            opening += frames.frame(frames.SECRET, frames.WHOLE_HOST, secret)
        if request.function is not None:
            opening += frames.frames(frames.FUNCTION, frames.WHOLE_HOST, request.function)
        link.open(self._selector, opening + frames.frame(frames.GO, frames.WHOLE_HOST))

    # --- events of one rank (also called by HostLink)

    def started(self, rank: int, pid: int) -> None:
        member = self._members[rank]
        member.pid = pid
        self._metrics.started(rank, pid, member.local is not None)
        if self._request.verbose:
            say(f"rank {member.placement.rank} started on {member.placement.host}, pid {pid}")
        if self._termination.signalled_s is not None:
            # it came up on another host while the job was already ending
            member.signal(signal.SIGTERM, True)

    def output(self, rank: int, stream: int, data: bytes) -> None:
        member = self._members[rank]
        if data:
            member.streams[stream].feed(data)
        elif stream in member.open_streams:
            member.open_streams.discard(stream)
            member.streams[stream].finish()

    def exited(self, rank: int, code: int, memory_kills: int) -> None:
        member = self._members[rank]
        if member.code is not None:
            return
        now = time.monotonic()
        member.code, member.ended_s, member.memory_kills = code, now, memory_kills
        member.by_us = self._termination.signalled_s is not None
        told = self._server.failures() if self._server is not None and code != 0 else []
        first = next((failure for failure in told if failure.rank == rank), None)
        self._metrics.ended(rank, code, member.by_us, first is not None and first.consequence)
        self._after_exit(member, now)
        if self._request.verbose:
            say(f"rank {member.placement.rank} {report.end_of_process(code)}")

    def _after_exit(self, member: Member, now: float) -> None:
        if self._server is not None:  # whoever waits for it in init() is told at once
            self._server.rank_ended(
                member.key, f"rank {member.key} {report.end_of_process(member.code or 0)}"
            )
        if member.code != 0:
            self._termination.fail(now)

    def rank_metrics(self, rank: int, packed: bytes) -> None:
        self._metrics.take(rank, packed)

    def result(self, rank: int, part: bytes) -> None:
        self._members[rank].result += part

    def gone(self, rank: int) -> None:
        member = self._members[rank]
        member.gone, member.gone_s = True, time.monotonic()

    def host_lost(self, link: Link, why: LaunchError, stage: str) -> None:
        if stage == REFUSED and self._launch_error is None:
            self._launch_error = why
            self._termination.not_started(time.monotonic())
        for rank in link.ranks:
            member = self._members[rank]
            if not member.gone:
                if stage == LOST:
                    member.note = str(why)
                    self.exited(rank, 255, 0)
                elif member.code is None:
                    member.code, member.ended_s, member.by_us = -int(signal.SIGTERM), time.monotonic(), True
                self.gone(rank)
            for stream in list(member.open_streams):
                self.output(rank, stream, b"")

    def _read_local(self, member: Member, stream: int) -> None:
        assert member.local is not None
        pipe = member.local.stdout if stream == STDOUT else member.local.stderr
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(pipe)
        self.output(member.key, stream, data)

    # --- the loop

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            if self._selector.get_map().get(key.fd) is key:  # an event before it may have ended this one
                key.data()
        now = time.monotonic()
        while self._signals:
            self._on_signal(self._signals.pop(0), now)
        for member in self._members.values():
            self._attend(member, now)
        for link in self._links:
            link.check_deadline(now)
        self._metrics.look(now, self._termination.begun)
        if self._request.screen.broken:
            self._termination.no_reader(now)
        if (waits := self._termination.word(now)) is not None:
            self._say_who_is_waited_for(waits)
        for order in self._termination.due(now):
            for member in self._members.values():
                member.signal(order.number, order.group)
                if order.number != signal.SIGKILL and order.number != signal.SIGINT:
                    member.signal(signal.SIGCONT, order.group)  # a stopped process keeps its signals pending

    def _say_who_is_waited_for(self, waits: str) -> None:
        """After a failure: a launcher that is silent for seconds looks as if it hung."""
        members = self._members.values()
        left = [one.placement.rank for one in members if not one.gone]
        failed = [one.placement.rank for one in members if one.code not in (None, 0) and not one.by_us]
        failed = [rank for rank in failed if rank not in left]  # an elastic job has replaced that one
        if failed and left:
            say(f"{ranks_text(failed)} failed; {waits.format(ranks=ranks_text(left))}")

    def _on_signal(self, number: int, now: float) -> None:
        if number == signal.SIGINT:
            self._termination.interrupt(now)
            for member in self._members.values():
                for stream in member.streams.values():
                    stream.hide_interrupts = True
        elif number in FORWARDED:
            for member in self._members.values():
                member.signal(number, False)
        else:
            self._termination.terminate(now, number)

    def _attend(self, member: Member, now: float) -> None:
        """A rank's end, what it left running, and pipes that outlive it."""
        rank, local = member.key, member.local
        if local is not None and member.code is None and local.poll() is not None:
            if local.pidfd >= 0:
                self._selector.unregister(local.pidfd)
            if local.result is not None:
                self.result(rank, read_memory(local.result))
            self.exited(rank, local.code or 0, memory_kills() - self._kills_before)
        if member.code is not None and not member.gone:
            if local is not None and not local.group_alive():
                self.gone(rank)
            else:
                self._end_leftover(member, now)
        if member.gone and member.open_streams and now > member.gone_s + _OUTPUT_AFTER_END_S:
            for stream in list(member.open_streams):
                if local is not None:
                    self._selector.unregister(local.stdout if stream == STDOUT else local.stderr)
                self.output(rank, stream, b"")
        for stream in member.open_streams:
            member.streams[stream].show_partial(now)

    def _end_leftover(self, member: Member, now: float) -> None:
        term_s, kill_s = self._termination.leftover_delays()
        if now >= member.ended_s + kill_s and member.leftover_signal != signal.SIGKILL:
            member.leftover_signal = signal.SIGKILL
        elif now >= member.ended_s + term_s and not member.leftover_signal:
            member.leftover_signal = signal.SIGTERM
        else:
            return
        member.signal(member.leftover_signal, True)

    def _timeout_s(self) -> float:
        now = time.monotonic()
        if any(self._needs_polling(member) for member in self._members.values()):
            return _POLL_S
        if any(link.is_ending and not link.over for link in self._links):
            return _POLL_S
        due = self._termination.next_look_s()
        return LOOK_EVERY_S if due is None else min(LOOK_EVERY_S, max(0.0, due - now))

    def _needs_polling(self, member: Member) -> bool:
        if member.done:
            return False
        if member.code is not None or (member.local is not None and member.local.pidfd < 0):
            return True
        now = time.monotonic()
        return any(member.streams[stream].show_partial(now) is not None for stream in member.open_streams)

    # --- the end

    def _close(self) -> None:
        for link in self._links:
            link.hang_up()
        for link in self._links:
            link.close()
        if self._owner is not None:
            self._owner.close()
        if goodput := self._metrics.goodput():
            say(goodput)
        for line in self._metrics.why():
            say(line)
        self._metrics.close()
        for member in self._members.values():
            for stream in list(member.open_streams):
                self.output(member.key, stream, b"")
        self._request.screen.close()
        if self._server is not None:
            self._failures = self._server.failures()
            self._server.close()
        self._selector.close()

    def _result(self) -> JobResult:
        said: dict[int, Any] = {}
        for failure in self._failures:  # a rank's first word counts
            said.setdefault(failure.rank, failure)
        ends = [self._end_of(member, said.get(rank)) for rank, member in self._members.items()]
        results = {rank: member.result for rank, member in self._members.items()}
        failed = any(end.code != 0 and not end.by_us for end in ends)
        folder = self._request.output_folder
        code = self._termination.exit_code
        if code is not None:
            text = _closing_text(self._termination.reason, self._request.screen.broken, ends)
            if self._termination.reason in (termination.TERMINATE, termination.HANGUP) and failed:
                text += "\n" + report.failure_report(ends, folder, len(ends))[0]
            return JobResult(code, text, ends, results)
        if any(end.code != 0 for end in ends):
            text, code = report.failure_report(ends, folder, len(ends))
            screen = self._request.screen
            in_sight, whole = screen.in_sight(), screen.whole_in_sight()
            brief, _ = report.failure_report(ends, folder, len(ends), in_sight, whole)
            return JobResult(code, text, ends, results, brief)
        return JobResult(0, None, ends, results)

    @staticmethod
    def _end_of(member: Member, failure: Any) -> report.RankEnd:
        return report.RankEnd(
            rank=member.placement.rank,
            host=member.placement.host,
            pid=member.pid,
            code=member.code if member.code is not None else -signal.SIGKILL,
            ended_s=member.ended_s,
            by_us=member.by_us,
            report=failure.text if failure is not None else None,
            report_is_consequence=failure is not None and failure.consequence,
            stderr=[line.decode(errors="replace") for line in member.streams[STDERR].tail],
            memory_kills=member.memory_kills,
            note=member.note,
        )


def _closing_text(reason: int, broken: str, ends: Sequence[report.RankEnd]) -> str:
    stopped = ranks_text([end.rank for end in ends if end.by_us] or [end.rank for end in ends])
    if reason == termination.INTERRUPT:
        return f"interrupted; {stopped} stopped"
    if reason == termination.NO_READER:
        return f"{broken}; {stopped} stopped"
    name = "SIGHUP" if reason == termination.HANGUP else "SIGTERM"
    return f"{name} was forwarded; {stopped} ended"
