"""Allreduce of torch tensors, with its gradient. Thread: the caller's; gradients: autograd's."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from horoclone.ops import ALLREDUCE, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch.compression import Compression
from horoclone.torch.operations import calls
from horoclone.torch.operations.arguments import compressed
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, require_linear
from horoclone.torch.operations.handles import synchronize, table
from horoclone.torch.operations.spans import profiler
from horoclone.torch.operations.tensors import is_compiling, learns, number_of


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces `tensor` over the ranks in place and returns it. Any shape and dtype (no Average of bool).

    Raises ValueError for wrong arguments, Mismatch when the ranks differ in dtype, shape, op or scales, Unsupported
    for tensors that are neither in host memory nor on one of NVIDIA's GPUs.
    """
    return _now(tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> int:
    """Starts `allreduce_` and returns a handle for `poll` and `synchronize`. ValueError if `name` is pending.

    priority: of what all ranks have submitted, the highest runs first (docs/priority.md).
    """
    return _start(tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> int:
    """Starts a reduction into a new tensor and returns a handle; `tensor` must not change until it is done."""
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
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the reduction of `tensor` over the ranks as a new tensor of the same shape and dtype.

    Differentiable for Average and Sum: the gradient is the same reduction of the gradient.
    """
    reduce = resolve_reduce(average, op)
    wire, ctx = compressed("allreduce", compression, tensor, name)
    if learns((wire,), name):
        reduced, _ = Allreduce.apply(wire, name, reduce, prescale_factor, postscale_factor, process_set)
    else:
        reduced = _now(
            wire, _like(wire, name), None, name, reduce, prescale_factor, postscale_factor, process_set
        )
    return compression.decompress(reduced, ctx)


def _like(tensor: torch.Tensor, name: str | None) -> torch.Tensor | None:
    """A new one for the result; a graph of torch.compile has its own."""
    if is_compiling():
        return None
    try:
        return torch.empty_like(tensor, requires_grad=False)
    except TypeError:
        number_of(tensor, name, True)  # refuses what is no tensor
        raise


# The core's fast path, which declines what it does not know; for that, under a profiler and in a graph, as all others.
def _now(
    tensor: torch.Tensor, output: torch.Tensor | None, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet,
) -> torch.Tensor:  # fmt: skip
    if not (is_compiling() or profiler._is_profiler_enabled):
        plain = table.call_plain(tensor, output, average, name, op, prescale, postscale, process_set, 0)
        if plain is not None:
            return output if plain is output else synchronize(plain)
    return calls.call(
        ALLREDUCE, name, process_set, tensor, output, reduce=resolve_reduce(average, op), prescale=prescale,
        postscale=postscale,
    )  # fmt: skip


def _start(
    tensor: torch.Tensor, output: torch.Tensor | None, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet, priority: int,
) -> int:  # fmt: skip
    if not (is_compiling() or profiler._is_profiler_enabled):
        plain = table.start_plain(
            tensor, output, average, name, op, prescale, postscale, process_set, priority
        )
        if plain is not None:
            return plain
    return calls.start(
        ALLREDUCE, name, process_set, tensor, output, reduce=resolve_reduce(average, op), prescale=prescale,
        postscale=postscale, priority=priority,
    )  # fmt: skip


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
