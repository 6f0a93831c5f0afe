"""Alltoall of torch tensors, with Horovod's names, arguments and handles, and its gradient. Thread: any."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from horoclone.ops import ALLTOALL
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch.operations import calls
from horoclone.torch.operations.arguments import rows_to_send
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph
from horoclone.torch.operations.handles import synchronize
from horoclone.torch.operations.tensors import learns


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall; the handle's output is the pair (output, received_splits)."""
    rows = rows_to_send(splits, name)
    return calls.start(ALLTOALL, name, process_set, tensor, counts_beside=splits, splits=rows)


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
    if learns((tensor,), name):
        output, received, _ = Alltoall.apply(tensor, splits, name, process_set)
    else:
        rows = rows_to_send(splits, name)
        output, received = calls.call(ALLTOALL, name, process_set, tensor, counts_beside=splits, splits=rows)
    return output if splits is None else (output, received)


class Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, group: ProcessSet
    ) -> tuple[torch.Tensor, ...]:
        output, received = synchronize(alltoall_async(tensor, splits, name, group))
        ctx.arguments = (received, tensor.shape, name, group)
        ctx.mark_non_differentiable(received)
        return output, received, anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        received, shape, name, group = ctx.arguments
        back: torch.Tensor = alltoall(in_graph(ctx, grad), received, grad_name(name), group)[0]
        if back.shape[0] < shape[0]:  # rows beyond the sum of splits went nowhere
            rest = back.new_zeros((shape[0] - back.shape[0], *shape[1:]))
            back = torch.cat([back, rest])
        return back, None, None, None
