"""What kinds of results and errors Horovod's torch functions give, which scripts unpack and catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from world import ranks

torch = pytest.importorskip("torch")

import horoclone.torch as hvd  # noqa: E402


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
