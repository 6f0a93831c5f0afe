"""Collectives on torch tensors in which one rank has a part of its own: reduce and gather to it, scatter from it.

Arguments, dtypes, handles and errors as in mpi_ops.py. root_rank is a world rank, also within a process set. None of
them can run while a rank of the process set has joined (Unsupported). Thread: the caller's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from horoclone.ops import GATHER, REDUCE, SCATTER, Average, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import native
from horoclone.torch.gpu import HOST, arrived, place_of, place_to_receive, to_gpu
from horoclone.torch.handles import remember, set_id, start_on_gpu, synchronize
from horoclone.torch.tensors import ON_GPU, address_of, from_result, number_of

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
    reduce, dtype, runtime = resolve_reduce(None, op), number_of(tensor, name, True), native()
    is_root = runtime.rank == root_rank
    if output is None:
        like = tensor.detach()
        output = torch.empty_like(like) if is_root else like.new_empty(0)
    if dtype >= ON_GPU:
        return start_on_gpu(
            REDUCE, name, tensor, output, dtype, reduce, *scales, root_rank, set_id(process_set)
        )
    target = address_of(output) if is_root else 0
    handle = runtime.submit(
        REDUCE, name, address_of(tensor), target, tensor.shape, dtype, reduce, *scales, root_rank,
        set_id(process_set),
    )  # fmt: skip
    return remember(runtime, handle, output, tensor)


def reduce_async(
    tensor: torch.Tensor,
    root_rank: int,
    op: int = Average,
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
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The reduction of everybody's tensor on rank root_rank, as a new tensor; an empty one (shape [0]) on the others.

    op: any but Adasum; shapes and dtypes must be the same. Differentiable for Average and Sum: every
    rank gets the root's gradient, scaled as the tensor was. The others' empty results belong to the graph: call
    backward on every rank (`result.sum().backward()`).
    """
    if _with_gradient(tensor):
        from horoclone.torch.autograd_rooted import Reduce

        reduce = resolve_reduce(None, op)
        return Reduce.apply(tensor, root_rank, reduce, name, prescale_factor, postscale_factor, process_set)
    return synchronize(
        reduce_async(tensor, root_rank, op, name, prescale_factor, postscale_factor, process_set)
    )


def reduce_async_(
    tensor: torch.Tensor,
    root_rank: int,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `reduce_` and returns a handle."""
    return _reduced(tensor, tensor, root_rank, op, name, (prescale_factor, postscale_factor), process_set)


def reduce_(
    tensor: torch.Tensor,
    root_rank: int,
    op: int = Average,
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
    dtype, runtime = number_of(tensor, name, True), native()
    if dtype >= ON_GPU:
        rows = None if runtime.rank == root_rank else tensor.detach().new_empty((0, *tensor.shape[1:]))
        rest = (Sum, 1.0, 1.0, root_rank, set_id(process_set))
        return start_on_gpu(GATHER, name, tensor, rows, dtype, *rest)
    handle = runtime.submit(
        GATHER, name, address_of(tensor), 0, tensor.shape, dtype, Sum, 1.0, 1.0, root_rank, set_id(process_set)
    )  # fmt: skip
    row, kind = tuple(tensor.shape[1:]), tensor.dtype
    if runtime.rank == root_rank:
        return remember(runtime, handle, None, tensor, lambda rt, h: from_result(rt.result(h), row, kind))
    return remember(runtime, handle, torch.empty((0, *row), dtype=kind), tensor)


def gather(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Every rank's rows, in rank order, on rank root_rank; no rows (shape [0, ...]) on the others.

    First dimensions may differ. Differentiable: each rank gets its rows of the root's gradient. The others' empty
    results belong to the graph: call backward on every rank. A 0-d tensor is an error.
    """
    if _with_gradient(tensor):
        from horoclone.torch.autograd_rooted import Gather

        return Gather.apply(tensor, root_rank, name, process_set)
    return synchronize(gather_async(tensor, root_rank, name, process_set))


# --- scatter -------------------------------------------------------------------------------------------------------


def _row_counts(splits: Any) -> list[int] | None:
    if splits is None:
        return None
    given = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    if isinstance(given, Iterable):
        counts = list(given)
        if all(isinstance(count, int) and not isinstance(count, bool) for count in counts):
            return counts
    raise ValueError("scatter: splits is a 1-d tensor or sequence of integers, one for each rank")


def scatter_async(
    tensor: torch.Tensor | None,
    root_rank: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a scatter and returns a handle."""
    runtime = native()
    rest = (Sum, 1.0, 1.0, root_rank, set_id(process_set))
    if runtime.rank != root_rank:
        beside = tensor if isinstance(tensor, torch.Tensor) else None
        handle = runtime.submit(SCATTER, name, 0, 0, None, 0, *rest, None, 0, *place_to_receive(beside))
        return remember(runtime, handle, None, tensor, _share_beside(beside))
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"scatter: rank {root_rank} is the root and must pass the tensor to scatter, not "
            f"{type(tensor).__name__}"
        )
    dtype, counts = number_of(tensor, name, True), _row_counts(splits)
    handle = runtime.submit(
        SCATTER,
        name,
        address_of(tensor),
        0,
        tensor.shape,
        dtype % ON_GPU,
        *rest,
        counts,
        0,
        *place_of(tensor),
    )
    return remember(runtime, handle, None, tensor, _share_beside(tensor))


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
    """This rank's share of the rows of rank root_rank's tensor: splits[r] rows for the r-th rank of the process set.

    Without splits the shares are equal, the first ranks get one row more if uneven. The root passes tensor and splits;
    the others may pass None and get the root's dtype. From a GPU the shares go to GPUs: to that of the tensor that a
    rank passes, or to the current one if it passes None; Mismatch where a rank has none. Differentiable where every
    rank passes a tensor that requires its gradient (the others any: `torch.empty(0, requires_grad=True)`): the root
    gets the shares' gradients.
    """
    if _with_gradient(tensor):
        from horoclone.torch.autograd_rooted import Scatter

        return Scatter.apply(tensor, root_rank, splits, name, process_set)
    return synchronize(scatter_async(tensor, root_rank, splits, name, process_set))
