"""Starts and watches the ranks of another host: `python -m horoclone.launch.remote`, one process per host.

The launcher starts it through ssh (link.py). It reads from stdin what to run and the job secret, starts the ranks, and
sends their output and exits back as frames (frames.py). When stdin ends because ssh is gone, its ranks are ended within
2 s; with --survive-launcher they go on, and their output goes to the files of --output-filename on this host, if any.
One thread.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from horoclone.launch import frames
from horoclone.launch.environment import thread_variables
from horoclone.launch.hosts import Placement, usable_cores
from horoclone.launch.job_metrics import LOOK_EVERY_S, JobMetrics
from horoclone.launch.machine import own_machine
from horoclone.launch.process import LocalRank, LocalRanks, memory_kills, read_memory
from horoclone.launch.usage import LaunchError

_GENTLE_S = 1.0
_POLL_S = 0.05
_SPEC_DEADLINE_S = 60.0
_STUCK_S = 20.0  # that the launcher may read nothing before ranks that survive it go on without
_FILES = {frames.OUT: "stdout", frames.ERR: "stderr"}


class _LauncherGone(Exception):
    pass


class Given(NamedTuple):
    """What is known here without the launcher: what its ranks inherit, what they run, and where."""

    secret: bytes
    function: bytes
    command: list[str]
    cwd: str


class Remote:
    """One host's ranks. given: where a scheduler has started this process, and brought it what ssh's stdin brings."""

    def __init__(self, given: Given | None = None) -> None:
        self._selector = selectors.DefaultSelector()
        self._reader = frames.FrameReader()
        self._spec: dict[str, Any] | None = None
        self._given = given
        self._secret = b"" if given is None else given.secret
        self._function: bytes | None = None if given is None else given.function
        self._owner: LocalRanks | None = None
        self._metrics: JobMetrics | None = None
        self._ranks: dict[int, LocalRank] = {}
        self._told_exit: set[int] = set()
        self._told_gone: set[int] = set()
        self._kills_before = memory_kills()
        self._outlives = False  # whether the ranks go on without the launcher
        self._alone = False  # and it is gone

    def serve(self) -> int:
        self._send_raw(frames.GREETING)
        self._selector.register(0, selectors.EVENT_READ, self._from_launcher)
        started_s = time.monotonic()
        try:
            while self._owner is None or len(self._told_gone) < len(self._ranks) or self._streams_open():
                busy = any(rank not in self._told_gone for rank in self._told_exit)
                blind = any(local.pidfd < 0 for local in self._ranks.values())
                for key, _ in self._selector.select(_POLL_S if busy or blind else LOOK_EVERY_S):
                    if self._selector.get_map().get(key.fd) is key:
                        key.data()
                self._tell_ends()
                self._pass_pages_on()
                if self._owner is None and time.monotonic() > started_s + _SPEC_DEADLINE_S:
                    return 1
            return 0
        except (_LauncherGone, frames.BrokenFrame):
            self._end_ranks()
            return 1
        except LaunchError as error:
            self._refuse(error)
            return 1
        finally:
            if self._owner is not None:
                self._owner.close()
            if self._metrics is not None:
                self._metrics.close()

    # --- from the launcher

    def _from_launcher(self) -> None:
        data = os.read(0, 1 << 16)
        if not data and not self._outlives:
            raise _LauncherGone
        if not data:
            self._alone = True
            self._selector.unregister(0)
            return
        for kind, rank, payload in self._reader.feed(data):
            if kind == frames.SPEC:
                self._spec = json.loads(payload)
            elif kind == frames.SECRET:
                self._secret = payload
            elif kind == frames.FUNCTION:
                self._function = (self._function or b"") + payload
            elif kind == frames.GO:
                self._start()
            elif kind == frames.KILL and rank in self._ranks:
                number, group = frames.KILL_PAYLOAD.unpack(payload)
                self._ranks[rank].signal(number, bool(group))

    def _start(self) -> None:
        assert self._spec is not None
        environment = {**os.environ, **self._spec["environment"]}
        if self._given is not None:
            self._spec |= {"command": self._given.command, "cwd": self._given.cwd}
        elif "PYTHONPATH" not in self._spec["environment"]:
            environment.pop("PYTHONPATH", None)  # ours only led to this file
        share = int(self._spec["share"])
        environment.update(thread_variables(environment, self._spec["threads"], share, usable_cores()))
        self._outlives = bool(self._spec["outlive_us"])
        if self._outlives:
            os.set_blocking(1, False)
        self._owner = LocalRanks(self._secret, self._function)
        self._metrics = JobMetrics(self._spec["command"])
        for rank_text, own in self._spec["ranks"].items():
            rank = int(rank_text)
            self._metrics.add(rank, _placement_of(own))
            local = self._owner.start(
                rank,
                self._spec["command"],
                {**environment, **own},
                self._spec["cwd"],
                metrics=self._metrics.passed(rank),
            )
            self._ranks[rank] = local
            self._metrics.started(rank, local.pid, True)
            start = {"pid": local.pid, "machine": own_machine()}
            self._send(frames.STARTED, rank, json.dumps(start).encode())
            for kind, stream in ((frames.OUT, local.stdout), (frames.ERR, local.stderr)):
                self._selector.register(
                    stream, selectors.EVENT_READ, lambda k=kind, r=rank, s=stream: self._carry(k, r, s)
                )
            if local.pidfd >= 0:
                self._selector.register(local.pidfd, selectors.EVENT_READ, lambda: None)

    # --- to the launcher

    def _carry(self, kind: bytes, rank: int, stream: Any) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        if data:
            self._send(kind, rank, data)
            if self._alone:
                self._keep(kind, rank, data)
        else:
            self._selector.unregister(stream)
            self._send(frames.ENDED_STREAM, rank, kind)

    def _keep(self, kind: bytes, rank: int, data: bytes) -> None:
        assert self._spec is not None
        folder = self._spec["folders"][str(rank)]
        if folder:
            try:
                os.makedirs(folder, exist_ok=True)
                with open(os.path.join(folder, _FILES[kind]), "ab", buffering=0) as file:
                    file.write(data)
            except OSError:
                pass  # the rank shall not fail for it

    def _streams_open(self) -> bool:
        # stdin and pidfds are registered by number
        return any(not isinstance(key.fileobj, int) for key in self._selector.get_map().values())

    def _tell_ends(self) -> None:
        for rank, local in self._ranks.items():
            if rank not in self._told_exit and local.poll() is not None:
                self._told_exit.add(rank)
                if local.pidfd >= 0:
                    self._selector.unregister(local.pidfd)
                if local.result is not None:
                    self._send_raw(frames.frames(frames.RESULT, rank, read_memory(local.result)))
                if self._metrics is not None:
                    self._metrics.ended(rank, local.code or 0, False)
                report = {"code": local.code, "memory_kills": memory_kills() - self._kills_before}
                self._send(frames.EXITED, rank, json.dumps(report).encode())
            if rank in self._told_exit and rank not in self._told_gone and not local.group_alive():
                self._told_gone.add(rank)
                self._send(frames.GONE, rank)

    def _pass_pages_on(self) -> None:
        if self._metrics is not None:
            for rank, packed in self._metrics.news():
                self._send(frames.PAGE, rank, packed)

    def _refuse(self, error: LaunchError) -> None:
        text = json.dumps({"text": str(error), "exit_code": error.exit_code}).encode()
        try:
            self._send(frames.REFUSED, frames.WHOLE_HOST, text)
        except _LauncherGone:
            pass

    def _send(self, kind: bytes, rank: int, payload: bytes = b"") -> None:
        self._send_raw(frames.frame(kind, rank, payload))

    def _send_raw(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and not self._alone:
                try:
                    view = view[os.write(1, view) :]
                except BlockingIOError:
                    self._alone = not _takes(1, _STUCK_S)
        except OSError:
            if not self._outlives:
                raise _LauncherGone from None
            self._alone = True

    # --- the end

    def _end_ranks(self) -> None:
        """Nobody listens any more: SIGTERM, a second, and the owner's close() kills the rest."""
        for local in self._ranks.values():
            local.signal(signal.SIGTERM, group=True)
            local.signal(signal.SIGCONT, group=True)
        deadline = time.monotonic() + _GENTLE_S
        while time.monotonic() < deadline and any(local.group_alive() for local in self._ranks.values()):
            time.sleep(_POLL_S)


def _placement_of(own: Mapping[str, str]) -> Placement:
    """What a rank's variables say about where it is."""
    rank, size, local_rank, local_size, cross_rank, cross_size = (
        int(own[f"HOROCLONE_{name.upper()}"]) for name in Placement._fields[:-1]
    )
    return Placement(rank, size, local_rank, local_size, cross_rank, cross_size, own["HOROCLONE_HOSTNAME"])


def _takes(descriptor: int, wait_s: float) -> bool:
    """Whether it can be written to within this time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    return bool(poller.poll(wait_s * 1000))


def main() -> int:
    # sshd may signal the session when the connection drops; stdin's end is what we act on. Not SIG_IGN: the ranks would
    # inherit it.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return Remote().serve()


if __name__ == "__main__":
    sys.exit(main())
