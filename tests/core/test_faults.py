"""What happens when ranks die, stop, sleep, disagree or run out of something: each fault is made for real."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from worker_pool import held, left_over, say, traces, wait_for_file

import horoclone as hvd
from horoclone.membership.records import Loss
from horoclone.runtime import current
from horoclone.runtime.current import native

MODES = pytest.mark.parametrize("shared", [True, False], ids=["shared", "tcp"])
AT_ONCE_S = 8.0  # for the end of a process, on a busy machine
SOON = {
    "HOROCLONE_LIVENESS_PROBE_S": "0.2",
    "HOROCLONE_LIVENESS_WARN_S": "0.6",
    "HOROCLONE_LIVENESS_ERROR_S": "2",
}
BIG = 1 << 20  # elements of 4 bytes: many blocks, so that a fault hits the middle


def mode(shared, **more):
    return {"HOROCLONE_SHARED_MEMORY": "1" if shared else "0", **more}


# --- a rank that dies


def reduce_until_it_fails(name="w.3", elements=BIG):
    hvd.init()
    say(traces=traces())
    array = np.ones(elements, np.float32)
    for _ in range(0 if elements == BIG else 40):  # in shared memory the bypass is open then
        hvd.allreduce(array, op=hvd.Sum, name=name)
    say(running=True)
    try:
        while True:
            assert hvd.allreduce(array, op=hvd.Sum, name=name)[-1] == hvd.size()
    except hvd.HorovodInternalError as error:
        say(error=type(error).__name__, rank=getattr(error, "rank", None), text=str(error))
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(array, name="after")


def check_death(team, victim, number=signal.SIGKILL):
    for rank in range(team.size):
        team.wait_for(rank, "running")
    held = [team.said(rank, "traces")[0]["traces"] for rank in range(team.size)]
    time.sleep(random.uniform(0, 0.06))
    killed = team.send(victim, number)
    codes = team.wait()
    assert codes[victim] == -number
    for rank in set(range(team.size)) - {victim}:
        heard = team.said(rank, "error")[0]
        assert codes[rank] == 0, team.outputs()
        assert (heard["error"], heard["rank"]) == ("PeerLost", victim), team.outputs()
        assert f"rank {victim} (" in heard["text"] and "allreduce 'w.3'" in heard["text"], heard
        assert heard["at"] - killed < AT_ONCE_S, team.outputs()
    assert not left_over(held)


@MODES
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.long(12))])
def test_a_rank_killed_at_any_moment_is_named_at_once_and_nothing_is_left(worker_pool, shared, kills):
    for kill in range(kills):
        team = worker_pool(reduce_until_it_fails, 3, env=mode(shared), elements=(BIG, 3)[kill % 2])
        check_death(team, random.randrange(3))


@contextmanager
def held_at_its_end(pid):
    """A process that ends within is kept as one whose core is written, or whose memory is returned: for good, and with
    its connections open."""
    seize, trace_exit, event_exit, detach = 0x4206, 0x40, 6, 17
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(seize, pid, None, trace_exit):
        pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0x40000000)[1]
        libc.ptrace(detach, pid, None, None)
    assert status >> 8 == signal.SIGTRAP | event_exit << 8


def lose_a_rank():
    hvd.init()
    say(running=True)
    with pytest.raises(hvd.PeerLost, match=r"rank 1 \(.* has ended"):
        while True:
            hvd.allreduce(np.ones(1000), name="w.3")
    say(lost=current.lost)


def test_a_rank_that_takes_long_to_end_is_lost_at_once(worker_pool):
    team = worker_pool(lose_a_rank, 3)
    for rank in range(3):
        team.wait_for(rank, "running")
    with held_at_its_end(team.pids[1]):
        team.send(1, signal.SIGKILL)
        for rank in (0, 2):
            assert team.wait_for(rank, "lost")["lost"] == {"1": Loss.ENDED}
    assert team.wait() == [0, -9, 0]


def test_all_ranks_killed_leave_nothing(worker_pool):
    team = worker_pool(reduce_until_it_fails, 3)
    held = [team.wait_for(rank, "traces")["traces"] for rank in range(3)]
    assert any(one["files"] for one in held)
    for rank in range(3):
        team.wait_for(rank, "running")
    for rank in range(3):
        team.send(rank, signal.SIGKILL)
    assert team.wait() == [-9, -9, -9]
    assert not left_over(held)


def be_survived_by_a_child():
    hvd.init()
    if hvd.rank() == 1:
        libc = ctypes.CDLL(None)
        if libc.fork() == 0:  # as C code forks: no hook of Python runs, every descriptor stays open
            libc.sleep(20)
            os._exit(0)
    say(running=True)
    try:
        while True:
            hvd.allreduce(np.ones(1000), name="w.3")
    except hvd.PeerLost as error:
        say(error=type(error).__name__, rank=error.rank, text=str(error))


def test_a_killed_rank_counts_as_dead_although_a_child_that_it_forked_lives(worker_pool):
    teams = [worker_pool(be_survived_by_a_child, 2, env=mode(shared, **SOON)) for shared in (True, False)]
    for team in teams:
        team.wait_for(0, "running")
        team.wait_for(1, "running")
    killed = [team.send(1, signal.SIGKILL) for team in teams]
    try:
        for team, since, limit_s in zip(teams, killed, (AT_ONCE_S, 10.0), strict=True):
            heard = team.wait_for(0, "error", 10)
            assert heard["rank"] == 1 and heard["at"] - since < limit_s, heard
    finally:
        for team in teams:
            os.killpg(team.pids[1], signal.SIGKILL)


# --- a rank that stops, or is slow


def reduce_for(seconds, linger=0):
    """linger: how long a rank stays, without shutting down, after it has lost another."""
    hvd.init()
    say(running=True)
    began = time.monotonic()
    try:
        while hvd.allreduce(np.array([time.monotonic() - began < seconds]), op=hvd.Min, name="w.3")[0]:
            pass
        say(right=hvd.allreduce(np.arange(4.0), op=hvd.Sum).tolist() == [2.0 * n for n in range(4)])
    except hvd.PeerLost as error:
        say(error=type(error).__name__, rank=error.rank, text=str(error))
        time.sleep(linger if error.rank != hvd.rank() else 0)


@MODES
def test_a_stopped_rank_that_goes_on_in_time_costs_a_warning(worker_pool, shared):
    patient = {**SOON, "HOROCLONE_LIVENESS_ERROR_S": "20"}
    team = worker_pool(reduce_for, 2, env=mode(shared, **patient), seconds=0.3)
    team.wait_for(0, "running")
    team.wait_for(1, "running")
    team.send(1, signal.SIGSTOP)
    team.wait_for_output(0, r"rank 1 .*has not responded for \d+ s \(stopped\? swapped out\?\)")
    team.send(1, signal.SIGCONT)
    assert team.wait() == [0, 0]
    assert team.said(0, "right")[0]["right"] and team.said(1, "right")[0]["right"], team.outputs()


def test_a_rank_that_stays_stopped_is_lost_and_learns_it_when_it_goes_on(worker_pool):
    teams = [
        worker_pool(reduce_for, 3, env=mode(shared, **SOON), seconds=30, linger=2) for shared in (True, False)
    ]
    for team in teams:
        for rank in range(3):
            team.wait_for(rank, "running")
    stopped = [team.send(1, signal.SIGSTOP) for team in teams]
    for team, since in zip(teams, stopped, strict=True):
        for rank in (0, 2):
            heard = team.wait_for(rank, "error", 10)
            assert heard["rank"] == 1 and "rank 1" in heard["text"] and "has not responded" in heard["text"]
            assert "allreduce 'w.3'" in heard["text"] and 1.9 < heard["at"] - since < 12
    woken = [team.send(1, signal.SIGCONT) for team in teams]
    for team, since in zip(teams, woken, strict=True):
        heard = team.wait_for(1, "error", 10)
        assert heard["rank"] == 1 and "has not responded" in heard["text"], heard  # why the others gave it up
        assert "That is this rank: the others have given it up." in heard["text"], "not as of somebody else"
        assert heard["at"] - since < AT_ONCE_S, team.outputs()
    assert [team.wait() for team in teams] == [[0, 0, 0]] * 2


def test_with_the_real_deadlines_stops_of_one_second_pass_and_one_that_lasts_does_not(worker_pool):
    team = worker_pool(reduce_for, 2, seconds=60)
    team.wait_for(0, "running")
    team.wait_for(1, "running")
    for rank in (1, 0):
        team.send(rank, signal.SIGSTOP)
        time.sleep(1)
        team.send(rank, signal.SIGCONT)
        time.sleep(0.3)
    assert not team.said(0, "error") and not team.said(1, "error"), team.outputs()
    stopped = team.send(1, signal.SIGSTOP)
    heard = team.wait_for(0, "error", 15)
    assert heard["rank"] == 1 and 1.9 < heard["at"] - stopped < 12, heard


def test_a_rank_that_the_kernel_does_not_see_stopped_is_waited_for(worker_pool):
    team = worker_pool(reduce_for, 2, seconds=1)
    team.wait_for(0, "running")
    team.wait_for(1, "running")
    with held(team.pids[1]):
        time.sleep(3.5)
    assert "rank 1" in team.output(0) and "has not responded for 1 s" in team.output(0)
    assert team.wait() == [0, 0]
    assert team.said(0, "right")[0]["right"] and team.said(1, "right")[0]["right"], team.outputs()


def wait_for_a_slow_rank():
    hvd.init()
    hvd.barrier()
    began, used = time.monotonic(), time.process_time()
    for step in range(2):
        if hvd.rank() == 1:
            time.sleep(1.0)
        assert hvd.allreduce(np.full(1000, step), op=hvd.Sum, name="w").tolist() == [2 * step] * 1000
    say(share=(time.process_time() - used) / (time.monotonic() - began))


def test_a_slow_rank_is_no_error_and_costs_the_waiting_one_no_processor(worker_pool):
    env = {"HOROCLONE_LIVENESS_PROBE_S": "0.3"}
    teams = [worker_pool(wait_for_a_slow_rank, 2, env=mode(shared, **env)) for shared in (True, False)]
    for team in teams:
        assert team.wait() == [0, 0]
        assert team.said(0, "share")[0]["share"] < 0.2, team.outputs()
        assert "not responding" not in team.outputs()


# --- a rank that leaves


def leave(how):
    hvd.init()
    hvd.allreduce(np.ones(2), name="first")
    if hvd.rank() == 1:
        time.sleep(0.2)
        say(left=True)
        if how == "raise":
            raise ValueError("bad batch 17")
        sys.exit(3)
    try:
        hvd.allreduce(np.ones(4), name="w")
    except hvd.HorovodInternalError as error:
        say(error=type(error).__name__, text=str(error))


@MODES
@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_rank_that_raises_or_leaves_is_named_by_all_others_within_a_second(worker_pool, shared, how):
    team = worker_pool(leave, 3, env=mode(shared), how=how)
    assert team.wait() == [0, 1 if how == "raise" else 3, 0], team.outputs()
    for rank in (0, 2):
        heard = team.said(rank, "error")[0]
        assert heard["at"] - team.said(1, "left")[0]["at"] < AT_ONCE_S, team.outputs()
        expected = "rank 1 raised ValueError: bad batch 17" if how == "raise" else "rank 1"
        assert expected in heard["text"], heard
        assert how == "raise" or "shut down" in heard["text"], heard
    assert team.output(1).count("Traceback") == int(how == "raise")


def wait_with_an_alarm(torch_tensor):
    hvd.init()
    if torch_tensor:
        import torch

        import horoclone.torch as thvd

        mine, reduce = torch.ones(4), thvd.allreduce
    else:
        mine, reduce = np.ones(4), hvd.allreduce
    reduce(mine, name="first")
    if hvd.rank() == 1:

        def ring(number, frame):
            raise TimeoutError("the step took too long\nand more")

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError, match="took too long"):
            reduce(mine, name="alone")
        return
    try:
        reduce(mine, name="w")
    except hvd.HorovodInternalError as error:
        say(error=type(error).__name__, rank=getattr(error, "rank", None), text=str(error))


@pytest.mark.parametrize(
    ("torch_tensor", "size"),
    [(False, 3), pytest.param(True, 2, marks=pytest.mark.long(10))],
    ids=["array", "tensor"],
)
def test_an_exception_of_a_signal_handler_is_told_with_its_rank_its_text_and_the_call(
    worker_pool, torch_tensor, size
):
    team = worker_pool(wait_with_an_alarm, size, torch_tensor=torch_tensor)
    assert team.wait() == [0] * size, team.outputs()
    for rank in set(range(size)) - {1}:
        heard = team.said(rank, "error")[0]
        assert heard["error"] == "Aborted", heard
        assert re.search(
            r"rank 1 \(.*\) raised TimeoutError: the step took too long \(in a signal handler\) during allreduce '.*alone'",
            heard["text"],
        ), heard
        assert "and more" not in heard["text"] and "allreduce 'w'" in heard["text"], heard


# --- ranks that disagree


def name_differently(reported):
    hvd.init()
    handle = hvd.allreduce_async(np.ones(4), name="layer.1" if hvd.rank() < 2 else "layer.2")
    wait_for_file(reported)
    hvd.allreduce(np.ones(4), name="layer.2" if hvd.rank() < 2 else "layer.1")
    hvd.synchronize(handle)


def test_different_names_are_reported_with_their_ranks_and_may_come_together(worker_pool, tmp_path):
    """That they fail at the limit is in tests/core/test_stalls.py."""
    reported = tmp_path / "reported"
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
    team = worker_pool(name_differently, 3, env=env, reported=str(reported))
    expected = [
        "submitted to be reduced, gathered or broadcasted by a subset of ranks",
        r"layer\.1.*missing rank 2; ready ranks 0,1",
        r"layer\.2.*missing ranks 0,1; ready rank 2",
    ]
    team.wait_for_output(0, *expected)
    reported.touch()
    assert team.wait(20) == [0, 0, 0], team.outputs()


@pytest.mark.parametrize("after_s", [0.0, 0.03])
def test_a_rank_killed_amid_declared_buckets_between_nodes_is_named(worlds, after_s):
    worlds.run(
        3, reduce_declared_until_one_dies, dies=[2], env={"HOROCLONE_SHARED_MEMORY": "0"}, after_s=after_s
    )


def reduce_declared_until_one_dies(after_s):
    runtime, counts = native(), [10, 1 << 20]
    blocks = [runtime.allocate(4 * count) for count in counts]
    data = [np.frombuffer(block, np.float32).ctypes.data for block in blocks]
    declared = runtime.declare(["small", "large"], data, counts, [9, 9])
    persistent = hvd.metrics()["persistent"]

    def step():
        handles = [runtime.submit_declared(0, declared, bucket) for bucket in (0, 1)]
        for handle in handles:
            runtime.wait(handle)
            runtime.release(handle)

    step()
    assert hvd.metrics()["persistent"] == persistent + 2
    if hvd.rank() == 2:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(hvd.PeerLost) as lost:
        while True:
            step()
    assert lost.value.rank == 2
