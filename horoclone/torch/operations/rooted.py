"""Collectives on torch tensors with a root: reduce and gather to one rank, scatter from one rank.

Arguments, dtypes, handles and errors as in all_reduce.py. root_rank is a world rank, also within a process set. None of
them can run while a rank of the process set has joined (Unsupported). Gradients are exact and travel in the opposite
direction. Thread: the caller's; gradients: autograd's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from horoclone.arguments import given
from horoclone.ops import GATHER, REDUCE, SCATTER, Average, ReduceOp, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set, set_id
from horoclone.runtime import native, rank
from horoclone.torch.operations.broadcasting import broadcast_async
from horoclone.torch.operations.gpu import HOST, arrived, place_of, place_to_receive, to_gpu
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, require_linear, zeros_of
from horoclone.torch.operations.handles import submit, synchronize
from horoclone.torch.operations.tensors import ON_GPU, are_written_to, number_of

__all__ = [
    "gather", "gather_async", "reduce", "reduce_", "reduce_async", "reduce_async_", "scatter", "scatter_async",
]  # fmt: skip


def _with_gradient(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()


# --- reduce --------------------------------------------------------------------------------------------------------


def _reduced(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    root_rank: int,
    op: int,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> int:
    """output None: a new tensor, on the root."""
    reduce, dtype = resolve_reduce(None, op), number_of(tensor, name, True)
    is_root = native().rank == root_rank
    if output is None:
        like = tensor.detach()
        output = torch.empty_like(like) if is_root else like.new_empty(0)
    # On a GPU every rank names its memory: the root's is where the result goes.
    target = output if is_root or dtype >= ON_GPU else None
    return submit(
        REDUCE, name, set_id(process_set), tensor, target, output, dtype=dtype, reduce=reduce, prescale=scales[0],
        postscale=scales[1], root=root_rank,
    )  # fmt: skip


def reduce_async(
    tensor: torch.Tensor,
    root_rank: int,
    op: ReduceOp | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a reduce and returns a handle; `tensor` must not change until it is done."""
    return _reduced(tensor, None, root_rank, op, name, (prescale_factor, postscale_factor), process_set)


def reduce(
    tensor: torch.Tensor,
    root_rank: int,
    op: ReduceOp | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the reduction of everybody's tensor on rank root_rank, as a new tensor; an empty one (shape [0]) on the
    others.

    op: any but Adasum; shapes and dtypes must be the same. Differentiable for Average and Sum: every
    rank gets the root's gradient, scaled as the tensor was. The others' empty results belong to the graph: call
    backward on every rank (`result.sum().backward()`).
    """
    if _with_gradient(tensor):
        reduce = resolve_reduce(None, op)
        return Reduce.apply(tensor, root_rank, reduce, name, prescale_factor, postscale_factor, process_set)[
            0
        ]
    return synchronize(
        reduce_async(tensor, root_rank, op, name, prescale_factor, postscale_factor, process_set)
    )


def reduce_async_(
    tensor: torch.Tensor,
    root_rank: int,
    op: ReduceOp | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `reduce_` and returns a handle."""
    handle = _reduced(tensor, tensor, root_rank, op, name, (prescale_factor, postscale_factor), process_set)
    are_written_to((tensor,))
    return handle


def reduce_(
    tensor: torch.Tensor,
    root_rank: int,
    op: ReduceOp | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites rank root_rank's tensor with the reduction; the others' stay as they are. Returns the tensor."""
    return synchronize(
        reduce_async_(tensor, root_rank, op, name, prescale_factor, postscale_factor, process_set)
    )


# --- gather --------------------------------------------------------------------------------------------------------


def gather_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a gather and returns a handle."""
    dtype, number = number_of(tensor, name, True), set_id(process_set)
    if native().rank == root_rank:
        return submit(GATHER, name, number, tensor, dtype=dtype, root=root_rank)
    rows = tensor.detach().new_empty((0, *tensor.shape[1:]))
    target = rows if dtype >= ON_GPU else None
    return submit(GATHER, name, number, tensor, target, rows, dtype=dtype, root=root_rank)


def gather(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns every rank's rows, in rank order, on rank root_rank; no rows (shape [0, ...]) on the others.

    First dimensions may differ. Differentiable: each rank gets its rows of the root's gradient. The others' empty
    results belong to the graph: call backward on every rank. A 0-d tensor is an error.
    """
    if _with_gradient(tensor):
        return Gather.apply(tensor, root_rank, name, process_set)[0]
    return synchronize(gather_async(tensor, root_rank, name, process_set))


# --- scatter -------------------------------------------------------------------------------------------------------


def _row_counts(splits: Any) -> list[int] | None:
    if splits is None:
        return None
    listed = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    if isinstance(listed, Iterable):
        counts = list(listed)
        if all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            return counts
    raise ValueError(
        f"scatter: splits={given(splits)} cannot be used; splits is a 1-d tensor or sequence of integers, one for "
        "each rank"
    )


def scatter_async(
    tensor: torch.Tensor | None,
    root_rank: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a scatter and returns a handle."""
    if native().rank != root_rank:
        beside, counts = tensor if isinstance(tensor, torch.Tensor) else None, None
        place, source = place_to_receive(beside), None
    elif isinstance(tensor, torch.Tensor):
        number_of(tensor, name, True)
        beside, counts, place, source = tensor, _row_counts(splits), None, tensor
    else:
        raise ValueError(
            f"scatter: rank {root_rank} is the root and must pass a torch.Tensor to scatter, not {given(tensor)}"
        )
    return submit(
        SCATTER, name, set_id(process_set), source, output=None, make=_share_beside(beside), place=place,
        root=root_rank, splits=counts,
    )  # fmt: skip


def _share_beside(tensor: torch.Tensor | None) -> Callable[[Any, int], torch.Tensor]:
    """What arrived, where the root's tensor lies or, if that is in host memory, the one that this rank passed."""

    def make(runtime: Any, handle: int) -> torch.Tensor:
        share = arrived(runtime, handle)
        if tensor is None or place_of(tensor) is HOST or place_of(share) is not HOST:
            return share
        return to_gpu(share, tensor)

    return make


def scatter(
    tensor: torch.Tensor | None,
    root_rank: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns this rank's share of the rows of rank root_rank's tensor: splits[r] rows for the r-th rank of the process
    set.

    Without splits the shares are equal, the first ranks get one row more if uneven. The root passes tensor and splits;
    the others may pass None and get the root's dtype. From a GPU the shares go to GPUs: to that of the tensor that a
    rank passes, or to the current one if it passes None; Mismatch where a rank has none. Differentiable where every
    rank passes a tensor that requires its gradient (the others any: `torch.empty(0, requires_grad=True)`): the root
    gets the shares' gradients.
    """
    if _with_gradient(tensor):
        return Scatter.apply(tensor, root_rank, splits, name, process_set)[0]
    return synchronize(scatter_async(tensor, root_rank, splits, name, process_set))


# --- gradients ---


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
    ) -> Any:
        ctx.arguments = (root_rank, op, name, pre * post, group)
        ctx.shape = tensor.shape
        return synchronize(reduce_async(tensor, root_rank, op, name, pre, post, group)), anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        root_rank, op, name, scale, group = ctx.arguments
        require_linear(op, "reduce")
        received = Spread.apply(in_graph(ctx, grad), ctx.shape, root_rank, grad_name(name), group)[0]
        if op == Average:
            scale /= group.size() or 1
        return received if scale == 1.0 else received * scale, None, None, None, None, None, None


class Spread(torch.autograd.Function):
    """What the root has, to everybody; the others give an empty tensor. The reverse of a reduce with Sum."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, shape: torch.Size, root_rank: int, name: str | None, group: ProcessSet
    ) -> Any:
        ctx.arguments = (root_rank, name, group)
        whole = tensor if rank() == root_rank else tensor.new_empty(shape)
        return synchronize(broadcast_async(whole, root_rank, name, group)), anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        root_rank, name, group = ctx.arguments
        summed = Reduce.apply(in_graph(ctx, grad), root_rank, Sum, grad_name(name), 1.0, 1.0, group)[0]
        return summed, None, None, None, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, group: ProcessSet) -> Any:
        ctx.arguments = (root_rank, name, group)
        ctx.rows = tensor.shape[0] if tensor.dim() else 0
        return synchronize(gather_async(tensor, root_rank, name, group)), anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        root_rank, name, group = ctx.arguments
        name = grad_name(name)
        rows = gather(torch.tensor([ctx.rows], device="cpu"), root_rank, name and f"{name}.rows", group)
        mine = scatter(in_graph(ctx, grad), root_rank, rows.tolist(), name, group)
        return mine, None, None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, splits: Any, name: str | None, group: ProcessSet
    ) -> Any:
        ctx.arguments = (root_rank, name, group)
        ctx.form = (tensor.shape, tensor.dtype, tensor.device)
        return synchronize(scatter_async(tensor, root_rank, splits, name, group)), anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        root_rank, name, group = ctx.arguments
        shape, dtype, device = ctx.form
        whole = gather(in_graph(ctx, grad), root_rank, grad_name(name), group)
        if rank() != root_rank:
            whole = zeros_of(whole, shape).to(device, dtype)
        elif whole.shape[0] < shape[0]:  # rows beyond the sum of splits went nowhere
            whole = torch.cat([whole, whole.new_zeros((shape[0] - whole.shape[0], *shape[1:]))])
        return whole, None, None, None, None
