"""Ranks are killed that alone had something: pieces of Adam's state, a loader's position, random numbers."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

# Fifty processes that import torch: two minutes of processor time.
pytestmark = pytest.mark.long(40)
WORKER = Path(__file__).with_name("shards.py")
RUN = [sys.executable, "-m", "horoclone.launch"]
FINISHED = re.compile(
    r"finished (\d+) of (\d+) loader \{'stream': (\d+), 'at': (\d+)\} equal (\w+) near (\w+)"
)


@pytest.fixture
def shards(launch: Any, watch: Any) -> Callable[..., Any]:
    def start(
        flags: Sequence[object], steps: int, every: int, pause_s: float = 0.05, **environment: str
    ) -> Any:
        words = [*RUN, *map(str, flags), sys.executable, WORKER, str(steps), str(every), str(pause_s)]
        return watch(launch.start(words, env={"OMP_NUM_THREADS": "1", **environment}))

    return start


def begun(job: Any) -> dict[int, int]:
    """Every rank imports torch first, on a machine that may be busy."""
    job.wait(lambda: "generation 1 rank" in job.started.stdout, "a start", 120)
    return dict(job.whole(1))


def finished(job: Any, code: int = 0) -> list[tuple[str, ...]]:
    """(rank, size, stream, samples, bits equal, nearly equal) of those who have come to the end."""
    done = job.started.finish(60)
    assert done.returncode == code, done.output
    assert not job.started.left_over()
    assert "Traceback" not in done.stderr or "FileExistsError" in done.stderr, done.output
    return sorted(FINISHED.findall(done.stdout))


def test_one_of_four_is_killed_and_three_go_on(shards: Any, tmp_path: Path) -> None:
    job = shards(["-np", 4, "--min-np", 2], 24, 2, SHARDS_ONCE=str(tmp_path))
    first = begun(job)
    job.step(7)
    os.kill(first[2], signal.SIGKILL)
    second = job.whole(2)
    assert [second[rank] for rank in range(3)] == [first[0], first[1], first[3]]
    ends = finished(job)
    assert [(size, stream, near) for _, size, stream, _, _, near in ends] == [
        ("3", "100", "True"), ("3", "101", "True"), ("3", "103", "True"),
    ]  # fmt: skip
    assert all(at == "24" for _, _, _, at, _, _ in ends)
    assert "pieces of 2 [100, 101, 102, 103]" in job.started.stdout


def test_a_new_worker_takes_the_place_of_the_lost_one(shards: Any) -> None:
    job = shards(["-np", 2, "--min-np", 2], 20, 2)
    first = begun(job)
    job.step(7)
    os.kill(first[0], signal.SIGKILL)
    second = job.whole(2)
    assert second[0] == first[1]
    ends = finished(job)
    assert [(size, stream, at, equal) for _, size, stream, at, equal, _ in ends] == [
        ("2", "101", "20", "True"), ("2", "100", "20", "True"),
    ]  # fmt: skip


def test_a_rank_that_leaves_takes_nothing_along(shards: Any) -> None:
    job = shards(["-np", 3, "--min-np", 1], 24, 2)
    first = begun(job)
    job.step(5)
    os.kill(first[1], signal.SIGTERM)
    job.of_size(2, after=1)
    ends = finished(job)
    assert len(ends) == 2 and all(near == "True" and at == "24" for _, _, _, at, _, near in ends)
    assert "lost" not in job.started.stdout


def test_a_job_that_grows_and_shrinks_keeps_every_piece(shards: Any, tmp_path: Path) -> None:
    """Buckets of the survivors are cut for the ranks there are, as those of the newcomers are."""
    hosts, script, end = tmp_path / "hosts", tmp_path / "find.sh", tmp_path / "end"
    hosts.write_text("localhost:2\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    flags = ["-np", 2, "--min-np", 1, "--host-discovery-script", script]
    job = shards(flags, 10_000, 2, 0.02, SHARDS_END=str(end))
    begun(job)
    job.step(5)
    hosts.write_text("localhost:3\n")
    job.wait(lambda: 3 in job.sizes().values(), "growth", 120)
    grown = job.of_size(3)
    assert len(grown) == 3
    before = job.newest()
    hosts.write_text("localhost:1\n")
    job.of_size(1, after=before)
    end.touch()
    ends = finished(job)
    assert [(size, stream, near) for _, size, stream, _, _, near in ends] == [("1", "100", "True")]


def test_a_commit_whose_shards_were_on_their_way_does_not_count(shards: Any, tmp_path: Path) -> None:
    """Rank 1 ends in the middle of sending; its buddy has half of the shard, and all go back to the commit before."""
    job = shards(["-np", 4, "--min-np", 2], 20, 3, SHARDS_ONCE=str(tmp_path), SHARDS_DIES="1 4")
    begun(job)
    job.whole(2)
    begins = re.search(r"generation 2 rank 0 of 3 pid \d+ step (\d+) .* commit (\d+)", job.started.stdout)
    # commit 1 is that of the sync, commit 4 that of step 9, of which rank 1 sends one half
    assert begins is not None and begins.groups() == ("6", "3"), job.started.stdout
    ends = finished(job)
    assert len(ends) == 3 and all(near == "True" and at == "20" for _, _, _, at, _, near in ends)


def test_what_is_lost_comes_from_the_disk(shards: Any, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (tmp_path / "once").mkdir()
    job = shards(["-np", 4, "--min-np", 2], 20, 2, SHARDS_ONCE=str(tmp_path / "once"), SHARDS_DISK=str(disk))
    first = begun(job)
    job.step(9)
    for rank in (1, 2):
        os.kill(first[rank], signal.SIGKILL)
    ends = finished(job)
    assert [(size, equal) for _, size, _, _, equal, _ in ends] == [("2", "True")] * 2
    assert "state lost:" in job.started.stdout


@pytest.mark.parametrize("replaced", [False, True], ids=["fewer", "replaced"])
def test_local_layers_and_residuals_survive(launch: Any, watch: Any, tmp_path: Path, replaced: bool) -> None:
    words = [sys.executable, WORKER.with_name("own_parts.py"), "24", "0.05"]
    once = {} if replaced else {"OWN_ONCE": str(tmp_path)}
    flags = ["-np", "3", "--min-np", "3" if replaced else "2"]
    job = watch(launch.start([*RUN, *flags, *words], env={"OMP_NUM_THREADS": "1", **once}))
    first = begun(job)
    job.step(9)
    os.kill(first[1], signal.SIGKILL)
    second = job.whole(2)
    assert [second[0], second[1]] == [first[0], first[2]] and len(second) == (3 if replaced else 2)
    done = job.started.finish(60)
    assert done.returncode == 0 and "AssertionError" not in done.stderr, done.output
    size = len(second)
    assert [f"checked 2 {rank} of {size}" in done.stdout for rank in range(size)] == [True] * size, (
        done.output
    )
