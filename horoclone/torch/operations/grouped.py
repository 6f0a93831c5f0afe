"""Operations on several tensors at once: all or nothing, one agreement, one handle.

Same rules for arguments, handles and errors as in all_reduce.py. As in Horovod, asynchronous and in-place functions and
allgather return a tuple, the others a list. Thread: the caller's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from horoclone.ops import ALLGATHER, ALLREDUCE, REDUCESCATTER, Average, ReduceOp, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch.compression import Compression
from horoclone.torch.operations import weighted
from horoclone.torch.operations.all_gather import rows_before
from horoclone.torch.operations.all_reduce import weighted_now
from horoclone.torch.operations.arguments import compressed, share_reduce, tuple_of
from horoclone.torch.operations.calls import call_group, start_group
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, require_linear, share_scale
from horoclone.torch.operations.handles import synchronize, table
from horoclone.torch.operations.spans import profiler
from horoclone.torch.operations.tensors import (
    are_written_to,
    is_compiling,
    learns,
    refuse_scalar,
    share_memory,
)

Tensors = Sequence[torch.Tensor]

# --- grouped allreduce ---------------------------------------------------------------------------------------------


def _start(
    tensors: Tensors, outputs: Tensors | None, name: str | None, reduce: int, scales: tuple[float, float],
    process_set: ProcessSet,
) -> int:  # fmt: skip
    """The core's fast path, which declines what it does not know; for that, under a profiler, in forward mode and in a
    graph, as all others."""
    if outputs is tensors and not is_compiling() and _are_tied(tensors):
        apart = start_group(
            ALLREDUCE, name, process_set, tensors, _like(tensors, name), reduce=reduce, prescale=scales[0],
            postscale=scales[1],
        )  # fmt: skip
        return table.copied_back(apart, tensors, lambda target, result: target.detach().copy_(result))
    if not (is_compiling() or profiler._is_profiler_enabled or forward_ad._current_level >= 0):
        plain = table.start_plain_group(tensors, outputs, None, name, reduce, *scales, process_set, 0)
        if plain is not None:
            return plain
    return start_group(
        ALLREDUCE, name, process_set, tensors, outputs, reduce=reduce, prescale=scales[0], postscale=scales[1]
    )


def _are_tied(tensors: Tensors) -> bool:
    """Whether some lie in the same memory, as tied weights of a state_dict() do: in place it would be reduced twice."""
    try:
        return share_memory(tensors)
    except (AttributeError, RuntimeError):
        return False  # some are no tensors, or have no such memory: they are refused


def _like(tensors: Tensors, name: str | None) -> Tensors | None:
    """New ones for the results; a graph of torch.compile has its own."""
    if is_compiling():
        return None
    try:
        return tuple([torch.empty_like(t, requires_grad=False) for t in tensors])
    except TypeError:
        learns(tensors, name)  # refuses what is no tensor
        raise


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> int:
    """Starts one reduction of several tensors in place (all or nothing); one handle, whose output is a tuple.

    Memory that some of them share is reduced once: such a group gets its results in synchronize(), also where poll()
    says that it is done.
    """
    tensors = tuple_of("grouped_allreduce_async_", tensors)
    reduce, scales = resolve_reduce(average, op), (prescale_factor, postscale_factor)
    if weight is not None:
        return weighted.start(
            "grouped_allreduce_async_", tensors, tensors, name, reduce, scales, process_set, weight
        )
    handle = _start(tensors, tensors, name, reduce, scales, process_set)
    are_written_to(tensors)
    return handle


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Reduces several tensors in place as one operation and returns them."""
    return synchronize(
        grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set, weight=weight
        )
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> int:
    """Starts one reduction of several tensors into new ones; one handle, whose output is a tuple."""
    tensors = tuple_of("grouped_allreduce_async", tensors)
    reduce, scales = resolve_reduce(average, op), (prescale_factor, postscale_factor)
    if weight is not None:
        return weighted.start(
            "grouped_allreduce_async", tensors, None, name, reduce, scales, process_set, weight
        )
    return _start(tensors, _like(tensors, name), name, reduce, scales, process_set)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> list[torch.Tensor]:
    """Returns the reductions of several tensors, done as one operation. Differentiable for Average and Sum.

    weight: how much this rank counts in the mean of all tensors; see allreduce.
    """
    reduce, scales = resolve_reduce(average, op), (prescale_factor, postscale_factor)
    tensors = tuple_of("grouped_allreduce", tensors)
    pairs = [compressed("grouped_allreduce", compression, tensor, name) for tensor in tensors]
    wires = [wire for wire, _ in pairs]
    if weight is not None:
        weighted.check_compression("grouped_allreduce", compression, wires, tensors)
        reduced = weighted_now("grouped_allreduce", wires, name, reduce, scales, process_set, weight)
    elif learns(wires, name):
        *reduced, _ = GroupedAllreduce.apply(name, reduce, *scales, process_set, *wires)
    elif is_compiling():
        reduced = call_group(
            ALLREDUCE, name, process_set, wires, reduce=reduce, prescale=scales[0], postscale=scales[1]
        )
    else:
        reduced = synchronize(_start(wires, _like(wires, name), name, reduce, scales, process_set))
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(reduced, pairs, strict=True)]


# --- allgather and reducescatter ---


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather of several tensors as one operation; one handle, whose output is a tuple."""
    return start_group(ALLGATHER, name, process_set, tuple_of("grouped_allgather_async", tensors))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Does several allgathers as one operation. Differentiable."""
    tensors = tuple_of("grouped_allgather", tensors)
    if learns(tensors, name):
        return GroupedAllgather.apply(name, process_set, *tensors)[:-1]
    return call_group(ALLGATHER, name, process_set, tensors)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts several reducescatters as one operation; one handle, whose output is a tuple."""
    tensors = tuple_of("grouped_reducescatter_async", tensors)
    refuse_scalar(tensors)
    return start_group(
        REDUCESCATTER, name, process_set, tensors, reduce=share_reduce(op, name), prescale=prescale_factor,
        postscale=postscale_factor,
    )  # fmt: skip


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Does several reducescatters as one operation. Differentiable."""
    tensors = tuple_of("grouped_reducescatter", tensors)
    pairs = [compressed("grouped_reducescatter", compression, tensor, name) for tensor in tensors]
    wires = [wire for wire, _ in pairs]
    if learns(wires, name):
        *shares, _ = GroupedReducescatter.apply(
            name, op, process_set, prescale_factor, postscale_factor, None, *wires
        )
    else:
        refuse_scalar(wires)
        shares = call_group(
            REDUCESCATTER, name, process_set, wires, reduce=share_reduce(op, name), prescale=prescale_factor,
            postscale=postscale_factor,
        )  # fmt: skip
    return [compression.decompress(share, ctx) for share, (_, ctx) in zip(shares, pairs, strict=True)]


# --- gradients ---


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
        return *synchronize(grouped_allreduce_async(tensors, None, name, op, pre, post, group)), anchor(
            ctx, *tensors
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, op, pre, post, group = ctx.arguments
        require_linear(op, "grouped_allreduce")
        whole = [in_graph(ctx, grad) for grad in grads[:-1]]
        reduced = grouped_allreduce(whole, None, grad_name(name), Compression.none, op, pre, post, group)
        return (None, None, None, None, None, *reduced)


class GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, group: ProcessSet, *tensors: torch.Tensor) -> Tensors:
        ctx.arguments = ([t.shape[0] if t.dim() else 0 for t in tensors], name, group)
        return *synchronize(grouped_allgather_async(tensors, name, group)), anchor(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rows, name, group = ctx.arguments
        whole = [in_graph(ctx, grad) for grad in grads[:-1]]
        reduced = grouped_allreduce(whole, name=grad_name(name), op=Average, process_set=group)
        own = [
            part.narrow(0, rows_before(count, group, None if name is None else f"{name}.{i}"), count)
            for i, (part, count) in enumerate(zip(reduced, rows, strict=True))
        ]
        return (None, None, *own)


class GroupedReducescatter(torch.autograd.Function):
    """As Reducescatter, with GroupedShares."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, group: ProcessSet, pre: float, post: float, scale: float | None,
        *tensors: torch.Tensor,
    ) -> Tensors:  # fmt: skip
        ctx.arguments = (name, group, share_scale(op, group, pre * post) if scale is None else scale)
        return *synchronize(grouped_reducescatter_async(tensors, name, op, group, pre, post)), anchor(
            ctx, *tensors
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, group, scale = ctx.arguments
        parts = [in_graph(ctx, grad) for grad in grads[:-1]]
        if scale != 1.0:
            parts = [part * scale for part in parts]
        return (None,) * 6 + GroupedShares.apply(grad_name(name), group, *parts)[:-1]


class GroupedShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, group: ProcessSet, *shares: torch.Tensor) -> Tensors:
        ctx.arguments = (name, group)
        return *synchronize(grouped_allgather_async(shares, name, group)), anchor(ctx, *shares)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, group = ctx.arguments
        whole = [in_graph(ctx, grad) for grad in grads[:-1]]
        parts = GroupedReducescatter.apply(grad_name(name), Sum, group, 1.0, 1.0, 1.0, *whole)
        return None, None, *parts[:-1]
