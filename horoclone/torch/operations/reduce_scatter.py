"""Reducescatter of torch tensors, with its gradient. Thread: the caller's; gradients: autograd's."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from horoclone.ops import REDUCESCATTER, Average, ReduceOp, Sum
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch.compression import Compression
from horoclone.torch.operations import calls
from horoclone.torch.operations.all_gather import allgather
from horoclone.torch.operations.arguments import compressed, share_reduce
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, share_scale
from horoclone.torch.operations.tensors import learns


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter and returns a handle."""
    return calls.start(
        REDUCESCATTER, name, process_set, tensor, reduce=share_reduce(op, name), prescale=prescale_factor,
        postscale=postscale_factor,
    )  # fmt: skip


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces over the ranks (Average or Sum; InvalidArgument for others) and returns this rank's share of the rows.

    The first ranks get one row more where the rows cannot be shared equally. Differentiable: the gradient is the
    allgather of the gradient, times the size for Sum, as in Horovod.
    """
    wire, ctx = compressed("reducescatter", compression, tensor, name)
    if learns((wire,), name):
        share, _ = Reducescatter.apply(wire, name, op, process_set, prescale_factor, postscale_factor)
    else:
        share = calls.call(
            REDUCESCATTER, name, process_set, wire, reduce=share_reduce(op, name), prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip
    return compression.decompress(share, ctx)


class Reducescatter(torch.autograd.Function):
    """scale: of the gradient; None for that of Horovod."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, group: ProcessSet, pre: float, post: float,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        ctx.arguments = (name, group, share_scale(op, group, pre * post) if scale is None else scale)
        share = reducescatter(tensor, name, Compression.none, op, group, pre, post)
        return share, anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        name, group, scale = ctx.arguments
        grad = in_graph(ctx, grad)
        whole, _ = Shares.apply(grad if scale == 1.0 else grad * scale, grad_name(name), group)
        return whole, None, None, None, None, None, None


class Shares(torch.autograd.Function):
    """An allgather whose own gradient is the sum of everybody's, so that second derivatives are those of the first."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, name: str | None, group: ProcessSet) -> Any:
        ctx.arguments = (name, group)
        return allgather(share, name, group), anchor(ctx, share)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        name, group = ctx.arguments
        share, _ = Reducescatter.apply(in_graph(ctx, grad), grad_name(name), Sum, group, 1.0, 1.0, 1.0)
        return share, None, None
