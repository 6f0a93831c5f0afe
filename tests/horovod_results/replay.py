"""Runs recorded cases on one rank and writes, a JSON line each, when a case begins and how it ended.

`run_cases` is the body of a world (see tests/world.py). After every case a small allreduce shows whether the runtime still works.
A case that does not end within the limit ends the process, as does one after which nothing works; compare.py then starts the
rest anew.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from encoding import classes_of, encode
from table import suite_of

LIMIT_S = float(os.environ.get("HC_CASE_LIMIT_S", "40"))  # Horovod had 12 s on a machine of its own
HUNG, DEAD = 66, 67  # exit codes


class Line:
    """The rank's log. A case begins and ends in it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()


def framework_of(suite: str) -> str:
    return suite.split("-")[0]


def run_cases(suite: str, ranks: int, folder: str, todo: list[str]) -> None:
    """suite, ranks: of the table. folder: takes `rank<R>.jsonl`. todo: the ids to run."""
    recorded = suite_of(suite, ranks)
    torch: Any = None
    tf: Any = None
    if framework_of(suite) == "torch":
        import horovod.torch as hvd
        import torch

        torch.set_num_threads(1)
    else:
        if suite == "tf-keras":
            import tf_keras

            sys.modules["keras"] = (
                tf_keras  # as in the recording: this Horovod means Keras 2 when it says keras
            )
        import horovod.tensorflow as hvd
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(4)

    # Of the suite with dynamic sets, the recording's objects were made all the same, with the plain suite's ranks.
    ranks_of = recorded.sets
    sets = {name: hvd.ProcessSet(ranks) for name, ranks in ranks_of.items()}
    hvd.init(process_sets="dynamic" if recorded.dynamic else list(sets.values()))
    rank, size = hvd.rank(), hvd.size()
    log = Line(Path(folder) / f"rank{rank}.jsonl")

    def inputs(dtype: str, *shape: int, k: int = 0, rank: int = rank) -> Any:
        """Element i is ((3 i + 5 rank + 7 k) mod 9) - 4; without the - 4 for unsigned types; whether it is odd for bool."""
        values = (np.arange(int(np.prod(shape))) * 3 + 5 * rank + 7 * k) % 9
        if dtype == "bool":
            values = values % 2
        elif not dtype.startswith("u"):
            values = values - 4
        if torch is not None:
            whole = torch.tensor(values.tolist(), dtype=torch.int64).reshape(shape)
            return whole.to(getattr(torch, dtype))
        return tf.cast(tf.reshape(tf.constant(values.tolist(), tf.int64), shape), getattr(tf, dtype))

    def attempt(call: Any) -> Any:
        try:
            return call()
        except Exception as error:
            return {"error": classes_of(error)}

    def probe(ident: str) -> Any:
        """What an allreduce does after the case: "works", or something else."""
        try:
            ones = torch.ones(2) if torch is not None else tf.ones(2)
            total = [
                float(item) for item in np.asarray(hvd.allreduce(ones, op=hvd.Sum, name=f"probe.{ident}"))
            ]
            return "works" if total == [float(size)] * 2 else total
        except Exception as error:
            return classes_of(error)

    def too_late(ident: str) -> None:
        log.write(id=ident, end={"hang": True})
        os._exit(HUNG)

    wanted = set(todo)
    names = {
        "hvd": hvd, "torch": torch, "tf": tf, "np": np, "time": time, "os": os, "r": rank, "n": size, "sets": sets, "t": inputs,
        "attempt": attempt, "chain": classes_of, "enc": encode,
    }  # fmt: skip
    for case in recorded.cases:
        ident = case["id"]
        if ident not in wanted:
            continue
        log.write(id=ident, begin=True)
        timer = threading.Timer(LIMIT_S, too_late, [ident])
        timer.daemon = True
        timer.start()
        graph = case.get("mode") == "graph"
        space = dict(names, N=ident)
        space["F"] = (lambda f, *a: tf.function(f)(*a)) if graph else (lambda f, *a: f(*a))
        if torch is not None:
            torch.manual_seed(7)
        np.random.seed(7)
        result: dict[str, Any] = {}
        try:
            exec(compile(recorded.code_of(case), ident, "exec"), space)
            result["out"] = encode(space.get("out"))
        except Exception as error:
            result.update(error=classes_of(error), text=str(error)[:2000])
        result["after"] = probe(ident)
        timer.cancel()
        log.write(id=ident, end=result)
        if isinstance(result["after"], list) and result["after"] and isinstance(result["after"][0], str):
            os._exit(DEAD)
    hvd.shutdown()
