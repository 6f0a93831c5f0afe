"""Allreduce of torch tensors, with its gradient. Thread: the caller's; gradients: autograd's."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from horoclone.ops import ALLREDUCE, ReduceOp, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch.compression import Compression
from horoclone.torch.operations import calls, weighted
from horoclone.torch.operations.arguments import compressed
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, require_linear
from horoclone.torch.operations.handles import synchronize, table
from horoclone.torch.operations.spans import profiler
from horoclone.torch.operations.tensors import are_written_to, count_versions, is_compiling, learns, number_of


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> torch.Tensor:
    """Reduces `tensor` over the ranks in place and returns it. Any shape and dtype (no Average of bool).

    Raises ValueError for wrong arguments, Mismatch when the ranks differ in dtype, shape, op or scales, Unsupported
    for tensors that are neither in host memory nor on one of NVIDIA's GPUs.
    """
    if weight is not None:
        mean = _weighted(
            "allreduce_", tensor, True, average, name, op, prescale_factor, postscale_factor, process_set, weight
        )  # fmt: skip
        return synchronize(mean)
    return _now(tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
    weight: Any = None,
) -> int:
    """Starts `allreduce_` and returns a handle for `poll` and `synchronize`. ValueError if `name` is pending.

    priority: of what all ranks have submitted, the highest runs first (docs/priority.md).
    """
    if weight is not None:
        return _weighted(
            "allreduce_async_", tensor, True, average, name, op, prescale_factor, postscale_factor, process_set, weight,
            priority,
        )  # fmt: skip
    handle = _start(
        tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority
    )
    are_written_to((tensor,))
    return handle


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
    weight: Any = None,
) -> int:
    """Starts a reduction into a new tensor and returns a handle; `tensor` must not change until it is done."""
    if weight is not None:
        return _weighted(
            "allreduce_async", tensor, False, average, name, op, prescale_factor, postscale_factor, process_set, weight,
            priority,
        )  # fmt: skip
    return _start(
        tensor,
        _like(tensor, name),
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        priority,
    )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    weight: Any = None,
) -> torch.Tensor:
    """Returns the reduction of `tensor` over the ranks as a new tensor of the same shape and dtype.

    Differentiable for Average and Sum: the gradient is the same reduction of the gradient. weight: how much this rank
    counts in the mean, sum(weight * tensor) / sum(weight): a number of 0 or more, given on every rank or on none. Also
    of the other forms; InvalidArgument on every rank where one's weight is negative or not finite, or all are 0.
    """
    reduce = resolve_reduce(average, op)
    wire, ctx = compressed("allreduce", compression, tensor, name)
    if weight is not None:
        weighted.check_compression("allreduce", compression, [wire], [tensor])
        scales = (prescale_factor, postscale_factor)
        reduced = weighted_now("allreduce", [wire], name, reduce, scales, process_set, weight, single=True)
    elif learns((wire,), name):
        reduced, _ = Allreduce.apply(wire, name, reduce, prescale_factor, postscale_factor, process_set)
    else:
        reduced = _now(
            wire, _like(wire, name), None, name, reduce, prescale_factor, postscale_factor, process_set
        )
    return compression.decompress(reduced, ctx)


def _weighted(
    call: str, tensor: torch.Tensor, in_place: bool, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet, weight: Any, priority: int = 0,
) -> int:  # fmt: skip
    if priority:
        raise ValueError(f"{call}: weight= does not work with priority=")
    return weighted.start(
        call, [tensor], [tensor] if in_place else None, name, resolve_reduce(average, op), (prescale, postscale),
        process_set, weight, single=True,
    )  # fmt: skip


def _like(tensor: torch.Tensor, name: str | None) -> torch.Tensor | None:
    """A new one for the result; a graph of torch.compile has its own."""
    if is_compiling():
        return None
    try:
        return torch.empty_like(tensor, requires_grad=False)
    except TypeError:
        number_of(tensor, name, True)  # refuses what is no tensor
        raise


# The core's fast path, which declines what it does not know; for that, under a profiler, in forward mode and in a
# graph, as all others.
def _now(
    tensor: torch.Tensor, output: torch.Tensor | None, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet,
) -> torch.Tensor:  # fmt: skip
    if not (is_compiling() or profiler._is_profiler_enabled or forward_ad._current_level >= 0):
        plain = table.call_plain(tensor, output, average, name, op, prescale, postscale, process_set, 0)
        if plain is not None:
            if plain is not output:
                return synchronize(plain)
            if output is tensor:
                count_versions((tensor,))
            return output
    reduced = calls.call(
        ALLREDUCE, name, process_set, tensor, output, reduce=resolve_reduce(average, op), prescale=prescale,
        postscale=postscale,
    )  # fmt: skip
    if output is tensor:
        are_written_to((tensor,))
    return reduced


def _start(
    tensor: torch.Tensor, output: torch.Tensor | None, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet, priority: int,
) -> int:  # fmt: skip
    if not (is_compiling() or profiler._is_profiler_enabled or forward_ad._current_level >= 0):
        plain = table.start_plain(
            tensor, output, average, name, op, prescale, postscale, process_set, priority
        )
        if plain is not None:
            return plain
    return calls.start(
        ALLREDUCE, name, process_set, tensor, output, reduce=resolve_reduce(average, op), prescale=prescale,
        postscale=postscale, priority=priority,
    )  # fmt: skip


def weighted_now(
    call: str, tensors: Sequence[torch.Tensor], name: str | None, reduce: int, scales: tuple[float, float],
    process_set: ProcessSet, weight: Any, single: bool = False,
) -> Any:  # fmt: skip
    """The weighted mean of tensors, as new ones, with its gradient."""

    def start() -> Any:
        return weighted.start(call, tensors, None, name, reduce, scales, process_set, weight, single)

    if not learns(tensors, name):
        return synchronize(start())
    *means, _ = WeightedMean.apply(start, name, process_set, *tensors)
    return means[0] if single else means


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, pre: float, post: float, group: ProcessSet
    ) -> Any:
        ctx.arguments = (name, op, pre, post, group)
        return synchronize(allreduce_async(tensor, None, name, op, pre, post, group)), anchor(ctx, tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        name, op, pre, post, group = ctx.arguments
        require_linear(op, "allreduce")
        reduced = allreduce(
            in_graph(ctx, grad), None, grad_name(name), Compression.none, op, pre, post, group
        )
        return reduced, None, None, None, None, None


class WeightedMean(torch.autograd.Function):
    """Each rank's own share of it, w / sum(w), is its derivative."""

    @staticmethod
    def forward(ctx: Any, start: Any, name: str | None, group: ProcessSet, *tensors: torch.Tensor) -> Any:
        handle = start()
        means = synchronize(handle)
        ctx.arguments = (handle.share, name, group)
        return *(means if type(means) is tuple else (means,)), anchor(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        share, name, group = ctx.arguments
        whole = [in_graph(ctx, grad) for grad in grads[:-1]]
        names = [None if name is None else grad_name(f"{name}.{i}") for i in range(len(whole))]
        reduced = [
            allreduce(part, name=own, op=Sum, process_set=group)
            for part, own in zip(whole, names, strict=True)
        ]
        return (None, None, None, *[part * share for part in reduced])
