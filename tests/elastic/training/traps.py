"""A script for test_traps.py: the process that starts as rank 0 is killed, the first that takes its place makes a
collective before run, the second does it right. argv: a folder for marks. Each line says what a process believes."""

import os
import sys
import time
from pathlib import Path

import numpy as np

import horoclone as hvd
from horoclone.common.elastic import ObjectState, run_fn
from horoclone.elastic.generation import generation
from horoclone.elastic.run import reset_world
from horoclone.objects import broadcast_object

marks = Path(sys.argv[1])


def first(name: str) -> bool:
    """Whether no process has made this mark yet."""
    try:
        (marks / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def follow_the_size() -> None:
    state.rate = 0.1 * hvd.size()


def train(state: ObjectState) -> None:
    now, began = generation(), os.environ["HOROVOD_RANK"]
    print(
        f"generation {now.number} of {hvd.size()} rank {hvd.rank()} HOROVOD_RANK {began} "
        f"HOROVOD_HOSTNAME {os.environ['HOROVOD_HOSTNAME']} rate {state.rate:.1f} mine {mine:.1f} step {state.step}",
        flush=True,
    )
    while state.step < 20 or hvd.size() < 2:
        hvd.allreduce(np.ones(3), name="step")
        state.step += 1
        state.commit()
        time.sleep(0.02)
        if began == "0" and state.step == 5 and first("killed"):
            os.kill(os.getpid(), 9)
    print(f"done {hvd.rank()} of {hvd.size()}", flush=True)


hvd.init()
if (marks / "killed").exists() and os.environ["HOROVOD_RANK"] == "0" and first("early"):
    hvd.broadcast(np.ones(3), root_rank=0, name="weights")
mine = 0.1 * hvd.size()
state = ObjectState(broadcast_object, hvd.rank, step=0, rate=mine)
state.register_reset_callbacks([follow_the_size])
run_fn(train, reset_world)(state)
