"""An argument of the wrong type: every operation on torch tensors says which one it is, what was given, and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world import load, ranks

import horoclone.torch as hvd

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
    shared.check(hvd, TORCH, given)
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
                getattr(hvd, name)(value, **rest)
    for name in ("grouped_allreduce", "grouped_allreduce_", "grouped_allgather", "grouped_reducescatter"):
        with pytest.raises(TypeError, match="list or tuple of torch.Tensors"):
            getattr(hvd, name)(torch.ones(3, 2))
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            getattr(hvd, name)([torch.ones(3), "abc"])
    with pytest.raises(TypeError, match=r"optimizer=.*Linear.* an optimizer of torch"):
        hvd.DistributedOptimizer(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="optimizer=None cannot be used"):
        hvd.broadcast_optimizer_state(None, 0)
    with pytest.raises(
        ValueError, match=r"params=7 \(an int\) cannot be used; params takes model.state_dict"
    ):
        hvd.broadcast_parameters(7, 0)
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


def works_after() -> bool:
    return hvd.allreduce(torch.ones(2), op=hvd.Sum, name="after").tolist() == [hvd.size()] * 2


def raised(call: Callable[[], Any]) -> Exception:
    try:
        value = call()
    except Exception as error:
        assert works_after()
        return error
    raise AssertionError(f"it gave {value!r}")


@ranks(2)
def test_wrong_arguments_raise_what_horovod_raises_and_what_they_raised_before() -> None:
    n = hvd.size()
    some = torch.ones(3)
    cases: list[tuple[Callable[[], Any], type[Exception], type[Exception]]] = [
        (lambda: hvd.allreduce(some, op=77), hvd.HorovodInternalError, ValueError),
        (lambda: hvd.grouped_allreduce([]), ValueError, ValueError),
        (lambda: hvd.grouped_allgather([]), IndexError, ValueError),
        (lambda: hvd.grouped_reducescatter([]), IndexError, ValueError),
        (lambda: hvd.allgather(torch.tensor(1.0, requires_grad=True)), IndexError, IndexError),
        (lambda: hvd.allgather(torch.tensor(1.0)), hvd.HorovodInternalError, hvd.HorovodInternalError),
        (lambda: hvd.alltoall(torch.ones(n), [-1] + [1] * (n - 1)), hvd.HorovodInternalError, ValueError),
    ]
    for call, horovods, ours in cases:
        error = raised(call)
        assert isinstance(error, horovods) and isinstance(error, ours), (error, horovods, ours)


@ranks(2)
def test_what_is_no_tensor_is_named_together_with_what_is_accepted() -> None:
    for wrong in (None, [1, 2, 3], np.ones(3)):
        for call in (
            lambda it: hvd.allreduce(it),
            lambda it: hvd.allreduce_(it, name="weights"),
            lambda it: hvd.allreduce_async_(it),
            lambda it: hvd.allgather(it),
            lambda it: hvd.broadcast(it, 0),
            lambda it: hvd.broadcast_(it, 0),
            lambda it: hvd.alltoall(it),
            lambda it: hvd.reducescatter(it),
            lambda it: hvd.grouped_allreduce([it]),
            lambda it: hvd.grouped_allgather([it]),
            lambda it: hvd.grouped_reducescatter([it]),
            lambda it: hvd.sparse_allreduce_async(it, "weights", hvd.Sum),
        ):
            error = raised(lambda call=call, wrong=wrong: call(wrong))
            assert isinstance(error, TypeError) and isinstance(error, AttributeError), error
            given = "None" if wrong is None else type(wrong).__name__
            assert given in str(error) and "torch.Tensor" in str(error), error


def test_the_names_that_horovod_exports_are_there() -> None:
    assert hvd.sycl_built() is False
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    with pytest.raises(ImportError):
        hvd.check_extension("horovod.caffe", "HOROVOD_WITH_CAFFE", __file__)
