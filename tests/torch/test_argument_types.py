"""An argument of the wrong type: every operation on torch tensors says which one it is, what was given, and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world import load, ranks

import horoclone as hvd
import horoclone.torch as torch_hvd

shared = load(Path(__file__).parents[1] / "argument_types.py", "argument_types")

TORCH = {
    **{name: arguments for name, arguments in shared.ARRAYS.items() if not name.startswith(("grouped", "scatter"))},
    "allreduce": (*shared.REDUCTION, "compression"), "reducescatter": (*shared.SHARE, "compression"),
    **shared.calls_of("grouped_allreduce", ("", "_", "_async", "_async_"), (*shared.REDUCTION, "tensors")),
    "grouped_allreduce": (*shared.REDUCTION, "tensors", "compression"),
    **shared.calls_of("grouped_allgather", shared.TWO, ("name", "process_set", "tensors")),
    "grouped_reducescatter_async": (*shared.SHARE, "tensors"), "grouped_reducescatter": (*shared.SHARE, "tensors", "compression"),
    **shared.calls_of("scatter", shared.TWO, (*shared.ROOTED, "splits")),
}  # fmt: skip


@ranks(2)
def test_operations_on_torch_tensors() -> None:
    def tensor() -> dict[str, Any]:
        return {"tensor": torch.ones(4)}

    def tensors() -> dict[str, Any]:
        return {"tensors": [torch.ones(4), torch.ones(2)]}

    def rooted() -> dict[str, Any]:
        return {**tensor(), "root_rank": hvd.rank()}

    given = {
        "": dict, "allreduce": tensor, "allgather": tensor, "alltoall": tensor, "reducescatter": tensor,
        "grouped": tensors, "broadcast": rooted, "reduce": rooted, "gather": rooted, "scatter": rooted, "recv": tensor,
        "irecv": tensor, "send": lambda: {**tensor(), "dst": 0}, "isend": lambda: {**tensor(), "dst": 0},
        "broadcast_object": lambda: {"obj": 1, "root_rank": hvd.rank()}, "allgather_object": lambda: {"obj": 1},
    }  # fmt: skip
    shared.check(torch_hvd, TORCH, given)
    operations = [
        name for name in TORCH if "tensor" in given[max((w for w in given if name.startswith(w)), key=len)]()
    ]
    for name in operations:
        rest = (
            {"root_rank": hvd.rank()} if name.startswith(("broadcast", "reduce", "gather", "scatter")) else {}
        )
        rest = {} if name.startswith("reducescatter") else {"dst": 0} if "send" in name else rest
        for value in ([1, 2, 3], "abc", shared.Odd(), 4, np.ones(3)):
            with pytest.raises((TypeError, ValueError), match=r"torch\.Tensor|of torch"):
                getattr(torch_hvd, name)(value, **rest)
    for name in ("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter"):
        with pytest.raises(TypeError, match="list or tuple of torch.Tensors"):
            getattr(torch_hvd, name)(torch.ones(3, 2))
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            getattr(torch_hvd, name)([torch.ones(3), "abc"])
    with pytest.raises(TypeError, match=r"optimizer=.*Linear.* an optimizer of torch"):
        torch_hvd.DistributedOptimizer(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="optimizer=None cannot be used"):
        torch_hvd.broadcast_optimizer_state(None, 0)
    with pytest.raises(
        ValueError, match=r"params=7 \(an int\) cannot be used; params takes model.state_dict"
    ):
        torch_hvd.broadcast_parameters(7, 0)
    assert torch_hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3
