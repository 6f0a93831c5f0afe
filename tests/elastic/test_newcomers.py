"""Newcomers are given a commit while the others train, and what has changed since when they are let in."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("promoted.py")
RUN = [sys.executable, "-m", "horoclone.launch"]
IN = re.compile(r"in (\d+) rank (\d+) of (\d+) pid (\d+) step (\d+) how (\w+)")
KILLED = "was killed by SIGKILL"
DONE = re.compile(r"done (\d+) ([\d.]+) (\w+)")


class Growing:
    """A job that grows when its file of hosts is written, and trains until finish()."""

    def __init__(self, launch: Any, folder: Path, size: int, *words: object, **environment: str) -> None:
        self.hosts, self.end = folder / "hosts", folder / "end"
        self.to(size)
        flags = [
            "-np",
            size,
            "--min-np",
            1,
            "--max-np",
            4,
            "--host-discovery",
            f"file:{self.hosts}",
            "--verbose",
        ]
        command = [*RUN, *map(str, flags), sys.executable, str(WORKER), "1000000", "0.05", *map(str, words)]
        self.started = launch.start(command, env={"PROMOTED_END": str(self.end), **environment})
        self.started.until(lambda: len(self.of_generation(1)) == size)

    def to(self, size: int) -> None:
        new = self.hosts.with_suffix(".new")
        new.write_text(f"localhost:{size}")
        new.rename(self.hosts)

    def of_generation(self, number: int) -> list[tuple[str, ...]]:
        return [one for one in IN.findall(self.started.stdout) if int(one[0]) == number]

    def steps_on(self, count: int = 6) -> None:
        """Waits for so many steps more, of any rank."""
        wanted = self.started.stdout.count("step ") + count
        self.started.until(lambda: self.started.stdout.count("step ") >= wanted)

    def newcomer(self) -> int:
        """Its pid, as soon as it is started."""
        return int(
            self.started.until(lambda: re.search(r"rank 2 started on \S+, pid (\d+)", self.started.stderr))[1]
        )

    def finish(self) -> list[tuple[str, ...]]:
        """Everybody has done the same, and no step was lost or done by some ranks only."""
        self.end.touch()
        done = self.started.finish(90)
        assert done.returncode == 0 and not self.started.left_over(), done.output
        ends = DONE.findall(done.stdout)
        assert ends and len(set(ends)) == 1 and ends[0][2] == "True", done.output
        sizes = {number: int(size) for number, _, size, *_ in IN.findall(done.stdout)}
        at = {}  # as it was done last
        for step, number in re.findall(r"step (\d+) of (\d+)", done.stdout):
            at[int(step)] = max(at.get(int(step), 0), int(number))
        assert float(ends[0][1]) == sum(sizes[str(number)] for number in at.values()), done.output
        return IN.findall(done.stdout)


@pytest.mark.in_turn
@pytest.mark.parametrize("size, largest", [(2, 3), (1, 3)])
def test_newcomers_go_on_from_what_they_were_given(
    launch: Any, tmp_path: Path, size: int, largest: int
) -> None:
    """The model changes with each step: all of it is sent again when they are let in, and by nobody but rank 0."""
    job = Growing(launch, tmp_path, size, 1_000_000, "plain")
    job.to(largest)
    job.started.until(lambda: job.of_generation(2))
    second = [one for one in job.finish() if one[0] == "2"]
    assert len(second) == largest, "they come in one generation"
    assert {one[5] for one in second} == {"replica"} and len({one[4] for one in second}) == 1


def test_where_a_callback_may_change_the_state_everything_is_sent(launch: Any, tmp_path: Path) -> None:
    job = Growing(launch, tmp_path, 2)
    job.to(3)
    job.started.until(lambda: job.of_generation(2))
    assert {one[5] for one in job.finish() if one[0] == "2"} == {"sync"}


@pytest.mark.in_turn
@pytest.mark.parametrize("delay_s", [0.4, 0.0, 0.8])
def test_a_newcomer_that_is_killed_while_it_waits_costs_nobody_anything(
    launch: Any, tmp_path: Path, delay_s: float
) -> None:
    job = Growing(launch, tmp_path, 2, 1_000_000, "plain")
    job.to(3)
    pid = job.newcomer()
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    job.started.until(lambda: KILLED in job.started.stderr)
    job.steps_on()
    job.finish()


def test_where_the_commit_does_not_arrive_another_generation_begins(launch: Any, tmp_path: Path) -> None:
    """The others train already, and lose no step."""
    fault = "elastic.replica.wait=raise:PeerLost@1#2"
    job = Growing(launch, tmp_path, 2, 1_000_000, "plain", HOROCLONE_FAILPOINTS=fault)
    job.to(3)
    job.started.until(lambda: len(job.of_generation(3)) == 3)
    assert len(job.of_generation(2)) == 2, "the newcomer did not train"
    assert {one[5] for one in job.finish() if one[0] == "3"} == {"sync"}


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "fault",
    [
        "elastic.run.between=kill#0",  # who gives the state, with what has changed on its way
        "init.told=kill@2#0",
        "elastic.run.reset=kill#0",
        "init.told=kill@1#2",  # the newcomer, and those that come in its place
        "init.connected=kill@1#2",
        "elastic.replica.wait=kill@1#2",
        "elastic.replica.taken=kill@1#2",
        "elastic.sync.done=kill@2#1",  # the others train already
        "elastic.replica.wait=delay:0.5#2;elastic.sync.done=kill@2#0",
    ],
)
def test_who_is_killed_when_a_newcomer_is_let_in_takes_no_step_along(
    launch: Any, tmp_path: Path, fault: str
) -> None:
    job = Growing(launch, tmp_path, 2, 1_000_000, "plain", HOROCLONE_FAILPOINTS=fault)
    job.to(3)
    job.started.until(lambda: KILLED in job.started.stderr)
    job.steps_on()
    job.finish()
