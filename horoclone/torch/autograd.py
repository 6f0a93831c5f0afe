"""Gradients of the collective operations, with Horovod's factors.

A named operation names the reduction of its gradient NAME.grad, so that ranks agree whatever the order of backward.
Thread: autograd's (the caller's, for CPU tensors).
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import torch

from horoclone.errors import Unsupported
from horoclone.ops import REDUCE_NAMES, Average, Sum
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import rank
from horoclone.torch import mpi_ops
from horoclone.torch.compression import Compression

Tensors = tuple[torch.Tensor, ...]


def grad_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def require_linear(op: int, what: str) -> None:
    if op not in (Average, Sum):
        raise Unsupported(
            f"{what} with op={REDUCE_NAMES[op]} has no gradient here: only Average and Sum are linear. Call it on "
            "tensor.detach() if the gradient is not wanted."
        )


def _rank_in(process_set: ProcessSet) -> int:
    return rank() if process_set is global_process_set else (process_set.rank() or 0)


def _rows_before(rows: int, process_set: ProcessSet, name: str | None) -> int:
    """How many rows the lower ranks contributed to an allgather to which this rank gave `rows`."""
    everybody = mpi_ops.allgather(torch.tensor([rows]), grad_name(name) and f"{name}.rows", process_set)
    return int(everybody[: _rank_in(process_set)].sum())


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, pre: float, post: float, group: ProcessSet
    ) -> torch.Tensor:
        ctx.arguments = (name, op, pre, post, group)
        return mpi_ops.synchronize(mpi_ops.allreduce_async(tensor, None, name, op, pre, post, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        name, op, pre, post, group = ctx.arguments
        require_linear(op, "allreduce")
        reduced = mpi_ops.allreduce(
            grad.contiguous(), None, grad_name(name), Compression.none, op, pre, post, group
        )
        return reduced, None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        pre: float,
        post: float,
        group: ProcessSet,
        *tensors: torch.Tensor,
    ) -> Tensors:
        ctx.arguments = (name, op, pre, post, group)
        return tuple(
            mpi_ops.synchronize(mpi_ops.grouped_allreduce_async(tensors, None, name, op, pre, post, group))
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, op, pre, post, group = ctx.arguments
        require_linear(op, "grouped_allreduce")
        whole = [grad.contiguous() for grad in grads]
        reduced = mpi_ops.grouped_allreduce(
            whole, None, grad_name(name), Compression.none, op, pre, post, group
        )
        return (None, None, None, None, None, *reduced)


class Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, group: ProcessSet) -> torch.Tensor:
        if not tensor.dim():
            raise IndexError(
                f"allgather {name or 'of an unnamed tensor'}: a 0-d tensor has no rows to gather. Reshape it to [1]."
            )
        ctx.arguments = (tensor.shape[0], name, group)
        return mpi_ops.allgather(tensor, name, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, name, group = ctx.arguments
        reduced = mpi_ops.allreduce(grad.contiguous(), name=grad_name(name), op=Average, process_set=group)
        return reduced.narrow(0, _rows_before(rows, group, name), rows), None, None


class GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, group: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        ctx.arguments = ([t.shape[0] if t.dim() else 0 for t in tensors], name, group)
        return tuple(mpi_ops.synchronize(mpi_ops.grouped_allgather_async(tensors, name, group)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, name, group = ctx.arguments
        whole = [grad.contiguous() for grad in grads]
        reduced = mpi_ops.grouped_allreduce(whole, name=grad_name(name), op=Average, process_set=group)
        own = [
            part.narrow(0, _rows_before(count, group, None if name is None else f"{name}.{i}"), count)
            for i, (part, count) in enumerate(zip(reduced, rows, strict=True))
        ]
        return (None, None, *own)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, group: ProcessSet
    ) -> torch.Tensor:
        ctx.arguments = (root_rank, name, group)
        return mpi_ops.synchronize(mpi_ops.broadcast_async(tensor, root_rank, name, group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        root_rank, name, group = ctx.arguments
        reduced = mpi_ops.allreduce(grad.contiguous(), name=grad_name(name), op=Average, process_set=group)
        return reduced if rank() == root_rank else torch.zeros_like(reduced), None, None, None


class Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, group: ProcessSet) -> Tensors:
        output, received = mpi_ops.synchronize(mpi_ops.alltoall_async(tensor, splits, name, group))
        ctx.arguments = (received, tensor.shape, name, group)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        received, shape, name, group = ctx.arguments
        back, _ = mpi_ops.alltoall(grad.contiguous(), received, grad_name(name), group)
        if back.shape[0] < shape[0]:  # rows beyond the sum of splits went nowhere
            rest = back.new_zeros((shape[0] - back.shape[0], *shape[1:]))
            back = torch.cat([back, rest])
        return back, None, None, None


class Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, group: ProcessSet, pre: float, post: float
    ) -> torch.Tensor:
        ctx.arguments = (name, op, group, pre * post)
        return mpi_ops.reducescatter(tensor, name, Compression.none, op, group, pre, post)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        name, op, group, scale = ctx.arguments
        whole = mpi_ops.allgather(_scaled(grad, op, group, scale), grad_name(name), group)
        return whole, None, None, None, None, None


class GroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        group: ProcessSet,
        pre: float,
        post: float,
        *tensors: torch.Tensor,
    ) -> Tensors:
        ctx.arguments = (name, op, group, pre * post)
        return tuple(
            mpi_ops.synchronize(mpi_ops.grouped_reducescatter_async(tensors, name, op, group, pre, post))
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, op, group, scale = ctx.arguments
        parts = [_scaled(grad, op, group, scale) for grad in grads]
        return (None, None, None, None, None, *mpi_ops.grouped_allgather(parts, grad_name(name), group))


def _scaled(grad: torch.Tensor, op: int, group: ProcessSet, scale: float) -> torch.Tensor:
    factor = scale * ((group.size() or 1) if op == Sum else 1)
    return (grad if factor == 1.0 else grad * factor).contiguous()
