"""A worker of the elastic tests that trains with hvd.elastic.run on a large state, and says how it came by it.

Prints `in G rank R of N pid P step S how H took T`: H is `sync` where everything was sent, `replica` where a spare had it.
`python promoted.py STEPS SECONDS_A_STEP [ELEMENTS [plain]]`; plain: without a reset callback.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np

import horoclone as hvd
from horoclone.elastic.generation import generation
from horoclone.elastic.run import run
from horoclone.elastic.state import ObjectState
from horoclone.objects import broadcast_object

how = "replica"
plain_sync = ObjectState.sync


def sync(state: ObjectState) -> None:
    global how
    how = "sync"
    plain_sync(state)


sync.__module__ = "horoclone.told"  # it keeps what ObjectState keeps


def main() -> None:
    global how
    ObjectState.sync = sync  # type: ignore[method-assign]
    hvd.init()
    steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    elements = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
    state = ObjectState(
        broadcast_object, hvd.rank, step=0, total=0.0, model=np.zeros(elements, np.float32), sizes=[]
    )
    if len(sys.argv) < 5:
        state.register_reset_callbacks([lambda: state.sizes.append(hvd.size())])
    ended = [time.time()]

    @run
    def train(state: ObjectState) -> None:
        global how
        now, took_ms = generation(), (time.time() - ended[0]) * 1000
        print("in", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
              "how", how, f"took {took_ms:.1f}", flush=True)  # fmt: skip
        how = "replica"
        try:
            while state.step < steps:
                state.total += float(hvd.allreduce(np.ones(4), op=hvd.Sum, name="step")[0])
                state.model += 1
                state.step += 1
                print("step", state.step, "of", now.number, flush=True)
                state.commit()
                print("committed", state.step, flush=True)
                time.sleep(pause_s)
        finally:
            ended[0] = time.time()

    train(state)
    same = bool((state.model == state.step).all())
    assert not any(one.name == "hc-replica-in" for one in threading.enumerate()), "only who waits is fed"
    print("done", state.step, state.total, same, state.sizes, flush=True)


main()
