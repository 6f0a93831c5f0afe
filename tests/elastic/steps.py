"""A worker of the elastic tests: steps of a NumPy allreduce, restored from the last commit when a generation is lost.

It is the loop of hvd.elastic.run in little. Every step adds the average of (rank + 1) over the ranks; the state is
(step, total). Each line says what was done; `python steps.py STEPS [SECONDS_A_STEP]`. STEPS_END: a file whose appearance
ends the training, on all ranks after the same step. STEPS_RAISES: a rank of the first generation that raises, and whose
interpreter ends when that file is there.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import horoclone as hvd
from horoclone import process_sets
from horoclone.elastic.generation import generation
from horoclone.elastic.member import leave, leave_requested, offer_commits, start_notices

STEPS, PAUSE_S = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
state: dict[str, Any] = {"step": 0, "total": 0.0}
slots: dict[int, dict[str, Any]] = {}  # two newest commits
wanted = 0
END = os.environ.get("STEPS_END")


def note(timestamp: int, update: int) -> None:
    global wanted
    wanted = timestamp


def out(*words: object) -> None:
    print(*words, flush=True)


def commit() -> bool:
    """Saves under the number of the step, then all ranks agree: on the commit, on whether somebody comes or goes, and on
    whether this was the last step, which it gives."""
    slots[state["step"]] = dict(state)
    for old in sorted(slots)[:-2]:
        del slots[old]
    offer_commits(tuple(sorted(slots)))
    is_over = END is not None and os.path.exists(END)
    newest, over = hvd.allreduce(np.array([float(wanted), float(is_over)]), op=hvd.Max, name="commit")
    if newest > generation().number:
        if reason := leave_requested():
            out("leaves", os.getpid(), reason)
            hvd.shutdown()
            leave(reason)
            sys.exit(0)
        raise hvd.HostsUpdatedInterrupt
    return bool(over)


def begin() -> None:
    """Everybody takes the state of the commit that all survivors hold."""
    now = generation()
    assert (now.rank, now.size) == (hvd.rank(), hvd.size())
    if now.commit and now.commit in slots:
        state.update(slots[now.commit])
    if not now.skip_sync:
        mine = np.array([state["step"], state["total"]], dtype=np.float64)
        step, total = hvd.broadcast(mine, root_rank=now.commit_root, name="sync")
        state.update(step=int(step), total=float(total))
    slots.clear()
    if state["step"]:
        slots[state["step"]] = dict(state)
    offer_commits(tuple(slots))
    out("generation", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state["step"],
        "new", list(now.newcomers), "commit", now.commit, "skip", now.skip_sync, f"at {time.time():.4f}")  # fmt: skip


def train() -> None:
    over = False
    while state["step"] < STEPS and not over:
        value = hvd.allreduce(np.full(1000, hvd.rank() + 1.0), op=hvd.Average, name="step")
        expected = (hvd.size() + 1) / 2
        assert np.all(value == expected), (value[:3], expected)
        state["total"] += float(value[0])
        state["step"] += 1
        out("step", state["step"], "of", generation().number, f"at {time.time():.4f}")
        over = commit()
        if (generation().number, os.environ.get("STEPS_RAISES")) == (1, str(hvd.rank())):
            atexit.register(end_with_the_others)
            raise ValueError("a bad batch")
        time.sleep(0.0 if over else PAUSE_S)


def end_with_the_others() -> None:
    while not os.path.exists(END or ""):
        time.sleep(0.01)


def die_in_the_next_init() -> None:
    """For a worker that is lost when the ranks are connected and init() has not returned yet."""
    process_sets._exchange = lambda call, mine: os.kill(os.getpid(), 9)


def main() -> None:
    if os.environ.get("STEPS_DIES_IN_INIT") == os.environ["HOROVOD_RANK"]:
        die_in_the_next_init()
    if "STEPS_ONCE" in os.environ:  # a folder: a slot that has had a worker gets no other
        Path(os.environ["STEPS_ONCE"], os.environ["HOROVOD_RANK"]).touch(exist_ok=False)
    hvd.init()
    start_notices(note)
    while True:
        try:
            begin()
            train()
            break
        except hvd.HorovodInternalError as error:
            out("lost", type(error).__name__, str(error).splitlines()[0], f"at {time.time():.4f}")
            if isinstance(error, (hvd.Mismatch, hvd.Unsupported)):
                raise
        except hvd.HostsUpdatedInterrupt:
            out("updated")
        hvd.shutdown()
        hvd.init()
    out("done", hvd.rank(), hvd.size(), state["step"], f"{state['total']:.3f}")


main()
