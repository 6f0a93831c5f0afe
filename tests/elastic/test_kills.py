"""Elastic jobs under horoclonerun: ranks are killed wherever they are, and the others go on with the right sums."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("steps.py")
RUN = [sys.executable, "-m", "horoclone.launch"]
STARTED = re.compile(r"rank \d+ started on localhost, pid (\d+)")


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "rounds",
    [
        [[0], [1, 2]],
        [[1], [3]],
        [[0, 3]],
        [[0, 1, 2]],
    ],
    ids=str,
)
def test_survivors_go_on_and_the_slots_get_new_workers(elastic: Any, rounds: list[list[int]]) -> None:
    job = elastic(["-np", 4, "--min-np", 1])
    pids, number = job.whole(1), 1
    for victims in rounds:
        job.steps_in(number)
        for rank in victims:
            kill(pids[rank])
        survivors = [pid for rank, pid in sorted(pids.items()) if rank not in victims]
        next_ones = job.whole(number + 1)
        assert [next_ones[rank] for rank in range(len(survivors))] == survivors, (
            "old members first, in their order"
        )
        pids = job.of_size(4, after=number)
        number = job.newest()
        assert [pids[rank] for rank in range(len(survivors))] == survivors
    job.finish()


def test_who_raises_is_not_waited_for_until_its_interpreter_has_ended(elastic: Any) -> None:
    """Which takes seconds with a large framework. Where it ends after the others have finished, the job has not failed."""
    job = elastic(["-np", 3, "--min-np", 2], STEPS_RAISES="1")
    assert job.whole(2).keys() == {0, 1}
    job.steps_in(2)
    assert "ValueError: a bad batch" in job.finish().output


def test_a_worker_that_is_killed_before_it_came_is_replaced(elastic: Any) -> None:
    job = elastic(["-np", 3, "--min-np", 2, "--verbose"])
    pattern = re.compile(r"rank 1 started on localhost, pid (\d+)")
    pid = int(job.wait(lambda: pattern.search(job.started.stderr), "a start").group(1))
    kill(pid)
    assert len(job.whole(1)) == 3
    job.finish()


def test_one_is_lost_when_all_are_connected_and_init_has_not_returned(elastic: Any) -> None:
    job = elastic(["-np", 4, "--min-np", 1], STEPS_DIES_IN_INIT="2")
    first = job.whole(1)
    job.step(3)
    kill(first[0])
    third = job.whole(3)
    assert [third[rank] for rank in (0, 1)] == [first[1], first[3]]
    done = job.finish()
    assert "generation 2 could not be connected: allgather" in done.stderr and "Traceback" not in done.stderr


def test_when_all_are_lost_the_job_ends_with_the_report_of_the_first(elastic: Any) -> None:
    job = elastic(["-np", 2, "--min-np", 1])
    first = job.whole(1)
    job.step(2)
    for pid in first.values():
        kill(pid)
    done = job.finish(code=137)
    assert "was killed by SIGKILL" in done.stderr and "root cause" in done.stderr
    assert "Horovod detected that one or more processes exited with non-zero status" in done.stderr


def test_the_job_grows_and_shrinks_with_what_the_script_says(elastic: Any, tmp_path: Path) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "find.sh"
    hosts.write_text("localhost:2\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    job = elastic(["-np", 2, "--min-np", 1, "--host-discovery-script", script])
    first = job.whole(1)
    hosts.write_text("localhost:4\n")
    grown = job.of_size(4)
    assert [grown[0], grown[1]] == [first[0], first[1]]
    before = job.newest()
    hosts.write_text("localhost:1\n")
    assert job.of_size(1, after=before) == {0: first[0]}
    job.finish()


def test_a_silent_worker_is_given_up_and_refused_when_it_wakes(elastic: Any) -> None:
    job = elastic(
        ["-np", 3, "--min-np", 1],
        HOROCLONE_LIVENESS_ERROR_S="2",
        HOROCLONE_LIVENESS_WARN_S="1",
        HOROCLONE_LIVENESS_PROBE_S="0.5",
    )
    first = job.whole(1)
    job.step(5)
    kill(first[1], signal.SIGSTOP)
    back = job.of_size(3, after=1)
    assert (back[0], back[1]) == (first[0], first[2]) and back[2] != first[1]
    job.finish()


@pytest.mark.in_turn
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_ends_every_worker(elastic: Any, number: int, code: int) -> None:
    job = elastic(["-np", 2, "--min-np", 1])
    job.whole(1)
    job.started.process.send_signal(number)
    done = job.started.finish(20)
    assert done.returncode == code and not job.started.left_over(), done.output


KILLS = 12
SEEDS = int(os.environ.get("HOROCLONE_TEST_ELASTIC_SEEDS", "3"))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(more, marks=pytest.mark.long(20)) for more in range(1, SEEDS))]
)
def test_random_kills_at_random_moments_change_no_sum(elastic: Any, seed: int) -> None:
    """Also while generations form, workers start and the job grows; one of the newest generation is always spared, and
    nobody is killed at the end, where no generation is left to go on."""
    chance = random.Random(seed)
    job = elastic(["-np", 4, "--min-np", 1, "--verbose", "--blacklist-cooldown-range", 1, 1], pause_s=0.01)
    job.whole(1)
    kills, deadline = 0, time.monotonic() + 60
    while kills < KILLS:
        assert time.monotonic() < deadline, job.started.stdout
        time.sleep(chance.choice([0.0, 0.005, 0.02, 0.1, 0.4]))
        newest = job.generations().get(job.newest(), {})
        spared = newest.get(min(newest, default=0))
        pids = [int(pid) for pid in STARTED.findall(job.started.stderr)]
        alive = [pid for pid in pids if pid != spared and Path(f"/proc/{pid}/stat").exists()]
        if alive and spared:
            with contextlib.suppress(ProcessLookupError):
                kill(chance.choice(alive))
            kills += 1
    job.steps_in(job.newest())
    job.finish(timeout_s=60)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "victim, smallest, kept, dropped",
    [
        (0, 1, "{1: [0, 1]}", "(1,)"),  # of [0, 1] and [1, 2] the second is left, as [0, 1]
        (3, 1, "{1: [0, 1], 2: [1, 2]}", "()"),
        # The new worker names the same sets.
        (3, 4, "{1: [0, 1], 2: [1, 2]}", "()"),
        (0, 4, "{}", "(1, 2)"),  # the new worker names [0, 1], the others have it no more
    ],
)
def test_a_process_set_lives_as_long_as_all_its_ranks(
    launch: Any, watch: Any, victim: int, smallest: int, kept: str, dropped: str
) -> None:
    sets = WORKER.with_name("sets.py")
    started = launch.start([*RUN, "-np", "4", "--min-np", str(smallest), sys.executable, sets, "both"])
    pattern = re.compile(rf"generation 1 {victim} (\d+) sets \{{1: \[0, 1\], 2: \[1, 2\]\}}")
    job = watch(started)
    job.wait(lambda: len(re.findall("generation 1 ", started.stdout)) == 4, "the first generation")
    kill(int(job.wait(lambda: pattern.search(started.stdout), "the victim").group(1)))
    done = started.finish(60)
    assert done.returncode == 0, done.output
    second = [line for line in done.stdout.splitlines() if "generation 2 " in line]
    assert len(second) == (3 if smallest == 1 else 4), done.output
    for line in second:
        is_new = smallest == 4 and "generation 2 3 " in line
        assert f"sets {kept} dropped {'()' if is_new else dropped}" in line, done.output


def test_sets_that_were_being_registered_when_a_rank_was_lost_are_registered_again(
    launch: Any, tmp_path: Path
) -> None:
    sets = WORKER.with_name("sets.py")
    flags = ["-np", "4", "--min-np", "4"]
    done = launch([*RUN, *flags, sys.executable, sets, "both", tmp_path / "dead"], timeout_s=60)
    second = [line for line in done.stdout.splitlines() if "generation 2 " in line]
    assert len(second) == 4 and "generation 1 " not in done.stdout, done.output
    assert all("sets {1: [0, 1], 2: [1, 2]} dropped ()" in line for line in second), done.output


def test_without_a_host_the_job_waits_and_then_says_so(launch: Any, tmp_path: Path) -> None:
    flags = ["-np", "2", "--min-np", "1", "--host-discovery-script", "true", "--elastic-timeout", "1"]
    done = launch([*RUN, *flags, "true"], check=False, timeout_s=30)
    assert done.returncode == 1 and "no host had a free slot for 1 s" in done.stderr, done.output


def test_a_worker_that_reaches_no_commit_leaves_when_its_time_is_over(elastic: Any) -> None:
    job = elastic(["-np", 2, "--min-np", 1], pause_s=1.5, HOROCLONE_NOTICE="0.2")
    first = job.whole(1)
    job.step(1)
    time.sleep(0.3)  # the commit of the step; the next one is a second away
    kill(first[1], signal.SIGTERM)
    job.says("there was no commit; this process leaves")
    job.finish(timeout_s=30)


@pytest.mark.long(40)
def test_many_kills_cost_the_launcher_no_descriptor(elastic: Any) -> None:
    job = elastic(["-np", 2, "--min-np", 1], pause_s=0.01)
    folder = Path(f"/proc/{job.started.process.pid}/fd")
    counts = []
    number = 0
    for _ in range(6):
        pids = job.of_size(2, after=number)
        number = job.newest()
        time.sleep(0.3)
        counts.append(len(list(folder.iterdir())))
        kill(pids[1])
    assert max(counts[1:]) <= counts[1] + 1, counts
    job.started.process.send_signal(signal.SIGINT)
    job.started.finish(10)


def test_under_horovods_name_the_first_failure_closes_the_host(launch: Any, watch: Any) -> None:
    code = "import sys; from horoclone.launch.cli import main; sys.exit(main(program='horovodrun'))"
    started = launch.start(
        [sys.executable, "-c", code, "-np", "2", "--min-np", "1", sys.executable, WORKER, "1000"]
    )
    job = watch(started)
    first = job.whole(1)
    kill(first[1])
    done = job.finish(code=137)
    assert "host localhost is not used any more: a worker on it has failed" in done.stderr, done.output


NESTED = """
import subprocess, sys
import numpy as np
import horoclone as hvd
hvd.init()
code = "import horoclone as hvd; hvd.init(); print('inner', hvd.rank(), hvd.size())"
if hvd.rank() == 0:
    subprocess.run([sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, "-c", code], check=True)
hvd.barrier()
"""


def test_a_worker_may_start_a_job_of_its_own_that_is_not_elastic(launch: Any) -> None:
    done = launch([*RUN, "-np", "2", "--min-np", "1", sys.executable, "-c", NESTED], timeout_s=60)
    assert "inner 0 2" in done.stdout and "inner 1 2" in done.stdout


def test_the_variable_alone_makes_no_job_elastic(launch: Any) -> None:
    code = "import horoclone as hvd; hvd.init(); from horoclone.elastic.generation import generation; print(generation())"
    done = launch([sys.executable, "-c", code], env={"HOROVOD_ELASTIC": "1"}, timeout_s=60)
    assert "HOROVOD_ELASTIC=1 has no effect" in done.stderr
    assert "Generation(number=1, rank=0, size=1, newcomers=(0,), commit_root=0, commit=0" in done.stdout
