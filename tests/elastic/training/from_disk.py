"""A script for test_recovery.py: steps of an allreduce whose state is saved to disk at every fifth commit.

argv: the directory of the saves, the number of steps, and the step before which the process that starts as rank 1 is
killed (0: none) unless the file `killed` is there. Each process says where its state came from.
FROM_DISK_FULL=1: rank 0's disk is full from the tenth step on. FROM_DISK_TIMEOUT: seconds for one save. FROM_DISK_UNTIL: the
generation without which it does not end.
"""

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np

import horoclone as hvd
from horoclone.elastic.generation import generation
from horoclone.elastic.recovery import last_recovery
from horoclone.elastic.run import run
from horoclone.elastic.state import ObjectState


def main(path: Path, steps: int, kill_at: int) -> None:
    hvd.init()
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=np.zeros(1000), seen=[])
    timeout_s = float(os.environ.get("FROM_DISK_TIMEOUT", "600"))
    until = int(os.environ.get("FROM_DISK_UNTIL", "1"))
    state.checkpoint(path / "saves", every=5, keep=2, timeout_s=timeout_s)

    @run
    def train(state: ObjectState) -> None:
        first = True
        while first or state.step < steps or generation().number < until:
            if (
                state.step + 1 == kill_at
                and os.environ["HOROVOD_RANK"] == "1"
                and not (path / "killed").exists()
            ):
                (path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == 10 and hvd.rank() == 0 and "FROM_DISK_FULL" in os.environ:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            state.total += hvd.allreduce(np.ones(1000), name="ones", op=hvd.Average)
            state.step += 1
            state.seen.append(state.step)
            state.commit()
            if first:
                print(
                    f"recovery {json.dumps(dataclasses.asdict(last_recovery()))} at {state.step - 1}",
                    flush=True,
                )
                first = False
            time.sleep(0.02)

    train(state)
    assert state.seen == list(range(1, state.step + 1)) and (state.total == state.step).all(), state.seen
    print(f"done {state.step}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
