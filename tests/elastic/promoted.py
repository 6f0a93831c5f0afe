"""A worker of the elastic tests that trains with hvd.elastic.run on a large state, and says how it came by it.

Prints `in G rank R of N pid P step S how H took T`: H is `sync` where everything was sent, `replica` where a spare had it;
and `fed C` where a spare was sent commit C. `python promoted.py STEPS SECONDS_A_STEP [ELEMENTS [plain]]`; plain: without a
reset callback. PROMOTED_END: a file whose appearance ends the training. PROMOTED_HOLD: one that is waited for after step 2.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import horoclone as hvd
from horoclone.elastic.generation import generation
from horoclone.elastic.run import run
from horoclone.elastic.state import ObjectState
from horoclone.objects import broadcast_object
from horoclone.runtime.replica import Feeder

how = "replica"
plain_sync = ObjectState.sync


def sync(state: ObjectState) -> None:
    global how
    how = "sync"
    plain_sync(state)


sync.__module__ = "horoclone.told"  # it keeps what ObjectState keeps
send = Feeder._send


def out(*words: object) -> None:
    """A line in one piece: two threads write."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def send_and_say(feeder: Feeder, peer: Any, replica: Any, before: Any) -> bool:
    is_whole = send(feeder, peer, replica, before)
    if is_whole:
        out("fed", replica.commit)
    return is_whole


def is_there(variable: str) -> bool:
    """The file that the variable names, if it names one."""
    return variable in os.environ and Path(os.environ[variable]).exists()


def main() -> None:
    global how
    ObjectState.sync = sync  # type: ignore[method-assign]
    Feeder._send = send_and_say  # type: ignore[method-assign]
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
        out("in", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
            "how", how, f"took {took_ms:.1f}")  # fmt: skip
        how = "replica"
        try:
            over = False
            while state.step < steps and not over:
                mine = np.array([1.0, is_there("PROMOTED_END")])
                ranks, ending = hvd.allreduce(mine, op=hvd.Sum, name="step")
                over = ending > 0
                state.total += float(ranks)
                state.model += 1
                state.step += 1
                out("step", state.step, "of", now.number)
                state.commit()
                out("committed", state.step)
                time.sleep(pause_s)
                while state.step == 2 and "PROMOTED_HOLD" in os.environ and not is_there("PROMOTED_HOLD"):
                    time.sleep(0.01)
        finally:
            ended[0] = time.time()

    train(state)
    same = bool((state.model == state.step).all())
    for feed in [one for one in threading.enumerate() if one.name == "hc-replica-in"]:
        feed.join(20)
        assert not feed.is_alive(), "only who waits is fed"
    out("done", state.step, state.total, same, state.sizes)


main()
