"""The jobs of recovery.py: how each contestant is started, and what its ranks have said so far."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from hosts import Hosts
from recovery_worker import factor
from session import Failed

WORKER = Path(__file__).with_name("recovery_worker.py")
LIMIT_S = 120.0  # for anything that is waited for
MARK = "RECOVERY_MARK"
GBIT, MTU = 10.0, 9000  # of the cable between two hosts

# ssh to the second host: its words after the host, by a shell in its namespace.
SSH = """#!{python}
import os, sys
words = sys.argv[1:]
while words and words[0].startswith("-"):
    words = words[1 if words[0] == "-T" else 2:]
os.execvp("ip", ["ip", "netns", "exec", {name!r}, "sh", "-c", " ".join(words[1:])])
"""


class Job:
    """A running job. A subclass says how it is started; a thread reads what its ranks print."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder, self.arguments = folder / "pages", arguments
        self.folder.mkdir(parents=True)
        self._scratch = folder / "tmp"
        self._scratch.mkdir()
        self._mark = secrets.token_hex(8)
        self._environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HOROCLONE_SELECTION": "fixed", "TMPDIR": str(self._scratch),
            MARK: self._mark,
        }  # fmt: skip
        self._news = threading.Condition()  # guards what follows
        self._members: dict[int, dict[int, int]] = defaultdict(dict)  # generation -> rank -> pid
        self._sizes: dict[int, int] = {}
        self._starts: dict[int, set[tuple[int, float]]] = defaultdict(set)  # step and sum
        self._times: dict[tuple[str, int], list[float]] = defaultdict(list)  # (what, generation) -> when
        self._beginnings: dict[int, dict[int, float]] = defaultdict(dict)  # generation -> pid -> when
        self._steps_s: dict[int, float] = {}  # generation -> mean time of a step, as a rank has it
        self._said: list[str] = []  # the last lines that were no news
        self._ended = ""

    # --- to be told by subclasses

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    # --- what was said

    def __enter__(self) -> Job:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def worker(self, contestant: str, *more: str) -> list[str]:
        one = self.arguments
        return [
            str(WORKER), contestant, "--folder", str(self.folder), "--step-ms", str(one.step_ms),
            "--elements", str(one.elements), *more,
        ]  # fmt: skip

    def open(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=environment, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._news:
                self._take(line)
                self._news.notify_all()
        self.over(process)

    def over(self, process: subprocess.Popen[str]) -> None:
        """Nothing more comes from this process."""
        with self._news:
            self._ended = f"it ended with code {process.wait()}"
            self._news.notify_all()

    def _take(self, line: str) -> None:
        words = line.split()
        if words and words[0].startswith("["):
            words = words[1:]
        try:
            match words:
                case ["generation", number, rank, size, pid, step, total, at]:
                    self._members[int(number)][int(rank)] = int(pid)
                    self._sizes[int(number)] = int(size)
                    self._starts[int(number)].add((int(step), float(total)))
                    self._times["generation", int(number)].append(float(at))
                    self._beginnings[int(number)][int(pid)] = float(at)
                    return
                case ["updated", number, step_s, at]:
                    self._times["updated", int(number)].append(float(at))
                    self._steps_s[int(number)] = float(step_s)
                    return
                case [("step" | "lost") as what, number, at]:
                    self._times[what, int(number)].append(float(at))
                    return
        except ValueError:
            pass
        self._said = [*self._said[-200:], line]
        if self.arguments.verbose:
            print(line, end="", file=sys.stderr)
        if "WRONG" in line:
            self._ended = line.strip()

    def complete(self) -> list[int]:
        """The generations of which every rank did a step, the oldest first."""
        return [
            number
            for number, size in sorted(self._sizes.items())
            if len(self._members[number]) == size == len(self._times["step", number])
        ]

    def newest(self) -> int:
        """Of which every rank did a step; 0: none yet."""
        return max(self.complete(), default=0)

    def all_numbers(self) -> list[int]:
        return sorted(self._sizes)

    def members(self, number: int) -> dict[int, int]:
        return dict(self._members[number])

    def size(self, number: int) -> int:
        return self._sizes[number]

    def times(self, what: str, number: int) -> list[float]:
        return list(self._times[what, number])

    def beginnings(self, number: int) -> dict[int, float]:
        return dict(self._beginnings[number])

    def step_s(self, number: int) -> float:
        """Mean time of a step of a generation that was interrupted for others."""
        return self._steps_s[number]

    def wait_for(self, is_it: Callable[[int], bool], text: str) -> int:
        """Waits until the newest complete generation is such a one; its number."""
        deadline = time.monotonic() + LIMIT_S
        with self._news:
            while True:
                if self._ended:
                    raise Failed(f"{text} never came: {self._ended}\n{''.join(self._said)}")
                newest = max(self.complete(), default=0)
                if newest and is_it(newest):
                    return newest
                if not self._news.wait(min(1.0, deadline - time.monotonic())) and time.monotonic() > deadline:
                    raise Failed(f"{text} did not come within {LIMIT_S:g} s\n{''.join(self._said)}")

    # --- its processes

    def kill(self, pid: int) -> float:
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.wait_for_the_end(pid)
        return killed_s

    def wait_for_the_end(self, pid: int, limit_s: float = LIMIT_S) -> bool:
        """False: it lives. Failed where that is so after the longest time for anything."""
        deadline = time.monotonic() + limit_s
        while _lives(pid):
            if time.monotonic() > deadline:
                if limit_s >= LIMIT_S:
                    raise Failed(f"process {pid} should have died\n{''.join(self._said)}")
                return False
            time.sleep(0.002)
        return True

    def processes(self) -> list[int]:
        """Those that live and descend from this job."""
        needle = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if (
                    entry.name.isdigit()
                    and _lives(int(entry.name))
                    and needle in (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
        return found

    def end(self, process: subprocess.Popen[str], number: int) -> None:
        """Ends it by a signal, and after a while by SIGKILL."""
        for one in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(one)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30.0)
                return

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 5.0
        while left := self.processes():
            if time.monotonic() > deadline:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise Failed(f"{len(left)} processes were left behind")
            time.sleep(0.05)

    def check_the_sums(self) -> None:
        """The sum with which a generation begins follows from the steps and sizes of those before it."""
        step, total, size = 0, 0.0, 0
        for number in self.all_numbers():
            starts = self._starts[number]
            if len(starts) != 1:
                raise Failed(
                    f"the ranks of generation {number} began with different states: {sorted(starts)}"
                )
            ((begun, found),) = starts
            wanted = total + sum(factor(one) * (size + 1) / 2 for one in range(step, begun))
            if begun < step or abs(wanted - found) > 1e-6:
                raise Failed(
                    f"generation {number} began at step {begun} with {found}; NumPy has {wanted}, from step {step}"
                )
            step, total, size = begun, found, self._sizes[number]

    def work_at(self, number: int) -> tuple[int, int]:
        """Steps in the state with which this generation begins, and how often ranks took part in them."""
        before = [one for one in self.all_numbers() if one <= number]
        steps = [max(self._starts[one])[0] for one in before]
        parts = zip(before, steps, steps[1:], strict=False)
        return steps[-1], sum((end - begin) * self._sizes[one] for one, begin, end in parts)

    def steps(self) -> int:
        """That were done, and are in the state of the last generation."""
        return max(step for step, _ in self._starts[max(self._starts)])


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


class Horoclone(Job):
    """horoclonerun --min-np 1, on this machine or from the first of two namespaces."""

    def start(self) -> None:
        self._shared = _shared_memory()
        self._hosts = contextlib.ExitStack()
        self._process = None
        ranks = self.arguments.ranks
        words = [sys.executable, "-m", "horoclone.launch", "-np", str(ranks), "--min-np", "1"]
        environment = dict(self._environment)
        if self.arguments.hosts == 2:
            try:
                hosts = self._hosts.enter_context(Hosts(GBIT, MTU))
            except (OSError, RuntimeError) as error:
                raise Failed(f"no network namespaces here: {error}") from error
            script = self.folder.parent / "bin" / "ssh"
            script.parent.mkdir()
            script.write_text(SSH.format(python=sys.executable, name=hosts.names[1]))
            script.chmod(0o755)
            environment["PATH"] = f"{script.parent}:{environment['PATH']}"
            half = [ranks - ranks // 2, ranks // 2]
            words += ["-H", ",".join(f"{one}:{n}" for one, n in zip(hosts.addresses, half, strict=True))]
            words = hosts.command(0, words)
        # A slot that fails again and again is closed, and here all do.
        words += [
            "--blacklist-cooldown-range", "1", "1", sys.executable, *self.worker(self.arguments.framework),
        ]  # fmt: skip
        self._process = self.open(words, environment)
        self._descriptors: list[int] = []

    def wait_for(self, is_it: Callable[[int], bool], text: str) -> int:
        found = super().wait_for(is_it, text)
        assert self._process is not None
        with contextlib.suppress(OSError):
            if self.size(found) == self.arguments.ranks:
                time.sleep(0.05)  # what has ended is let go in the launcher's next turn
                self._descriptors.append(len(os.listdir(f"/proc/{self._process.pid}/fd")))
        return found

    def stop(self) -> None:
        if self._process is not None:
            self.end(self._process, signal.SIGINT)
        self._hosts.close()

    def check_nothing_is_left(self) -> None:
        super().check_nothing_is_left()
        # torch makes its own folder.
        if left := [one.name for one in self._scratch.iterdir() if not one.name.startswith("torchinductor")]:
            raise Failed(f"files were left behind: {left}")
        if left := sorted(_shared_memory() - self._shared):
            raise Failed(f"left in /dev/shm: {left}")
        counts = self._descriptors
        if counts and min(counts[-3:]) > max(counts[:3]) + 2:
            raise Failed(f"the launcher has more and more descriptors: {counts}")


def _shared_memory() -> set[str]:
    """horoclone's own names; others use the machine as well."""
    return {name for name in os.listdir("/dev/shm") if "horo" in name} if os.path.isdir("/dev/shm") else set()


class Torchrun(Job):
    """torchrun --max-restarts: every loss ends all ranks, which begin again from a file."""

    def start(self) -> None:
        words = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(self.arguments.ranks), "--max-restarts", "100000", "--monitor-interval", "0.1",
            *self.worker("torchrun", "--save-every", str(self.arguments.save_every)),
        ]  # fmt: skip
        # The store that agent and ranks share otherwise still has gloo's addresses of the ranks before: torch 2.13
        # restarts for ever with "Gloo connectFullMesh failed ... Connection refused".
        environment = {**self._environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._process: subprocess.Popen[str] | None = None
        self._process = self.open(words, environment)

    def stop(self) -> None:
        if self._process is not None:
            self.end(self._process, signal.SIGINT)


class Torchft(Job):
    """A lighthouse and one replica for each rank; who has died is started anew at once, as an agent would do."""

    def start(self) -> None:
        self._stopping = False
        self._all: list[subprocess.Popen[str]] = []
        python = self.arguments.torchft_python
        lighthouse = Path(python).parent / "torchft_lighthouse"
        if not lighthouse.exists():
            raise Failed(f"{lighthouse} does not exist; --torchft-python names an interpreter with torchft")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        words = [
            str(lighthouse), "--bind", f"[::]:{port}", "--min_replicas", "1", "--join_timeout_ms", "10000",
        ]  # fmt: skip
        words += [
            "--quorum_tick_ms", "10", "--heartbeat_timeout_ms", str(self.arguments.torchft_heartbeat_ms),
        ]  # fmt: skip
        self._command = [python, *self.worker("torchft", "--lighthouse", f"http://127.0.0.1:{port}")]
        self._open(words)
        for _ in range(self.arguments.ranks):
            self._open(self._command)

    def _open(self, words: list[str]) -> None:
        self._all.append(self.open(words, {**self._environment, "RUST_LOG": "warn"}))

    def over(self, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        with self._news:
            if not self._stopping and code == -signal.SIGKILL:
                self._open(self._command)
            elif not self._stopping:
                self._ended = f"a process ended with code {code}"
                self._news.notify_all()

    def stop(self) -> None:
        with self._news:
            self._stopping = True
        for process in self._all:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._all:
            process.wait(30.0)
