"""Calls that bypass the negotiation, from Python: a loop takes that path, and whoever is late or lost in it is named."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
from worker_pool import say

import horoclone as hvd

ENOUGH = 40  # calls in a row after which a session is open


def loop(name=None, calls=ENOUGH):
    for call in range(calls):
        out = hvd.allreduce(np.full(3, hvd.rank() + call, np.float32), name=name, op=hvd.Sum)
        assert out[2] == sum(range(hvd.size())) + hvd.size() * call


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
