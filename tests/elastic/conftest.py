"""Jobs of steps.py under horoclonerun, and what their workers have said so far."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("steps.py")
FOR_EVER = "1000000"  # steps
RUN = [sys.executable, "-m", "horoclone.launch"]
GENERATION = re.compile(
    r"\[(\d+)\] generation (\d+) rank (\d+) of (\d+) pid (\d+) step (\d+) new \[([\d, ]*)\] commit (\d+) skip (\w+)"
)
STEP = re.compile(r"\[(\d+)\] step (\d+) of (\d+) ")
DONE = re.compile(r"\[(\d+)\] done (\d+) (\d+) (\d+) ([\d.]+)")


class ElasticRun:
    """A running job of steps.py; what its workers have said so far. end: the file whose appearance ends the training."""

    def __init__(self, started: Any, end: Path | None = None) -> None:
        self.started = started
        self._end = end
        self.is_alone = False  # the launcher was killed, and the ranks go on

    def generations(self) -> dict[int, dict[int, int]]:
        """Number -> rank -> pid of those who have said that they are in."""
        found: dict[int, dict[int, int]] = {}
        for _, number, rank, _, pid, *_ in GENERATION.findall(self.started.stdout):
            found.setdefault(int(number), {})[int(rank)] = int(pid)
        return found

    def sizes(self) -> dict[int, int]:
        return {int(number): int(size) for _, number, _, size, *_ in GENERATION.findall(self.started.stdout)}

    def wait(self, what: Callable[[], Any], text: str, timeout_s: float = 40) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            ended = not self.is_alone and self.started.process.poll() is not None
            if time.monotonic() > deadline or (ended and not what()):
                pytest.fail(f"{text}: not seen\n{self.started.stdout}\n{self.started.stderr}")
            time.sleep(0.005)
        return found

    def whole(self, number: int) -> dict[int, int]:
        """Waits until every rank of this generation, or of a later one, has said that it is in: rank -> pid."""

        def look() -> dict[int, int] | None:
            pids_of, sizes = self.generations(), self.sizes()
            for found, pids in sorted(pids_of.items()):
                if found >= number and len(pids) == sizes[found]:
                    return pids
            return None

        return dict(self.wait(look, f"generation {number}"))

    def of_size(self, size: int, after: int = 0) -> dict[int, int]:
        """Waits until every rank of a generation of this size, of a higher number than `after`, has said so."""

        def look() -> dict[int, int] | None:
            pids_of, sizes = self.generations(), self.sizes()
            for found, pids in pids_of.items():
                if found > after and len(pids) == sizes[found] == size:
                    return pids
            return None

        return dict(self.wait(look, f"a generation of {size}"))

    def newest(self) -> int:
        return max(self.generations(), default=0)

    def members(self) -> dict[int, int]:
        """Rank -> pid in the newest generation, {} until all of it have said that they are in; of one reading."""
        found = GENERATION.findall(self.started.stdout)
        newest = max((int(number) for _, number, *_ in found), default=0)
        of_newest = [one for one in found if int(one[1]) == newest]
        whole = bool(of_newest) and len(of_newest) == int(of_newest[0][3])
        return {int(rank): int(pid) for _, _, rank, _, pid, *_ in of_newest} if whole else {}

    def step(self, number: int) -> None:
        """Waits until some rank has done this step."""
        self.wait(
            lambda: any(int(step) >= number for _, step, _ in STEP.findall(self.started.stdout)),
            f"step {number}",
        )

    def steps_in(self, number: int, count: int = 2) -> None:
        """Waits until that generation, or a later one, has done so many steps."""
        self.wait(
            lambda: sum(int(of) >= number for _, _, of in STEP.findall(self.started.stdout)) >= count,
            f"{count} steps of generation {number}",
        )

    def says(self, text: str) -> None:
        """Waits until the job has said this."""
        self.wait(lambda: text in self.started.stdout + self.started.stderr, repr(text))

    def end(self) -> None:
        """The training is over after the next step."""
        assert self._end is not None, "this job ends by itself"
        self._end.touch()

    def finish(self, code: int = 0, timeout_s: float = 60) -> Any:
        """A job that is to end well, and has an end file, is told that its training is over."""
        if code == 0 and self._end is not None:
            self.end()
        done = self.started.finish(timeout_s)
        assert done.returncode == code, done.output
        left = self.started.left_over()
        assert not left, left
        if code == 0:
            self.check_the_sums()
        return done

    def check_the_sums(self) -> None:
        """The total is that of the steps as they were done last, each with the size of its generation."""
        size_at: dict[int, tuple[int, int]] = {}
        sizes = self.sizes()
        for _, step, number in STEP.findall(self.started.stdout):
            size_at[int(step)] = max(size_at.get(int(step), (0, 0)), (int(number), sizes[int(number)]))
        expected = sum((size + 1) / 2 for _, size in size_at.values())
        done = DONE.findall(self.started.stdout)
        assert done, self.started.stdout
        for _, _, size, steps, total in done:
            assert int(steps) == len(size_at) and float(total) == pytest.approx(expected, abs=1e-3)
            assert int(size) == len(done)


@pytest.fixture
def watch() -> Callable[..., ElasticRun]:
    """watch(started, end file) of a command that was started."""
    return ElasticRun


@pytest.fixture
def elastic(launch: Any, tmp_path: Path) -> Callable[..., ElasticRun]:
    """elastic(flags of horoclonerun, pause_s, VARIABLE=text) starts a job of steps.py, which trains until finish()."""

    def start(flags: Sequence[object], pause_s: float = 0.05, **environment: str) -> ElasticRun:
        end = tmp_path / "end"
        command = [*RUN, *map(str, flags), sys.executable, WORKER, FOR_EVER, str(pause_s)]
        return ElasticRun(launch.start(command, env={"STEPS_END": str(end), **environment}), end)

    return start
