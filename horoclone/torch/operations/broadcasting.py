"""Broadcast of torch tensors, with its gradient. Thread: the caller's; gradients: autograd's."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from horoclone.ops import BROADCAST, Average
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import rank
from horoclone.torch.operations import calls
from horoclone.torch.operations.all_reduce import allreduce
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, zeros_of
from horoclone.torch.operations.handles import synchronize
from horoclone.torch.operations.tensors import are_written_to, is_compiling, learns, number_of


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `broadcast_` and returns a handle."""
    handle = calls.start(BROADCAST, name, process_set, tensor, tensor, root=root_rank)
    are_written_to((tensor,))
    return handle


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites `tensor` with rank root_rank's (a world rank, also within a process set) and returns it."""
    received = calls.call(BROADCAST, name, process_set, tensor, tensor, root=root_rank)
    are_written_to((tensor,))
    return received


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast into a new tensor and returns a handle."""
    return calls.start(BROADCAST, name, process_set, *_copied(tensor, name), root=root_rank)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns rank root_rank's tensor. Differentiable: the root gets the averaged gradient, the others zero."""
    if learns((tensor,), name):
        return Broadcast.apply(tensor, root_rank, name, process_set)[0]
    return calls.call(BROADCAST, name, process_set, *_copied(tensor, name), root=root_rank)


def _copied(tensor: torch.Tensor, name: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Source and output: a copy, which the operation overwrites. A graph of torch.compile makes its own."""
    if is_compiling():
        return tensor, None
    number_of(tensor, name, True)  # refuses what is not contiguous before the copy would hide it
    copy = tensor.detach().clone()
    return copy, copy


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, group: ProcessSet) -> Any:
        ctx.arguments = (root_rank, name, group)
        return synchronize(broadcast_async(tensor, root_rank, name, group)), anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        root_rank, name, group = ctx.arguments
        reduced = allreduce(in_graph(ctx, grad), name=grad_name(name), op=Average, process_set=group)
        mine = reduced if rank() == root_rank else zeros_of(reduced, reduced.shape)
        return mine, None, None, None
