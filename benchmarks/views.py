"""What it costs a job to be looked at: `python benchmarks/views.py`.

Many ranks compute and reduce on this machine while in turn nobody looks, and everything does: `horoclone top` in a
terminal, a browser at the dashboard, and scrapes. Time of a step, and processor time of the launcher and of top; the
launcher's of a job without these flags beside it. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import os
import pty
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from report import print_rows, ratio_text
from session import ONE_THREAD, Failed, options, run
from statistics_of import ratio_of

# Ranks that keep the machine busy: half a millisecond of arithmetic, then an allreduce of 256 KiB. Rank 0 counts.
PROGRAM = """
import struct, sys
import numpy as np
import horoclone as hvd
hvd.init()
a, gradient, steps = np.ones((64, 64), np.float32), np.ones(65536, np.float32), 0
with open(sys.argv[1], "r+b", buffering=0) as count:
    while True:
        for _ in range(100):
            a = np.tanh(a @ a)
        hvd.allreduce_(gradient, name="gradient")
        steps += 1
        if hvd.rank() == 0:
            count.seek(0)
            count.write(struct.pack("=Q", steps))
"""
SCRAPE_EVERY_S = 15.0  # what Prometheus is usually told
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--np", 64, "ranks"), ("--rounds", 9, "turns of each way"),
        ("--seconds", 10.0, "of a turn"),
    )  # fmt: skip
    return run(arguments, lambda: measure(arguments), show)


class Job:
    """A job of horoclonerun, with or without views."""

    def __init__(self, folder: Path, size: int, flags: list[str]) -> None:
        (folder / "train.py").write_text(PROGRAM)
        self.count = folder / "steps"
        self.count.write_bytes(bytes(8))
        self.said = folder / "said"
        command = [sys.executable, "-m", "horoclone.launch", "-np", str(size), *flags]
        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, sys.executable, str(folder / "train.py"), str(self.count)],
                stdout=file, stderr=file, env={**os.environ, **ONE_THREAD}, start_new_session=True,
            )  # fmt: skip

    def steps(self) -> int:
        return int.from_bytes(self.count.read_bytes()[:8], "little")

    def wait(self, steps: int, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while self.steps() < steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Failed(self.said.read_text())
            time.sleep(0.05)

    def address(self, name: str) -> str:
        found = re.search(rf"{name}: (http\S+)", self.said.read_text())
        if found is None:
            raise Failed(self.said.read_text())
        return found[1]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def processor_s(pid: int) -> float:
    """Of a process and of its children that have ended, in seconds."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, words[11:15])) * TICK_S


class Lookers:
    """A terminal with top, a browser's stream and a scraper, as threads and processes of ours."""

    def __init__(self, job: Job) -> None:
        self._over = threading.Event()
        master, slave = pty.openpty()
        self.top = subprocess.Popen(
            [sys.executable, "-m", "horoclone.launch.tool", "top", str(job.process.pid)],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"},
        )  # fmt: skip
        os.close(slave)
        self._master = master
        self.seen = {"frames": 0, "looks": 0, "scrapes": 0}
        parts = urlsplit(job.address("dashboard"))
        self._stream = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
        self._stream.request("GET", f"{parts.path}events")
        self._answer = self._stream.getresponse()
        metrics = job.address("metrics")
        self._threads = [threading.Thread(target=one, daemon=True) for one in (
            self._read_terminal, self._read_stream, lambda: self._scrape(metrics))]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def _read_terminal(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(self._master, 1 << 16):
                self.seen["frames"] += 1

    def _read_stream(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):
            for line in self._answer:
                self.seen["looks"] += line.startswith(b"event:")

    def _scrape(self, url: str) -> None:
        while not self._over.is_set():
            with urllib.request.urlopen(url, timeout=30) as answer:
                self.seen["scrapes"] += len(answer.read()) > 1000
            self._over.wait(SCRAPE_EVERY_S)

    def close(self) -> None:
        self._over.set()
        self.top.kill()
        self.top.wait(10)
        if self._stream.sock is not None:
            self._stream.sock.close()
        self._stream.close()
        os.close(self._master)


@contextlib.contextmanager
def running(size: int, flags: list[str]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), size, flags)
        try:
            job.wait(20)
            yield job
        finally:
            job.close()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    steps_s: dict[str, list[float]] = {"alone": [], "watched": []}
    # Over all turns: counted in 10 ms
    used_s = dict.fromkeys(("launcher, alone", "launcher, watched", "top"), 0.0)
    spent_s = {"alone": 0.0, "watched": 0.0}
    seen: dict[str, int] = {}
    with running(arguments.np, ["--dashboard", "--metrics-port", "0"]) as job:
        for _ in range(arguments.rounds):
            for way, times in steps_s.items():
                lookers = Lookers(job) if way == "watched" else None
                if lookers is not None:
                    time.sleep(2.0)  # top has started: that happens once
                before, first = processor_s(job.process.pid), job.steps()
                of_top = processor_s(lookers.top.pid) if lookers else 0.0
                began = time.monotonic()
                time.sleep(arguments.seconds)
                took_s, done = time.monotonic() - began, job.steps() - first
                if done < 1:
                    raise Failed(f"no step in {took_s:.1f} s; --seconds gives it more time")
                times.append(took_s / done)
                used_s[f"launcher, {way}"] += processor_s(job.process.pid) - before
                spent_s[way] += took_s
                if lookers is not None:
                    used_s["top"] += processor_s(lookers.top.pid) - of_top
                    seen = dict(lookers.seen)
                    lookers.close()
    with running(arguments.np, []) as job:
        before, began = processor_s(job.process.pid), time.monotonic()
        time.sleep(3 * arguments.seconds)
        without = (processor_s(job.process.pid) - before) / (time.monotonic() - began)
    cores = len(os.sched_getaffinity(0))
    share = {name: used / spent_s["alone" if "alone" in name else "watched"] for name, used in used_s.items()}
    added = share["launcher, watched"] + share["top"] - without
    return {
        "benchmark": f"{arguments.np} ranks that are looked at, {arguments.rounds} rounds of {arguments.seconds:g} s",
        "cores": cores,
        "step_ms": {way: [1e3 * one for one in times] for way, times in steps_s.items()},
        "watched_against_alone": dataclasses.asdict(ratio_of(steps_s["watched"], steps_s["alone"])),
        "of_a_core": {**share, "launcher, no views": without},
        "of_the_machine": added / cores,
        "seen_in_the_last_turn": seen,
    }


def show(result: dict[str, Any]) -> None:
    rows = [[name, f"{100 * share:.2f} %"] for name, share in result["of_a_core"].items()]
    print_rows(["processor time", "of a core"], rows)
    print(f"\nviews: {100 * result['of_the_machine']:.2f} % of the machine's {result['cores']} cores")
    times = result["step_ms"]
    print(
        f"a step: {statistics.median(times['alone']):.1f} ms alone, "
        f"{statistics.median(times['watched']):.1f} ms watched; "
        f"speed watched: {ratio_text(result['watched_against_alone'])} of alone"
    )
    print(f"seen in the last turn: {result['seen_in_the_last_turn']}")


if __name__ == "__main__":
    sys.exit(main())
