"""Jobs whose launcher is killed: their ranks end with it, or go on without it under one of themselves."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from horoclone.launch.elastic_job import needs_majority
from horoclone.launch.usage import LaunchError

WORKER = Path(__file__).with_name("steps.py")
RUN = [sys.executable, "-m", "horoclone.launch"]
QUICK = {
    "HOROCLONE_LIVENESS_ERROR_S": "2", "HOROCLONE_LIVENESS_WARN_S": "1", "HOROCLONE_LIVENESS_PROBE_S": "0.5",
}  # fmt: skip
SURVIVE = "--survive-launcher"
TERM = 48  # bits of a generation's number above which takeovers are counted


def lose_launcher(job: Any) -> None:
    job.is_alone = True
    job.started.process.kill()
    assert job.started.process.wait(10) == -signal.SIGKILL


def lose_launcher_and_follow(job: Any, others: int) -> None:
    """Until all have found rank 0: of who is lost before, only its silence tells, for which 15 s are waited."""
    lose_launcher(job)
    job.says("this process is the membership coordinator now")
    found = "the launcher is gone; rank 0 of generation 1 is the membership coordinator now"
    job.wait(lambda: job.started.stderr.count(found) >= others, f"{others} who follow rank 0")


def wait_for_end(job: Any, timeout_s: float = 60) -> None:
    """The launcher is dead: the ranks, and who carries their output, end by themselves. The sums are right."""
    job.end()
    left = job.started.left_over(timeout_s)
    assert not left, f"{left}\n{job.started.stdout}\n{job.started.stderr}"
    job.check_the_sums()


@pytest.mark.parametrize(
    ("quorum", "one_host", "counts"),
    [("", True, False), ("", False, True), ("any", False, False), ("majority", True, True)],
)
def test_votes_count_where_a_network_can_be_cut_unless_told_otherwise(
    quorum: str, one_host: bool, counts: bool
) -> None:
    assert needs_majority(quorum, one_host) is counts
    with pytest.raises(LaunchError, match="neither majority nor any"):
        needs_majority("most", one_host)


def test_without_the_flag_the_ranks_end_with_the_launcher(elastic: Callable[..., Any]) -> None:
    job = elastic(["-np", 2, "--min-np", 1])
    job.whole(1)
    lose_launcher(job)
    assert not job.started.left_over(10)


def test_ranks_train_to_their_end_without_their_launcher(elastic: Callable[..., Any], tmp_path: Path) -> None:
    job = elastic(["-np", 3, "--min-np", 1, SURVIVE, "--output-filename", tmp_path])
    job.whole(1)
    job.step(5)
    lose_launcher(job)
    job.says("this process is the membership coordinator now")
    job.steps_in(1, count=3 * 30)
    wait_for_end(job)
    assert len(job.generations()) == 1 and "lost" not in job.started.stdout, job.started.stdout
    last = max(int(step) for step in re.findall(r"step (\d+) of 1 ", job.started.stdout))
    for rank in range(3):  # in the files, too, from the first line to the last
        text = (tmp_path / f"rank.{rank}" / "stdout").read_text()
        steps = [int(step) for step in re.findall(r"^step (\d+) of 1 ", text, re.MULTILINE)]
        assert steps == list(range(1, last + 1)), text


@pytest.mark.in_turn
@pytest.mark.parametrize(("victims", "takeovers"), [([2], 1), ([0, 0], 2)])
def test_survivors_form_the_next_generation_without_the_launcher(
    elastic: Callable[..., Any], victims: Sequence[int], takeovers: int
) -> None:
    """Rank 0 is the membership coordinator then: where it is lost as well, rank 1 is the next one, and so on."""
    job = elastic(["-np", 4, "--min-np", 1, SURVIVE])
    pids = job.whole(1)
    job.step(5)
    lose_launcher_and_follow(job, 3)
    newest = 1
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
        left = [pid for rank, pid in sorted(pids.items()) if rank != victim]
        job.wait(lambda before=newest: job.newest() > before, "another generation")
        newest = job.newest()
        pids = job.whole(newest)
        assert [pids[rank] for rank in range(len(left))] == left
    assert newest >> TERM == takeovers
    wait_for_end(job)


def test_a_stopped_rank_that_wakes_up_later_ends_with_75_and_disturbs_nobody(
    launch: Any, watch: Callable[..., Any], tmp_path: Path
) -> None:
    """Nobody is left to kill it: the launcher is dead."""
    recorded, end = '"$@"; echo $? >$0/code.$HOROVOD_RANK', tmp_path / "end"
    worker = ["sh", "-c", recorded, tmp_path, sys.executable, WORKER, "1000000", "0.05"]
    command = [*RUN, "-np", "3", "--min-np", "1", SURVIVE, *map(str, worker)]
    job = watch(launch.start(command, env={**QUICK, "STEPS_END": str(end)}), end)
    pids = job.whole(1)
    job.step(5)
    lose_launcher_and_follow(job, 2)
    os.kill(pids[2], signal.SIGSTOP)
    assert job.of_size(2, after=1) == {0: pids[0], 1: pids[1]}
    os.kill(pids[2], signal.SIGCONT)
    job.wait(lambda: (tmp_path / "code.2").exists(), "the end of the stopped rank")
    wait_for_end(job)
    codes = [(tmp_path / f"code.{rank}").read_text() for rank in range(3)]
    assert codes == ["0\n", "0\n", "75\n"], job.started.stderr
    assert "nobody has heard of it any more (generation 1)" in job.started.stderr
    assert len(job.generations()) == 2, "the others were not interrupted again"
