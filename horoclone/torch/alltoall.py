"""Alltoall of torch tensors, with Horovod's names, arguments and handles; exported by mpi_ops.py. Thread: any."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from horoclone.ops import ALLTOALL, Sum
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import native
from horoclone.torch.arguments import rows_to_send
from horoclone.torch.functional import is_compiling, start
from horoclone.torch.handles import remember, run_for_rows, set_id, start_on_gpu, synchronize
from horoclone.torch.tensors import ON_GPU, address_of, from_result, learns, number_of

if TYPE_CHECKING:
    from horoclone._core import Runtime


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall; the handle's output is the pair (output, received_splits)."""
    rows = rows_to_send(splits, name)
    if is_compiling():
        return start("alltoall", [tensor], name, process_set=process_set, splits=rows)
    dtype = number_of(tensor, name, True)
    rest = (Sum, 1.0, 1.0, 0, set_id(process_set), rows)
    if dtype >= ON_GPU:
        return start_on_gpu(ALLTOALL, name, tensor, None, dtype, *rest, counts_beside=splits)
    runtime = native()
    handle = runtime.submit(ALLTOALL, name, address_of(tensor), 0, tensor.shape, dtype, *rest)
    row, kind = tuple(tensor.shape[1:]), tensor.dtype

    def make(rt: Runtime, h: int) -> tuple[torch.Tensor, torch.Tensor]:
        result = rt.result(h)
        return from_result(result, row, kind), torch.tensor(result.rows_from, dtype=torch.int32)

    return remember(runtime, handle, None, tensor, make)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends splits[r] rows of `tensor` to each rank r (equal shares without splits) and concatenates what arrives.

    Returns the output, and with `splits` also the rows received from each rank (int32; on the GPU if the tensor and
    the splits are there). Differentiable.
    ValueError: splits not 1-d, not int32, of the wrong length, negative (InvalidArgument), with a sum
    beyond the rows; rows not divisible.
    """
    if is_compiling():
        rows = rows_to_send(splits, name)
        begun = start("alltoall", [tensor], name, process_set=process_set, splits=rows, differentiable=True)
        output, received = begun()
    elif learns([tensor], name):
        from horoclone.torch.autograd import Alltoall

        output, received = Alltoall.apply(tensor, splits, name, process_set)
    elif (dtype := number_of(tensor, name, True)) >= ON_GPU:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    else:
        rest = (Sum, 1.0, 1.0, 0, set_id(process_set), rows_to_send(splits, name))
        output, result = run_for_rows(ALLTOALL, name, tensor, dtype, *rest)
        received = None if splits is None else torch.tensor(result.rows_from, dtype=torch.int32)
    return output if splits is None else (output, received)
