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
def test_grouped_operations_give_a_tuple_where_horovod_does_and_else_a_list() -> None:
    both = [torch.ones(3), torch.ones(2, dtype=torch.int32)]
    uncommon = [torch.ones(3), torch.ones(2, dtype=torch.int32)[::1].clone()]
    for tensors in (both, tuple(uncommon)):
        assert type(hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum))) is tuple
        assert (
            type(hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, process_set=everybody())))
            is tuple
        )
        in_place = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        assert type(in_place) is tuple and in_place[0] is tensors[0] and tensors[0].tolist() == [2.0] * 3
        assert type(hvd.grouped_allreduce(tensors)) is list
        assert type(hvd.grouped_allgather(tensors)) is tuple
        assert type(hvd.synchronize(hvd.grouped_allgather_async(tensors))) is tuple
        assert type(hvd.grouped_reducescatter(tensors, op=hvd.Sum)) is list
        tensors[0].fill_(1.0)
    learning = [torch.ones(3, requires_grad=True)]
    assert type(hvd.grouped_allgather(learning)) is tuple and type(hvd.grouped_allreduce(learning)) is list


def everybody() -> hvd.ProcessSet:
    return hvd.global_process_set


@ranks(2)
def test_a_reducescatter_that_neither_sums_nor_averages_is_horovods_error_and_nothing_is_submitted() -> None:
    rows = torch.ones(4)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        for call in (
            lambda op=op: hvd.reducescatter(rows, op=op),
            lambda op=op: hvd.reducescatter_async(rows, op=op),
            lambda op=op: hvd.reducescatter(rows.clone().requires_grad_(), op=op),
            lambda op=op: hvd.grouped_reducescatter([rows], op=op),
            lambda op=op: hvd.grouped_reducescatter_async([rows], op=op),
        ):
            error = raised(call)
            assert isinstance(error, hvd.HorovodInternalError) and isinstance(error, RuntimeError), error
            assert "AVERAGE and SUM" in str(error)


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


@ranks(2)
def test_poll_refuses_a_handle_whose_result_has_been_given() -> None:
    handle = hvd.allreduce_async(torch.ones(3), name="polled")
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None  # as in Horovod
    for unknown in (handle, 123456789):
        with pytest.raises(ValueError, match="not pending"):
            hvd.poll(unknown)


@ranks(2)
def test_a_set_that_was_never_registered_is_refused_and_knows_its_ranks() -> None:
    unknown = hvd.ProcessSet([0, 1])
    error = raised(lambda: hvd.allreduce(torch.ones(3), process_set=unknown))
    assert isinstance(error, TypeError) and isinstance(error, ValueError) and "registered" in str(error)
    assert unknown.process_set_id is None and unknown.size() is None and unknown.rank() is None
    assert unknown.included() is True and hvd.ProcessSet([1]).included() is (hvd.rank() == 1)


@ranks(2)
def test_a_predivide_factor_of_zero_is_a_division_by_zero() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    error = raised(
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), gradient_predivide_factor=0.0)
    )
    assert isinstance(error, ZeroDivisionError) and isinstance(error, ValueError)


def test_the_names_that_horovod_exports_are_there() -> None:
    assert hvd.sycl_built() is False
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__)
    with pytest.raises(ImportError):
        hvd.check_extension("horovod.caffe", "HOROVOD_WITH_CAFFE", __file__)
