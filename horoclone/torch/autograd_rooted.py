"""Gradients of reduce, gather and scatter: exact ones, which travel the operation's way backwards.

A named operation names the transfers of its gradient NAME.grad. Thread: autograd's (the caller's, for CPU tensors).
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import torch

from horoclone.ops import Average
from horoclone.process_sets import ProcessSet
from horoclone.runtime import rank
from horoclone.torch import mpi_ops, rooted
from horoclone.torch.autograd import grad_name, require_linear


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        root_rank: int,
        op: int,
        name: str | None,
        pre: float,
        post: float,
        group: ProcessSet,
    ) -> torch.Tensor:
        ctx.arguments = (root_rank, op, name, pre * post, group)
        ctx.shape = tensor.shape
        return mpi_ops.synchronize(rooted.reduce_async(tensor, root_rank, op, name, pre, post, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        root_rank, op, name, scale, group = ctx.arguments
        require_linear(op, "reduce")
        whole = grad.contiguous() if rank() == root_rank else grad.new_empty(ctx.shape)
        received = mpi_ops.broadcast_(whole, root_rank, grad_name(name), group)
        if op == Average:
            scale /= group.size() or 1
        return received if scale == 1.0 else received * scale, None, None, None, None, None, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, group: ProcessSet
    ) -> torch.Tensor:
        ctx.arguments = (root_rank, name, group)
        ctx.rows = tensor.shape[0] if tensor.dim() else 0
        return mpi_ops.synchronize(rooted.gather_async(tensor, root_rank, name, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        root_rank, name, group = ctx.arguments
        name = grad_name(name)
        rows = rooted.gather(torch.tensor([ctx.rows]), root_rank, name and f"{name}.rows", group)
        mine = rooted.scatter(grad.contiguous(), root_rank, rows.tolist(), name, group)
        return mine, None, None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, splits: Any, name: str | None, group: ProcessSet
    ) -> torch.Tensor:
        ctx.arguments = (root_rank, name, group)
        ctx.form = (tensor.shape, tensor.dtype)
        return mpi_ops.synchronize(rooted.scatter_async(tensor, root_rank, splits, name, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        root_rank, name, group = ctx.arguments
        shape, dtype = ctx.form
        whole = rooted.gather(grad.contiguous(), root_rank, grad_name(name), group)
        if rank() != root_rank:
            whole = torch.zeros(shape, dtype=dtype)
        elif whole.shape[0] < shape[0]:  # rows beyond the sum of splits went nowhere
            whole = torch.cat([whole, whole.new_zeros((shape[0] - whole.shape[0], *shape[1:]))])
        return whole, None, None, None, None
