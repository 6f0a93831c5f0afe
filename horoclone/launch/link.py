"""The launcher's connection to one other host, where remote.py runs: ssh, or another way. Thread: the job's loop.

ssh_command() makes every ssh command line of the launcher.
"""

from __future__ import annotations

import collections
import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from horoclone.launch import frames
from horoclone.launch.process import Reaper, dies_with_parent
from horoclone.launch.usage import LaunchError, out_of_processes
from horoclone.settings import START_TIMEOUT_S

# How a host was lost: before a rank ran there, while ranks ran, or because the job ends before it answered.
REFUSED, LOST, ABANDONED = "refused", "lost", "abandoned"


ENDS_S = 1.0  # for ssh to end once it has closed its output

# One step for each host, beside the others on the same cores and memory. What ends in it ends nothing else.
SRUN = (
    "srun", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--unbuffered",
    "--quiet", "--kill-on-bad-exit=0", "--no-kill",
)  # fmt: skip


class SshOptions(NamedTuple):
    """What the user said about ssh. python: the interpreter on the other hosts. shell: ssh, or Slurm's srun."""

    port: int | None = None
    identity_file: str | None = None
    python: str = sys.executable
    start_timeout_s: float = START_TIMEOUT_S
    bind_to_us: bool = True  # see LocalRanks
    shell: str = "ssh"


class HostEvents(Protocol):
    """Receives the events of a host."""

    def started(self, rank: int, pid: int) -> None: ...
    def output(self, rank: int, stream: int, data: bytes) -> None: ...
    def exited(self, rank: int, code: int, memory_kills: int) -> None: ...
    def rank_metrics(self, rank: int, packed: bytes) -> None: ...
    def result(self, rank: int, part: bytes) -> None: ...
    def gone(self, rank: int) -> None: ...
    def host_lost(self, link: Link, why: LaunchError, stage: str) -> None: ...


class RemoteTransport(Protocol):
    """Another way to hosts than ssh, where a scheduler has put processes of ours on them. No host is this one then.

    secret: the job's, which those processes have got already. addresses: where the rendezvous server listens.
    """

    secret: bytes
    addresses: Sequence[str]

    def is_ready(self, host: str) -> bool:
        """Whether a rank can be started there now."""
        ...

    def link(self, host: str, events: HostEvents) -> Link:
        """For the ranks that are to be started there. LaunchError when that cannot be."""
        ...


def package_home() -> str:
    """The folder that holds the package `horoclone` which is running."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def ssh_command(host: str, options: SshOptions) -> list[str]:
    """argv of ssh, or of srun; its last word is what the other host's shell runs.

    That is quoted word by word; nothing of the user's command is in it.
    """
    bootstrap = ["env", "PYTHONSAFEPATH=1", options.python, "-m", "horoclone.launch.remote"]
    home = package_home()
    if os.path.basename(home) not in (
        "site-packages",
        "dist-packages",
    ):  # a source tree, at the same path there
        bootstrap.insert(1, f"PYTHONPATH={home}")
    there = "exec " + " ".join(shlex.quote(word) for word in bootstrap)
    if options.shell == "srun":
        return [*SRUN, f"--nodelist={host}", "sh", "-c", there]
    command = [
        "ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"
    ]  # fmt: skip
    command += ["-o", f"ConnectTimeout={max(1, min(30, int(options.start_timeout_s)))}"]
    if options.port is not None:
        command += ["-p", str(options.port)]
    if options.identity_file:
        command += ["-i", options.identity_file]
    return [*command, host, there]


class Link:
    """Starts the ranks of one host and tells `events` about them until every one is gone.

    It reads and writes the two ends of a channel to remote.py, which a derived class opens and closes.
    """

    gives_secret = True  # the other side learns the job's secret, and the function, through the channel

    def __init__(self, host: str, events: HostEvents, start_timeout_s: float) -> None:
        self.host = host
        self.ranks: set[int] = set()
        self.over = False
        self.is_ending = False  # its channel has ended, and how is asked soon
        self.machine = ""  # what tells it from another one of this name; of its first rank's start
        self._events, self._start_timeout_s = events, start_timeout_s
        self._reader = frames.FrameReader(frames.GREETING)
        self._deadline_s = time.monotonic() + start_timeout_s
        self._unsent = bytearray()
        self._opening: bytes = b""
        self._gone: set[int] = set()
        self._selector: selectors.BaseSelector | None = None

    # --- what a channel has

    def _ends(self) -> tuple[Any, Any]:
        """(what is written to, without blocking, what is read from)."""
        raise NotImplementedError

    def _channel_ended(self) -> None:
        """What is read from has ended, although ranks of this host have not: calls _lose() with the reason."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Nothing more is sent; the other side ends its ranks then."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the channel, by force when it does not end by itself."""
        raise NotImplementedError

    def _details(self, refused: bool) -> str:
        """More lines for the text about a lost host."""
        return ""

    # --- the job calls these

    def open(self, selector: selectors.BaseSelector, opening: bytes) -> None:
        """opening: the frames to send as soon as the other side answers."""
        self._opening = opening
        self._selector = selector
        selector.register(self._ends()[1], selectors.EVENT_READ, self._read_frames)

    def signal(self, rank: int, number: int, group: bool) -> None:
        if self.over or rank in self._gone:
            return
        if not self._reader.greeted:  # nothing runs there yet, and nothing shall
            self._stop_watching()
            self.over = True
            self.hang_up()
            self._events.host_lost(
                self, LaunchError(f"{self.host}: the job ended before it answered", 1), ABANDONED
            )
        else:
            self._send(frames.frame(frames.KILL, rank, frames.KILL_PAYLOAD.pack(number, group)))

    def abandon(self, what: str) -> None:
        """Sends nothing more to this host, which counts as lost from now on."""
        self._unsent.clear()
        self.hang_up()
        self._lose(what)

    def check_deadline(self, now: float) -> None:
        if not self._reader.greeted and not self.over and now > self._deadline_s:
            self._lose(f"did not answer within {self._start_timeout_s:g} s (--start-timeout)")

    # --- the loop calls these

    def _send(self, data: bytes) -> None:
        if not self._unsent and self._selector is not None:
            self._selector.register(self._ends()[0], selectors.EVENT_WRITE, self._flush)
        self._unsent += data

    def _flush(self) -> None:
        into = self._ends()[0]
        try:
            del self._unsent[: os.write(into.fileno(), self._unsent[: 1 << 16])]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the end of what is read tells the rest
        if not self._unsent and self._selector is not None:
            self._selector.unregister(into)

    def _read_frames(self) -> None:
        try:
            data = os.read(self._ends()[1].fileno(), 1 << 17)
        except BlockingIOError:
            return
        except OSError:  # a connection that was reset
            data = b""
        if not data:
            self._ended()
            return
        was_greeted = self._reader.greeted
        try:
            found = self._reader.feed(data)
        except frames.BrokenFrame as error:
            self._lose(
                f"sent something that is not ours: {error}; is another version of horoclone installed there?"
            )
            return
        if self._reader.greeted and not was_greeted:
            self._send(self._opening)
            self._opening = b""
        for kind, rank, payload in found:
            self._handle(kind, rank, payload)

    def _handle(self, kind: bytes, rank: int, payload: bytes) -> None:
        if kind == frames.REFUSED:
            answer = json.loads(payload)
            self._stop_watching()
            self.over = True
            self._events.host_lost(
                self, LaunchError(f"{self.host}: {answer['text']}", answer["exit_code"]), REFUSED
            )
        elif rank not in self.ranks:
            return
        elif kind == frames.OUT or kind == frames.ERR:
            self._events.output(rank, 1 if kind == frames.OUT else 2, payload)
        elif kind == frames.ENDED_STREAM:
            self._events.output(rank, 1 if payload == frames.OUT else 2, b"")
        elif kind == frames.PAGE:
            self._events.rank_metrics(rank, payload)
        elif kind == frames.STARTED:
            start: dict[str, Any] = json.loads(payload)
            self.machine = str(start.get("machine", ""))
            self._events.started(rank, int(start["pid"]))
        elif kind == frames.RESULT:
            self._events.result(rank, payload)
        elif kind == frames.EXITED:
            report: dict[str, Any] = json.loads(payload)
            self._events.exited(rank, int(report["code"]), int(report["memory_kills"]))
        elif kind == frames.GONE:
            self._gone.add(rank)
            self._events.gone(rank)

    def _ended(self) -> None:
        if self._gone >= self.ranks:
            self._stop_watching()
            self.over = True
        else:
            self._channel_ended()

    def _lose(self, what: str) -> None:
        refused = not self._reader.greeted
        text = f"{self.host}: {what}{self._details(refused)}"
        self._stop_watching()
        self.over = True
        self._events.host_lost(self, LaunchError(text, 1), REFUSED if refused else LOST)

    def _watched(self) -> tuple[Any, ...]:
        return self._ends()

    def _stop_watching(self) -> None:
        for stream in self._watched():
            try:
                if self._selector is not None:
                    self._selector.unregister(stream)
            except (KeyError, ValueError):
                pass


class HostLink(Link):
    """A host to which ssh, or srun, leads."""

    def __init__(self, host: str, options: SshOptions, events: HostEvents, reaper: Reaper) -> None:
        super().__init__(host, events, options.start_timeout_s)
        self._options, self._reaper = options, reaper
        self.complaints: collections.deque[str] = collections.deque(maxlen=20)  # ssh's own stderr
        try:
            self._process = subprocess.Popen(
                ssh_command(host, options),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=dies_with_parent() if options.bind_to_us else None,
            )
        except BlockingIOError:
            raise out_of_processes(options.shell) from None
        except OSError as error:
            raise LaunchError(
                f"{host} is another host, and {options.shell} cannot be run here ({error.strerror}); install an ssh "
                "client (Debian: apt install openssh-client), or start the job with a launcher that the hosts share",
                1,
            ) from None
        reaper.watch(self._process.pid)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        os.set_blocking(self._process.stdin.fileno(), False)

    def _ends(self) -> tuple[Any, Any]:
        return self._process.stdin, self._process.stdout

    def _watched(self) -> tuple[Any, ...]:
        return self._process.stdin, self._process.stdout, self._process.stderr

    def open(self, selector: selectors.BaseSelector, opening: bytes) -> None:
        super().open(selector, opening)
        selector.register(self._process.stderr, selectors.EVENT_READ, self._read_complaints)  # type: ignore[arg-type]

    def hang_up(self) -> None:
        """Closes ssh's stdin; the other side ends its ranks then."""
        assert self._process.stdin
        self._stop_watching()
        try:
            self._process.stdin.close()
        except OSError:
            pass

    def close(self) -> None:
        """Ends ssh, by force when it does not end by itself."""
        assert self._process.stdout and self._process.stderr
        self.hang_up()
        try:
            self._process.wait(2.5 if self._reader.greeted else 0.1)
        except subprocess.TimeoutExpired:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
        self._reaper.forget(self._process.pid)
        self._process.stdout.close()
        self._process.stderr.close()

    def _read_complaints(self) -> None:
        assert self._process.stderr and self._selector is not None
        data = os.read(self._process.stderr.fileno(), 1 << 16)
        if not data:
            self._selector.unregister(self._process.stderr)
        self.complaints.extend(line for line in data.decode(errors="replace").splitlines() if line.strip())

    def _channel_ended(self) -> None:
        """ssh is about to end, and its exit code says why; the loop does not wait for it."""
        assert self._selector is not None
        self._selector.unregister(self._process.stdout)  # type: ignore[arg-type]
        self.is_ending, self._ends_s = True, time.monotonic() + ENDS_S

    def check_deadline(self, now: float) -> None:
        super().check_deadline(now)
        code = self._process.poll() if self.is_ending and not self.over else None
        if self.over or not self.is_ending or (code is None and now < self._ends_s):
            return
        if not self._reader.greeted:
            self._lose(f"could not be started over {self._options.shell} (exit code {code})")
        else:
            self._lose(f"the {self._options.shell} connection was lost (exit code {code})")

    def _details(self, refused: bool) -> str:
        self._drain_complaints()
        noise = self._reader.noise.decode(errors="replace").splitlines()[-5:] if refused else []
        said = "".join(f"\n  | {line}" for line in [*noise, *self.complaints])
        if not refused:
            return said
        return said + (
            f"\nTry it by hand: {shlex.join(ssh_command(self.host, self._options)[:-1])} true\n"
            "Every host needs a login without a password, a known host key, and horoclone for "
            f"{self._options.python} (--remote-python names another interpreter)."
        )

    def _drain_complaints(self) -> None:
        assert self._process.stderr
        os.set_blocking(self._process.stderr.fileno(), False)
        try:
            while data := os.read(self._process.stderr.fileno(), 1 << 16):
                self.complaints.extend(
                    line for line in data.decode(errors="replace").splitlines() if line.strip()
                )
        except OSError:
            pass
