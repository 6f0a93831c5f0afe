"""Horovod's table of errors, row by row, on NumPy arrays and torch tensors: the type, whether submitting or waiting
raises and on which ranks, a text with rank, tensor and next move, and that the runtime works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from world import raised, ranks, until

import horoclone
import horoclone.torch

both = pytest.mark.parametrize("binding", ["numpy", "torch"])


def api(binding: str) -> tuple[Any, Callable[..., Any]]:
    """(the module, a maker of tensors: of(values, dtype name))."""
    if binding == "numpy":
        return horoclone, lambda values, dtype="float32": np.array(values, dtype)
    return horoclone.torch, lambda values, dtype="float32": torch.tensor(values, dtype=getattr(torch, dtype))


def says(error: Exception, kind: type, *words: str) -> None:
    assert isinstance(error, kind), repr(error)
    missing = [word for word in words if word not in str(error)]
    assert not missing, (missing, str(error))


def works(binding: str) -> None:
    """Named and unnamed operations still match: every rank has counted alike."""
    hvd, of = api(binding)
    for name in (None, "afterwards"):
        assert hvd.allreduce(of([1, 2]), op=hvd.Sum, name=name).tolist() == [hvd.size(), 2 * hvd.size()]
    assert hvd.allgather(of([hvd.rank()])).tolist() == list(range(hvd.size()))


@both
@ranks(2, init=False)
def test_not_initialised(binding):
    hvd, of = api(binding)
    text = "Horovod has not been initialized; use hvd.init()."
    for _ in range(2):
        for name, call in {
            "rank": hvd.rank, "size": hvd.size, "local_rank": hvd.local_rank, "local_size": hvd.local_size,
            "cross_rank": hvd.cross_rank, "cross_size": hvd.cross_size, "is_homogeneous": horoclone.is_homogeneous,
            "allreduce": lambda: hvd.allreduce(of([1])), "allreduce_async": lambda: hvd.allreduce_async(of([1])),
            "grouped_allreduce": lambda: hvd.grouped_allreduce([of([1])]), "allgather": lambda: hvd.allgather(of([1])),
            "broadcast_": lambda: hvd.broadcast_(of([1]), 0), "alltoall": lambda: hvd.alltoall(of([1, 2])),
            "reducescatter": lambda: hvd.reducescatter(of([1, 2])), "barrier": hvd.barrier, "join": hvd.join,
            "broadcast_object": lambda: hvd.broadcast_object(1), "add_process_set": lambda: hvd.add_process_set([0]),
        }.items():  # fmt: skip
            error = raised(call)
            says(error, hvd.NotInitialized, text, f"hvd.{name}()")
            assert isinstance(error, ValueError) and isinstance(error, hvd.HorovodInternalError)
        hvd.init()
        works(binding)
        hvd.shutdown()


@both
@ranks(2)
def test_another_rank_has_shut_down(binding, tmp_path):
    hvd, of = api(binding)
    started = tmp_path / "submitted"
    if hvd.rank() == 0:
        pending = hvd.allreduce_async(of([1]), name="w")  # submitting is fine: the other may still come
        started.touch()
        words = ("Horovod has been shut down", "rank 1", "hvd.join()")
        says(raised(lambda: hvd.synchronize(pending)), hvd.HorovodInternalError, "allreduce 'w'", *words)
        says(
            raised(lambda: hvd.allgather(of([1]), name="x")),
            hvd.HorovodInternalError,
            "allgather 'x'",
            *words,
        )
        says(raised(hvd.barrier), hvd.HorovodInternalError, *words)
    else:
        until(started.exists)
    hvd.shutdown()
    hvd.init()
    works(binding)


@both
@ranks(2)
def test_a_name_that_is_pending(binding):
    hvd, of = api(binding)
    if hvd.rank() == 0:
        first = hvd.allreduce_async(of([1]), name="twice", op=hvd.Sum)
        error = raised(lambda: hvd.allreduce_async(of([1]), name="twice", op=hvd.Sum))
        says(error, ValueError, "twice", "rank 0", "Duplicate tensor name", "another name")
        other = hvd.broadcast_async(of([5]), 0, name="twice")  # the kind of operation is part of the key
        assert not hvd.poll(first)
        hvd.barrier()
    else:
        hvd.barrier()
        first = hvd.allreduce_async(of([1]), name="twice", op=hvd.Sum)
        other = hvd.broadcast_async(of([0]), 0, name="twice")
    assert hvd.synchronize(first).tolist() == [2] and hvd.synchronize(other).tolist() == [5]
    works(binding)


MISMATCHES = {
    "data types": ("Mismatched data types", "int32[2]", "float32[2]"),
    "operations": ("Mismatched operations", "announced broadcast", "announced allreduce"),
    "shapes": ("Mismatched allreduce tensor shapes", "[3]", "[2]"),
    "reductions": ("Mismatched allreduce reduce operations", "Max", "Sum"),
    "prescale": ("Mismatched prescale and/or postscale factors", "prescale 0.5", "prescale 1"),
    "postscale": ("Mismatched prescale and/or postscale factors", "postscale 3", "postscale 1"),
    "roots": ("Mismatched broadcast root ranks", "root rank 1", "root rank 0"),
    "rows": ("Mismatched allgather tensor shapes", "[1,3]", "[1,2]"),
    "dimensions": ("Mismatched allgather tensor shapes", "[2]", "[1,2]"),
    "group": ("Mismatched allreduce tensor counts", "1 tensor", "2 tensors"),
    "scattered": ("Mismatched reducescatter reduce operations", "Average", "Sum"),
    "exchanged": ("Mismatched data types", "int64", "float32"),
}


def mismatching(what: str, odd: bool, hvd: Any, of: Callable[..., Any]) -> int:
    """Submits one operation named `which` that differs on the odd rank; gives its handle."""
    tensor, row, named = of([1, 2]), of([[1, 2]]), {"name": "which"}
    two = [tensor, of([3])]
    return {
        "data types": lambda: hvd.allreduce_async(
            of([1, 2], "int32") if odd else tensor, op=hvd.Sum, **named
        ),
        "operations": lambda: (
            hvd.broadcast_async(tensor, 0, **named)
            if odd
            else hvd.allreduce_async(tensor, op=hvd.Sum, **named)
        ),
        "shapes": lambda: hvd.allreduce_async(of([1, 2, 3]) if odd else tensor, **named),
        "reductions": lambda: hvd.allreduce_async(tensor, op=hvd.Max if odd else hvd.Sum, **named),
        "prescale": lambda: hvd.allreduce_async(tensor, prescale_factor=0.5 if odd else 1.0, **named),
        "postscale": lambda: hvd.allreduce_async(tensor, postscale_factor=3.0 if odd else 1.0, **named),
        "roots": lambda: hvd.broadcast_async(tensor, int(odd), **named),
        "rows": lambda: hvd.allgather_async(of([[1, 2, 3]]) if odd else row, **named),
        "dimensions": lambda: hvd.allgather_async(tensor if odd else row, **named),
        "group": lambda: hvd.grouped_allreduce_async(two[: 2 - odd], **named),
        "scattered": lambda: hvd.reducescatter_async(tensor, op=hvd.Average if odd else hvd.Sum, **named),
        "exchanged": lambda: hvd.alltoall_async(of([1, 2, 3], "int64" if odd else "float32"), **named),
    }[what]()


@both
@ranks(3)
def test_ranks_that_differ_all_raise_when_they_wait_and_go_on(binding):
    hvd, of = api(binding)
    last = hvd.size() - 1
    for what, words in MISMATCHES.items():
        handle = mismatching(what, hvd.rank() == last, hvd, of)  # submitting raises nowhere
        error = raised(lambda handle=handle: hvd.synchronize(handle))
        says(error, hvd.Mismatch, "'which'", f"rank {last} announced", "rank 0 announced", *words)
        assert isinstance(error, RuntimeError) and isinstance(error, hvd.HorovodInternalError), what
        assert hvd.synchronize(handle) is None  # the handle is used up
        works(binding)


@both
@ranks(2)
def test_tensors_without_a_first_dimension(binding):
    hvd, of = api(binding)
    # What the others submit decides, so only waiting raises
    handle = hvd.allgather_async(of(1.0), name="loss")
    text = "Process-set rank zero tried to allgather a rank-zero tensor"
    says(
        raised(lambda: hvd.synchronize(handle)), hvd.HorovodInternalError, "allgather 'loss'", text, "reshape"
    )
    says(raised(lambda: hvd.reducescatter_async(of(1.0), name="loss")), ValueError, "first")
    says(raised(lambda: hvd.alltoall_async(of(1.0), name="loss")), ValueError, "alltoall 'loss'", "dimension")
    works(binding)


@both
@ranks(3)
def test_gathers_and_the_like_while_a_rank_has_joined(binding):
    hvd, of = api(binding)
    if hvd.rank() != 2:
        for name, call in {
            "allgather": lambda: hvd.allgather_async(of([1, 2, 3]), name="g"),
            "broadcast": lambda: hvd.broadcast_async(of([1, 2, 3]), 0, name="g"),
            "alltoall": lambda: hvd.alltoall_async(of([1, 2, 3]), name="g"),
            "reducescatter": lambda: hvd.reducescatter_async(of([1, 2, 3]), name="g"),
        }.items():
            handle = call()
            text = f"{name.capitalize()} is not supported with Join at this time"
            error = raised(lambda handle=handle: hvd.synchronize(handle))
            says(error, hvd.HorovodInternalError, f"{name} 'g'", text, "Rank 2 has joined")
        assert hvd.allreduce(of([1]), op=hvd.Sum).tolist() == [2]
    last = hvd.join()
    assert last in (0, 1)
    works(binding)


@both
@ranks(2, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_ranks_outside_a_process_set_and_sets_that_do_not_exist(binding):
    hvd, of = api(binding)
    first = hvd.add_process_set([0])
    calls = (
        lambda which: hvd.allreduce_async(of([1]), name="p", process_set=which),
        lambda which: hvd.allgather_async(of([1]), name="p", process_set=which),
        lambda which: hvd.broadcast_async_(of([1]), 0, name="p", process_set=which),
        lambda which: hvd.reducescatter_async(of([1, 2]), name="p", process_set=which),
        lambda which: hvd.alltoall_async(of([1, 2]), name="p", process_set=which),
        lambda which: hvd.grouped_allreduce_async([of([1])], name="p", process_set=which),
    )
    for call in calls:
        if hvd.rank() == 1:
            error = raised(lambda call=call: call(first))
            says(error, ValueError, "Rank 1 is not a member of the provided process set")
        error = raised(lambda call=call: call(hvd.ProcessSet([0, 1])))
        says(error, ValueError, "does not exist, or has not been registered", "hvd.add_process_set()")
        for wrong in (0, None, [0, 1]):
            error = raised(lambda call=call, wrong=wrong: call(wrong))
            says(error, TypeError, f"process_set={wrong}", "ProcessSet")
    hvd.remove_process_set(first)
    says(raised(lambda: calls[0](first)), ValueError, "has not been registered")
    works(binding)


@both
@ranks(2)
def test_splits_of_alltoall(binding):
    hvd, of = api(binding)
    rows = of([1, 2, 3, 4])

    def call(tensor: Any, splits: Any) -> Exception:
        return raised(lambda: hvd.alltoall_async(tensor, splits, name="x"))

    here = f"rank {hvd.rank()}"
    says(call(rows, of([[1, 1]], "int32")), ValueError, "1")
    says(call(rows, of([1, 1], "float32")), ValueError, "integer")
    says(call(rows, [1, 1, 1]), ValueError, here, "'x'", "splits", "3", "2 ranks")
    says(call(rows, [3, 2]), ValueError, here, "'x'", "splits", "5", "4")
    says(call(rows, [-1, 1]), ValueError, here, "'x'", "negative", "splits")
    says(call(of([1, 2, 3]), None), ValueError, here, "'x'", "3", "not divisible", "splits")
    if binding == "torch":
        says(call(rows, of([1, 1], "int64")), ValueError, "32-bit integer")
    output, received = hvd.alltoall(rows, of([1, 3], "int32"))
    assert received.tolist() == ([1, 1] if hvd.rank() == 0 else [3, 3]) and len(output) == sum(
        received.tolist()
    )
    works(binding)


@both
@ranks(2)
def test_reductions_that_an_operation_does_not_know(binding):
    hvd, of = api(binding)
    for op in (hvd.Min, hvd.Max, hvd.Product):
        error = raised(lambda op=op: hvd.reducescatter_async(of([1, 2]), op=op, name="r"))
        text = "Reducescatter currently only supports AVERAGE and SUM."
        says(error, ValueError, f"rank {hvd.rank()}", "reducescatter 'r'", text, "op=Sum")
    error = raised(lambda: hvd.allreduce_async(of([True, False], "bool"), op=hvd.Average, name="flags"))
    says(error, ValueError, f"rank {hvd.rank()}", "allreduce 'flags'", "Average of bool", "use Sum")
    for wrong in (17, -1, "sum", 1.5):
        says(raised(lambda wrong=wrong: hvd.allreduce(of([1]), op=wrong)), ValueError, "hvd.Sum")
    says(raised(lambda: hvd.allreduce(of([1]), average=True, op=hvd.Sum)), ValueError, "only one of them")
    works(binding)


@both
@ranks(2, env={"HOROVOD_FUSION_THRESHOLD": "64"})
def test_a_reducescatter_with_prescale_beyond_the_fusion_threshold_is_no_error_here(binding):
    hvd, of = api(binding)
    result = hvd.reducescatter(of([1.0] * 4000), op=hvd.Sum, prescale_factor=0.5)
    assert result.tolist() == [1.0] * 2000
    works(binding)


@both
@ranks(2)
def test_roots_that_are_nobody(binding):
    hvd, of = api(binding)
    for root in (2, -1):
        error = raised(lambda root=root: hvd.broadcast_async(of([1]), root, name="b"))
        says(
            error,
            ValueError,
            f"rank {hvd.rank()}",
            "broadcast 'b'",
            f"root rank {root} is not one of the job's {hvd.size()} ranks",
        )
    works(binding)


STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}


@both
@ranks(2, env=STALL)
def test_a_stall_beyond_the_limit_ends_the_job_on_every_rank(binding):
    hvd, of = api(binding)
    mine = f"only on {hvd.rank()}"
    error = raised(lambda: hvd.allreduce(of([1]), name=mine))
    says(
        error, hvd.HorovodInternalError, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "only on 0", "missing rank 1"
    )
    says(raised(lambda: hvd.allreduce_async(of([1]))), hvd.HorovodInternalError)  # until the next init
    hvd.shutdown()
    hvd.init()
    works(binding)
