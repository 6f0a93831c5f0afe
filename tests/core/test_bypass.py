"""Calls that bypass the negotiation, from Python: a loop takes that path, and whoever is late or lost in it is named."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
from worker_pool import say, wait_for_file
from world import ranks

import horoclone as hvd

ENOUGH = 40  # calls in a row after which a session is open


def loop(name=None, calls=ENOUGH):
    for call in range(calls):
        out = hvd.allreduce(np.full(3, hvd.rank() + call, np.float32), name=name, op=hvd.Sum)
        assert out[2] == sum(range(hvd.size())) + hvd.size() * call


@ranks(2, 3)
def test_a_loop_of_small_allreduces_takes_the_bypass():
    loop("loop")
    before = hvd.metrics()
    loop("loop", 100)
    loop(None, 100)
    after = hvd.metrics()
    assert after["bypassed"] - before["bypassed"] > 100
    assert after["request_lists_sent"] - before["request_lists_sent"] < 100


@ranks(2, 3)
def test_loops_of_the_other_operations_take_the_bypass():
    rank, size = hvd.rank(), hvd.size()
    before = hvd.metrics()["bypassed"]
    for call in range(ENOUGH):
        mine = np.full((size, 2), 10.0 * rank + call, np.float32)
        everybodys = [10.0 * r + call for r in range(size)]
        assert hvd.broadcast(mine, size - 1, name="b").tolist() == [[everybodys[-1]] * 2] * size
        assert hvd.allgather(mine[:1], name="g").tolist() == [[x] * 2 for x in everybodys]
        assert hvd.reducescatter(mine, op=hvd.Sum, name="r").tolist() == [[sum(everybodys)] * 2]
        output, counts = hvd.alltoall(mine, splits=[1] * size, name="a")
        assert output.tolist() == [[x] * 2 for x in everybodys] and list(counts) == [1] * size
        hvd.barrier()
    assert hvd.metrics()["bypassed"] - before > 3 * ENOUGH


def come_late(reported):
    hvd.init()
    loop("loop")
    if hvd.rank() == 1:
        wait_for_file(reported)
    loop("loop", 1)
    say(rounds=hvd.metrics()["bypassed"])


def test_a_rank_that_is_late_in_a_round_of_the_bypass_is_named(worker_pool, tmp_path):
    reported, env = tmp_path / "reported", {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
    team = worker_pool(come_late, 3, env=env, reported=str(reported))
    missing = r"allreduce 'loop' \(\d+ s\): missing rank 1"
    team.wait_for_output(0, missing, "rank 1 has nothing pending; its last call was allreduce 'loop'")
    reported.touch()
    assert team.wait() == [0, 0, 0], team.outputs()
    assert all(team.said(rank, "rounds")[0]["rounds"] > 10 for rank in range(3))


def die_in_a_turn():
    hvd.init()
    loop("loop")
    if hvd.rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        loop("loop", 1)
    except hvd.PeerLost as error:
        say(text=str(error), seconds=time.monotonic() - began)


def test_a_rank_that_dies_in_a_round_of_the_bypass_is_named(worker_pool):
    team = worker_pool(die_in_a_turn, 3)
    team.wait()
    for rank in (0, 2):
        said = team.said(rank, "text")[0]
        assert "rank 1" in said["text"] and said["seconds"] < 10, said
