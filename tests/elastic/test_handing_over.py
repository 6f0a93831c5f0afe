"""Who is to leave hands over first; hosts that are not named for a while are a pause; how a job starts, and grows less."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("odd.py")
RUN = [sys.executable, "-m", "horoclone.launch"]
HOROVODRUN = [
    sys.executable,
    "-c",
    "import sys; from horoclone.launch.cli import main; sys.exit(main(program='horovodrun'))",
]


class Handed:
    def __init__(self, job: Any, folder: Path) -> None:
        self.job, self.folder = job, folder

    def hosts(self, text: str) -> None:
        (self.folder / "new").write_text(text)
        (self.folder / "new").rename(self.folder / "hosts")

    def steps(self) -> int:
        return max((int(one) for one in re.findall(r"step (\d+) of", self.job.started.stdout)), default=0)

    def steps_on(self, count: int = 20) -> int:
        """Waits for so many steps more."""
        target = self.steps() + count
        self.job.wait(lambda: self.steps() >= target, f"step {target}")
        return self.steps()

    def finish(self) -> tuple[int, Any]:
        """The size at the end, and what was said."""
        before = self.steps()
        done = self.job.finish()
        ends = set(re.findall(r"done \d+ (\d+) (\d+) ", done.stdout))
        assert len(ends) == 1, done.output
        size, step = map(int, ends.pop())
        assert step >= before, "what was done is not lost"
        return size, done


@pytest.fixture
def handed(launch: Any, watch: Any, tmp_path: Path) -> Callable[..., Handed]:
    """handed(hosts, flags, program) starts a job; hosts: what the discovery script prints, None: there is none."""

    def start(hosts: str | None, *flags: object, program: list[str] = RUN) -> Handed:
        (tmp_path / "hosts").write_text(hosts or "")
        found = [] if hosts is None else ["--host-discovery-script", f"cat {tmp_path}/hosts"]
        worker = [sys.executable, str(WORKER), str(tmp_path), "none", "1000000"]
        command = [*program, *map(str, flags), *found, *worker]
        return Handed(watch(launch.start(command), tmp_path / "end"), tmp_path)

    return start


@pytest.mark.in_turn
@pytest.mark.parametrize("largest", [4, 2, 1])
def test_all_hosts_are_replaced_at_once_and_the_state_goes_over(
    handed: Callable[..., Handed], largest: int
) -> None:
    size = min(largest, 2)
    one = handed(f"localhost:{size}", "-np", size, "--min-np", 1, "--max-np", largest)
    first = one.job.whole(1)
    one.steps_on()
    (one.folder / "slow").touch()
    one.hosts(f"127.0.0.1:{size}")

    def alone() -> bool:
        there = set(one.job.members().values())
        return len(there) == size and there.isdisjoint(first.values())

    one.job.wait(alone, "a generation of the new host alone")
    ended, done = one.finish()
    assert ended == size and "nobody else has the state of the training: its workers go on" in done.stderr
    assert len(re.findall("has left: host localhost is not there any more", done.stderr)) == size


def test_who_is_asked_to_leave_waits_for_the_replacement_that_is_being_started(
    handed: Callable[..., Handed],
) -> None:
    one = handed(None, "-np", 2, "--min-np", 1, "-H", "localhost:2")
    first = one.job.whole(1)
    one.steps_on()
    (one.folder / "slow").touch()
    os.kill(first[0], signal.SIGKILL)
    assert one.job.whole(2) == {0: first[1]}
    time.sleep(0.5)  # the replacement imports its modules
    os.kill(first[1], signal.SIGTERM)
    one.job.wait(lambda: "has left: SIGTERM" in one.job.started.stderr, "the leave")
    one.steps_on()
    _, done = one.finish()
    members = one.job.members().values()
    assert members and first[1] not in members, done.output


@pytest.mark.long(8)
def test_who_is_asked_to_leave_while_it_waits_for_a_replacement_stays_for_it(
    handed: Callable[..., Handed],
) -> None:
    one = handed(None, "-np", 2, "--min-np", 2, "--max-np", 2, "-H", "localhost:3")
    first = one.job.whole(1)
    one.steps_on()
    (one.folder / "slow").touch()
    os.kill(first[0], signal.SIGKILL)
    time.sleep(0.7)  # too few are left: it waits for another generation
    os.kill(first[1], signal.SIGTERM)
    one.job.wait(lambda: "has left: SIGTERM" in one.job.started.stderr, "the leave")
    one.job.of_size(2, after=2)
    one.steps_on()
    one.finish()


def test_hosts_that_nobody_names_for_a_while_are_a_pause(handed: Callable[..., Handed]) -> None:
    one = handed("localhost:2\n", "-np", 2, "--min-np", 2, "--max-np", 2)
    first = one.job.whole(1)
    one.steps_on()
    one.hosts("")
    one.job.wait(lambda: "its workers go on until others have it" in one.job.started.stderr, "the words")
    one.hosts("localhost:2\n")
    time.sleep(2)  # discovery looks once a second
    one.steps_on()
    size, _ = one.finish()
    assert size == 2 and set(one.job.members().values()) == set(first.values())


@pytest.mark.long(10)
def test_hosts_that_nobody_names_any_more_end_the_job_after_the_timeout(
    handed: Callable[..., Handed],
) -> None:
    one = handed("localhost:2\n", "-np", 2, "--min-np", 1, "--elastic-timeout", 4)
    one.job.whole(1)
    one.hosts("")
    done = one.job.started.finish(60)
    assert done.returncode == 1 and not one.job.started.left_over(), done.output
    assert "for 4 s nobody came to whom the state of the training could be handed over" in done.stderr


@pytest.mark.long(8)
def test_under_horovods_name_a_lost_host_is_one_reset(handed: Callable[..., Handed]) -> None:
    flags = ["-np", 4, "--min-np", 1, "-H", "localhost:2,127.0.0.1:2"]
    one = handed(None, *flags, program=HOROVODRUN)
    first = one.job.whole(1)
    one.steps_on()
    os.kill(first[1], signal.SIGKILL)
    assert one.job.whole(2) == {0: first[2], 1: first[3]}
    one.steps_on()
    size, _ = one.finish()
    assert size == 2 and one.job.sizes() == {1: 4, 2: 2}


@pytest.mark.in_turn
@pytest.mark.parametrize("largest", [["--max-np", 3], []])
def test_a_slot_that_always_fails_at_the_start_makes_nobody_wait(
    handed: Callable[..., Handed], tmp_path: Path, largest: list[object]
) -> None:
    (tmp_path / "dies.2").touch()
    began = time.monotonic()
    one = handed(None, "-np", 3, "--min-np", 1, *largest, "-H", "localhost:3")
    assert len(one.job.whole(1)) == 2 and time.monotonic() - began < 25
    assert "slot 2 of host localhost is not used any more" in one.job.started.stderr
    one.steps_on()
    one.finish()


def test_too_few_slots_at_the_start_end_the_job_at_once(
    handed: Callable[..., Handed], tmp_path: Path
) -> None:
    (tmp_path / "dies.2").touch()
    one = handed(None, "-np", 3, "--min-np", 3, "-H", "localhost:3")
    done = one.job.started.finish(60)
    assert done.returncode == 3 and "too few slots are left for --min-np" in done.stderr, done.output
