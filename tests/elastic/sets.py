"""A worker of the elastic tests with process sets: says which of them there are in each generation, and uses them."""

from __future__ import annotations

import os
import sys
import time

import numpy as np

import horoclone as hvd
from horoclone.elastic.generation import generation

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
