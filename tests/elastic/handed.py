"""Worker: counts steps in an elastic state until a file "finish" is there. Who comes when there is a file "slow" takes a
while to import its modules. A slot of which "dies.NUMBER" is there ends with code 3 at once.

Arguments: a folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import horoclone as hvd
from horoclone.elastic.generation import generation
from horoclone.elastic.run import run
from horoclone.elastic.state import ObjectState

folder = Path(sys.argv[1])
if (folder / f"dies.{os.environ['HOROVOD_RANK']}").exists():
    sys.exit(3)
if (folder / "slow").exists():
    time.sleep(1.5)
hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, history=[])


@run
def train(state: Any) -> None:
    now = generation()
    print(
        f"generation {now.number} rank {now.rank} of {now.size} pid {os.getpid()} step {state.step} "
        f"new {list(now.newcomers)} commit {now.commit} skip {now.skip_sync}",
        flush=True,
    )
    ends = 0.0
    while not ends:
        assert state.history == list(range(state.step))
        ends = hvd.allreduce(np.array([float((folder / "finish").exists())]), name="ends", op=hvd.Max)[0]
        state.history.append(state.step)
        state.step += 1
        print(f"step {state.step} of {now.number} ", flush=True)
        state.commit()
        time.sleep(0.02)
    print(f"ended at {state.step} of {now.size}", flush=True)


train(state)
