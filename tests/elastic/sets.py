"""A worker of the elastic tests with process sets: says which of them there are in each generation, and uses them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import horoclone as hvd
from horoclone import process_sets
from horoclone.elastic.generation import generation

exchange = process_sets._exchange


def die_at_the_second(call: str, mine: list[int]) -> list[list[int]]:
    """For a worker that is lost while the sets of the first generation are registered."""
    calls.append(call)
    if len(calls) == 2:
        os.kill(os.getpid(), 9)
    return exchange(call, mine)


calls: list[str] = []
if sys.argv[2:] and os.environ["HOROVOD_RANK"] == "3" and not os.path.exists(sys.argv[2]):
    Path(sys.argv[2]).touch()
    process_sets._exchange = die_at_the_second

low, high = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
hvd.init(process_sets=[low, high] if sys.argv[1] == "both" else None)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    now = generation()
    own = {one.process_set_id: one.ranks for one in (low, high) if one.process_set_id is not None}
    print(
        "generation", now.number, now.rank, os.getpid(), "sets", own, "dropped", now.dropped_sets, flush=True
    )
    try:
        for members in (low, high):
            if members.process_set_id is not None and members.included():
                value = hvd.allreduce(np.ones(3), op=hvd.Sum, name="part", process_set=members)
                assert value.tolist() == [2.0] * 3
        for _ in range(200):
            hvd.allreduce(np.ones(3), name="all")
            if now.number == 2:
                break
            time.sleep(0.05)
        break
    except hvd.HorovodInternalError:
        hvd.shutdown()
        hvd.init()
print("done", flush=True)
