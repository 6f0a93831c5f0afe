"""An argument of the wrong type: every operation on tensors of TensorFlow says which one it is, what was given, and what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from world import later, load, ranks

import horoclone as hvd

tf = later("tensorflow")
tf_hvd = later("horoclone.tensorflow")

shared = load(Path(__file__).parents[1] / "argument_types.py", "argument_types")

TENSORFLOW = {
    "allreduce": (*shared.REDUCTION, "compression"), "grouped_allreduce": (*shared.REDUCTION, "compression", "tensors"),
    "allgather": ("name", "process_set"), "grouped_allgather": ("name", "process_set", "tensors"),
    "broadcast": shared.ROOTED, "alltoall": ("splits", "name", "process_set"), "reducescatter": (*shared.SHARE, "compression"),
    "grouped_reducescatter": (*shared.SHARE, "compression", "tensors"),
}  # fmt: skip


@ranks(2)
def test_operations_on_tensorflow_tensors() -> None:
    def tensor() -> dict[str, Any]:
        return {"tensor": tf.ones(4)}

    given = {
        "": tensor, "grouped": lambda: {"tensors": [tf.ones(4), tf.ones(2)]},
        "broadcast": lambda: {**tensor(), "root_rank": hvd.rank()},
    }  # fmt: skip
    shared.check(tf_hvd, TENSORFLOW, given)
    for name in ("allreduce", "allgather", "alltoall", "reducescatter"):
        with pytest.raises((TypeError, ValueError), match=rf"{name}: tensor=<Odd> .*tf.Tensor"):
            getattr(tf_hvd, name)(shared.Odd())
    for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter"):
        with pytest.raises(TypeError, match="a list or tuple of tensors"):
            getattr(tf_hvd, name)(tf.ones((3, 2)))
    assert tf_hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy().tolist() == [2.0] * 3
