"""A worker of the elastic tests whose replacements are odd: another build, secret or model, or slow; or "none" of that.

python odd.py FOLDER KIND STEPS: who finds `first-RANK` in the folder takes the place of a lost one. It trains with
hvd.elastic.run, for so many steps or until there is a file `end` in the folder: each step adds the average of (rank + 1),
and says where it is. Who starts when there is a file `slow` takes a while to import its modules. A slot of which
`dies.RANK` is there ends with code 3 at once.
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
from horoclone.elastic.variables import VariablesState
from horoclone.runtime import member

FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]
STEPS = int(sys.argv[3])
if (FOLDER / f"dies.{os.environ['HOROVOD_RANK']}").exists():
    sys.exit(3)
is_odd = (FOLDER / f"first-{os.environ['HOROVOD_RANK']}").exists()
(FOLDER / f"first-{os.environ['HOROVOD_RANK']}").touch()


class Weights(VariablesState):
    """One array."""

    def __init__(self, size: int) -> None:
        self.weights = [np.zeros(size)]
        super().__init__(step=0)

    def _variables(self) -> Any:
        return self.weights

    def _read(self, variables: Any) -> list[Any]:
        return [one.copy() for one in variables]

    def _write(self, variables: Any, values: Any) -> None:
        for one, value in zip(variables, values, strict=True):
            one[:] = value


class AnotherBuild:
    """Of which the membership coordinator is told."""

    @staticmethod
    def build_info() -> str:
        return '{"build": "9.9.9+0123456789ab"}'


def train(state: Weights) -> None:
    now = generation()
    print("generation", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
          "new", list(now.newcomers), "commit", now.commit, "skip", now.skip_sync, flush=True)  # fmt: skip
    ending = 0.0
    while state.step < STEPS and not ending:
        mine = np.array([now.rank + 1.0, now.rank + 1.0, (FOLDER / "end").exists()])
        average, again, ending = hvd.allreduce(mine, op=hvd.Average, name="step")
        assert average == again == (now.size + 1) / 2, (average, again)
        state.weights[0][:3] += average
        state.step += 1
        print("step", state.step, "of", now.number, "", flush=True)
        state.commit()
        time.sleep(0.05)


def main() -> None:
    size = 4
    if is_odd and KIND == "build":
        member.core = lambda: AnotherBuild
    elif is_odd and KIND == "secret":
        os.environ["HOROCLONE_SECRET"] = "another secret of at least 16 bytes"
        os.environ.pop("HOROCLONE_SECRET_FD", None)
    elif is_odd and KIND == "model":
        size = 5
    if (FOLDER / "slow").exists():
        time.sleep(1.5)
    hvd.init()
    if is_odd and KIND == "slow":
        time.sleep(2.5)  # it makes its model; the others wait in sync
    state = Weights(size)
    run(train)(state)
    print("done", hvd.rank(), hvd.size(), state.step, f"{state.weights[0][0]:.3f}", flush=True)


main()
