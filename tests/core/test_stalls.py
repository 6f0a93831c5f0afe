"""Stall reports: whom they name, what the late rank is doing, when they come and when the job ends; who is slow."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest
from worker_pool import say, wait_for_file
from world import ranks

import horoclone as hvd

SOON = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}


def wait_until_reported(how, reported):
    """Rank 1 comes late, in one of several ways: when there is the file that says that its absence was reported."""
    if how == "python":
        wait_for_file(reported)
    elif how == "extension":
        reading, writing = os.pipe()

        def end_the_wait():
            wait_for_file(reported)
            os.write(writing, b"x")

        threading.Thread(target=end_the_wait).start()
        ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)  # without the GIL
    else:
        while not os.path.exists(reported):
            ctypes.PyDLL(None).usleep(50_000)  # in C and with the GIL


def come_late(how, reported):
    hvd.init()
    hvd.allreduce(np.ones(2), name="before")
    say(running=True)
    if hvd.rank() == 1:
        wait_until_reported(how, reported)
    hvd.allreduce(np.ones(2), name="late")
    say(right=True)


def ends_after_report(team, pattern, reported):
    """Rank 0's output, in which there is this. Then rank 1 comes, and all ranks end."""
    team.wait_for_output(0, pattern)
    reported.touch()
    assert team.wait() == [0] * team.size, team.outputs()
    return team.output(0)


@pytest.mark.parametrize(
    ("how", "shared"),
    [
        ("python", "0"),
        *((how, "1") for how in ("extension", "extension with the GIL")),
        pytest.param("python", "1", marks=pytest.mark.long(3)),
        *(
            pytest.param(how, "0", marks=pytest.mark.long(3))
            for how in ("extension", "extension with the GIL")
        ),
    ],
)
def test_the_report_shows_what_the_late_rank_does(worker_pool, tmp_path, how, shared):
    reported = tmp_path / "reported"
    env = {**SOON, "HOROCLONE_SHARED_MEMORY": shared}
    team = worker_pool(come_late, 3, env=env, how=how, reported=str(reported))
    missing = r"allreduce\.late \(\d+ s\): missing rank 1; ready ranks 0,2"
    report = ends_after_report(team, rf"{missing}[^\0]*in come_late", reported)
    assert "rank 1 has nothing pending; its last call was allreduce 'before'" in report, report
    assert "in wait_until_reported" in report, report
    assert "rank 2 " not in report.replace("[rank 2]", ""), "a rank that waits is not late"


def wait_for_each_other():
    hvd.init()
    try:
        if hvd.rank() == 0:
            hvd.allreduce(np.ones(2), name="a")
        else:
            wait_in_b()
    except hvd.HorovodInternalError as error:
        say(text=str(error))


def wait_in_b():
    hvd.allreduce(np.ones(2), name="b")


def test_two_ranks_that_wait_in_different_collectives_are_both_shown(worker_pool):
    env = {**SOON, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    teams = [
        worker_pool(wait_for_each_other, 2, env={**env, "HOROCLONE_SHARED_MEMORY": shared})
        for shared in ("1", "0")
    ]
    for team in teams:
        assert team.wait() == [0, 0], team.outputs()
        for rank in range(2):  # the job's end says it on every rank
            text = team.said(rank, "text")[0]["text"]
            assert "STALL_SHUTDOWN_TIME_SECONDS" in text, text
            assert "allreduce.a" in text and "allreduce.b" in text, text
            assert "rank 0 waits in allreduce 'a'" in text and "rank 1 waits in allreduce 'b'" in text, text
            assert "in wait_in_b" in text and text.count("in wait_for_each_other") == 2, text


def test_reports_can_be_switched_off(worker_pool, tmp_path):
    reported = tmp_path / "reported"
    env = {**SOON, "HOROVOD_STALL_CHECK_DISABLE": "1"}
    team = worker_pool(come_late, 2, env=env, how="python", reported=str(reported))
    team.wait_for(0, "running")
    time.sleep(1.2)
    reported.touch()
    assert team.wait() == [0, 0] and "missing rank 1" not in team.output(0), team.outputs()


def test_stacks_can_be_switched_off(worker_pool, tmp_path):
    reported = tmp_path / "reported"
    env = {**SOON, "HOROCLONE_STALL_STACKS": "0"}
    team = worker_pool(come_late, 2, env=env, how="python", reported=str(reported))
    assert "wait_until_reported" not in ends_after_report(team, "missing rank 1", reported), team.outputs()


def keep_own_handlers(reported):
    """Every real-time signal has a handler of the program's before init: none is taken, and nothing is raised."""
    heard = []
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, lambda number, frame: heard.append(number))
    come_late("python", reported)
    say(heard=heard)


def take_over_later(reported):
    hvd.init()
    for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
        signal.signal(number, signal.SIG_DFL)  # would end the process
    come_late("python", reported)


@pytest.mark.parametrize("body", [keep_own_handlers, take_over_later])
def test_a_program_that_uses_the_signals_keeps_them(worker_pool, tmp_path, body):
    reported = tmp_path / "reported"
    team = worker_pool(body, 2, env=SOON, reported=str(reported))
    ends_after_report(team, "its stack is not available", reported)
    assert all(not said["heard"] for rank in range(2) for said in team.said(rank, "heard"))


def stop_in_the_middle():
    hvd.init()
    hvd.allreduce(np.ones(2), name="before")
    if hvd.rank() == 1:
        say(stops=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.allreduce(np.ones(2), name="late")


def test_a_stopped_rank_has_not_answered(worker_pool):
    team = worker_pool(stop_in_the_middle, 2, env=SOON)
    team.wait_for(1, "stops")
    team.wait_for_output(0, r"rank 1 has not answered \(stopped\? very busy\?\)")
    team.send(1, signal.SIGCONT)
    assert team.wait() == [0, 0], team.outputs()


@ranks(3)
def test_metrics_name_the_slowest_rank():
    for i in range(5):
        if hvd.rank() == 2:
            time.sleep(0.05)
        hvd.allreduce(np.ones(2), name=f"t{i}")
    facts = hvd.metrics()
    hvd.barrier()
    assert facts["operations"] >= 5
    if hvd.rank() == 0:
        by_rank = {one["rank"]: one for one in facts["last_ready"][0]}
        assert by_rank[2]["times"] >= 5 and by_rank[2]["seconds"] > 0.2, facts
        assert facts["slowest"][0] == 2
