"""An argument of the wrong type: every operation on arrays says which one it is, what was given, and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import load, ranks

import horoclone as hvd

shared = load(Path(__file__).parents[1] / "argument_types.py", "argument_types")


@ranks(2)
def test_operations_on_arrays() -> None:
    def array() -> dict[str, Any]:
        return {"array": np.ones(4, np.float32)}

    def arrays() -> dict[str, Any]:
        return {"arrays": [np.ones(4, np.float32), np.ones(2)]}

    def rooted() -> dict[str, Any]:
        return {**array(), "root_rank": hvd.rank()}

    given = {
        "": dict, "allreduce": array, "allgather": array, "alltoall": array, "reducescatter": array, "grouped": arrays,
        "broadcast": rooted, "reduce": rooted, "reducescatter_": array, "gather": rooted, "scatter": rooted, "recv": array,
        "irecv": array, "send": lambda: {**array(), "dst": 0}, "isend": lambda: {**array(), "dst": 0},
        "broadcast_object": lambda: {"obj": 1, "root_rank": hvd.rank()}, "allgather_object": lambda: {"obj": 1},
    }  # fmt: skip
    shared.check(hvd, shared.ARRAYS, given)
    for call in (hvd.allreduce_, hvd.broadcast_):
        with pytest.raises(ValueError, match=r"not \[1.0\] \(a list\): np.asarray"):
            call([1.0], **({"root_rank": 0} if call is hvd.broadcast_ else {}))
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2.0] * 3, "the ranks have counted alike"
