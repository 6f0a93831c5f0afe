"""Allreduce of torch tensors, with its gradient. Thread: the caller's; gradients: autograd's."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from typing import Any

import torch

from horoclone.ops import ALLREDUCE, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set, set_id
from horoclone.torch.compression import Compression
from horoclone.torch.operations import handles
from horoclone.torch.operations.arguments import refuse_to_compress
from horoclone.torch.operations.functional import is_compiling, reduced, start
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, require_linear
from horoclone.torch.operations.handles import run, start_for, synchronize
from horoclone.torch.operations.spans import profiler
from horoclone.torch.operations.tensors import number_of


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
    if is_compiling():
        return reduced(
            "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor), process_set, True
        )()
    if not profiler._is_profiler_enabled:  # as in _now(), without the call of it
        plain = handles.call_plain(
            tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set, 0
        )
        if plain is not None:
            return tensor if plain is tensor else handles.synchronize(plain)
    return _slowly(tensor, tensor, average, name, op, prescale_factor, postscale_factor, process_set)


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
    if is_compiling():
        return reduced(
            "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor), process_set, True
        )
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
    if is_compiling():
        return reduced(
            "allreduce", [tensor], average, name, op, (prescale_factor, postscale_factor), process_set
        )
    output = _like(tensor, name)
    return _start(tensor, output, average, name, op, prescale_factor, postscale_factor, process_set, priority)


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
    scales = (prescale_factor, postscale_factor)
    if is_compiling():
        wire, ctx = compression.compress(tensor)
        return compression.decompress(
            start("allreduce", [wire], name, reduce, scales, process_set, differentiable=True)(), ctx
        )
    try:
        wire, ctx = compression.compress(tensor)
        learns = wire.requires_grad and torch.is_grad_enabled()
    except AttributeError:
        refuse_to_compress("allreduce", compression, tensor, name)
        raise
    if learns:
        reduced, _ = Allreduce.apply(wire, name, reduce, *scales, process_set)
    else:
        reduced = _now(wire, _like(wire, name), None, name, reduce, *scales, process_set)
    return compression.decompress(reduced, ctx)


def _like(tensor: torch.Tensor, name: str | None) -> torch.Tensor:
    try:
        return torch.empty_like(tensor, requires_grad=False)
    except TypeError:
        number_of(tensor, name, True)  # refuses what is no tensor
        raise


# The one way in: the core's fast path, which declines what it does not know; for that, and under a profiler, a request.
def _now(
    tensor: torch.Tensor, output: torch.Tensor, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet,
) -> torch.Tensor:  # fmt: skip
    if not profiler._is_profiler_enabled:
        plain = handles.call_plain(tensor, output, average, name, op, prescale, postscale, process_set, 0)
        if plain is not None:
            return output if plain is output else handles.synchronize(plain)
    return _slowly(tensor, output, average, name, op, prescale, postscale, process_set)


def _slowly(
    tensor: torch.Tensor, output: torch.Tensor, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet,
) -> torch.Tensor:  # fmt: skip
    reduce = resolve_reduce(average, op)
    return run(
        ALLREDUCE, name, tensor, output, number_of(tensor, name, True), reduce=reduce, prescale=prescale,
        postscale=postscale, process_set=set_id(process_set),
    )  # fmt: skip


def _start(
    tensor: torch.Tensor, output: torch.Tensor, average: bool | None, name: str | None, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet, priority: int,
) -> int:  # fmt: skip
    if not profiler._is_profiler_enabled:
        plain = handles.start_plain(
            tensor, output, average, name, op, prescale, postscale, process_set, priority
        )
        if plain is not None:
            return plain
    reduce = resolve_reduce(average, op)
    return start_for(
        ALLREDUCE, name, tensor, output, number_of(tensor, name, True), reduce=reduce, prescale=prescale,
        postscale=postscale, process_set=set_id(process_set), priority=priority,
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
