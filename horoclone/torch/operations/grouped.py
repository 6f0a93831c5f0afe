"""Operations on several tensors at once: all or nothing, one agreement, one handle.

Same rules for arguments, handles and errors as in all_reduce.py. As in Horovod, asynchronous and in-place functions and
allgather return a tuple, the others a list. Thread: the caller's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from horoclone.errors import EmptyGroup
from horoclone.ops import ALLGATHER, ALLREDUCE, REDUCESCATTER, Average, Sum, resolve_reduce
from horoclone.process_sets import ProcessSet, global_process_set, set_id
from horoclone.runtime import native
from horoclone.torch.compression import Compression
from horoclone.torch.operations import functional, handles, requests
from horoclone.torch.operations.all_gather import rows_before
from horoclone.torch.operations.arguments import refuse_to_compress, share_reduce, tuple_of
from horoclone.torch.operations.functional import is_compiling, start
from horoclone.torch.operations.gpu import HOST, Place, behind, place_of_all, rows_of
from horoclone.torch.operations.gradients import anchor, grad_name, in_graph, require_linear, share_scale
from horoclone.torch.operations.handles import remember, synchronize
from horoclone.torch.operations.spans import profiler
from horoclone.torch.operations.tensors import (
    ON_GPU,
    from_result,
    learns,
    number_of,
    refuse_scalar,
)

if TYPE_CHECKING:
    from horoclone._core import Runtime

Tensors = Sequence[torch.Tensor]

# --- grouped allreduce ---------------------------------------------------------------------------------------------


def _submit_group(
    op: int, name: str | None, tensors: Tensors, outputs: Tensors | None, reduce: int, scales: tuple[float, float],
    process_set: ProcessSet,
) -> tuple[Runtime, int, Place]:  # fmt: skip
    """One handle for all. outputs None: the core owns the results."""
    if not tensors:
        empty = ValueError if op == ALLREDUCE else EmptyGroup
        raise empty("a grouped operation needs at least one tensor")
    dtypes = [number_of(t, name, True) for t in tensors]
    place = place_of_all(tensors) if max(dtypes) >= ON_GPU else HOST
    runtime = native()
    handle = requests.submit_group(
        runtime, op, name, sources=tensors, targets=outputs, dtypes=dtypes, reduce=reduce, prescale=scales[0],
        postscale=scales[1], process_set=set_id(process_set), place=place,
    )  # fmt: skip
    return runtime, handle, place


def _start(
    tensors: Tensors, outputs: Tensors, name: str | None, reduce: int, scales: tuple[float, float],
    process_set: ProcessSet,
) -> int:  # fmt: skip
    """Of a grouped allreduce: the core's fast path, which declines what it does not know, or a request."""
    if not profiler._is_profiler_enabled:
        plain = handles.start_plain_group(tensors, outputs, None, name, reduce, *scales, process_set, 0)
        if plain is not None:
            return plain
    runtime, handle, place = _submit_group(ALLREDUCE, name, tensors, outputs, reduce, scales, process_set)
    return remember(runtime, handle, outputs, tensors, behind(place, outputs))


def _compressed(
    call: str, tensors: Tensors, compression: Any, name: str | None
) -> list[tuple[torch.Tensor, Any]]:
    tensors = tuple_of(call, tensors)
    try:
        return [compression.compress(t) for t in tensors]
    except AttributeError:
        for tensor in tensors:
            refuse_to_compress(call, compression, tensor, name)
        raise


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts one reduction of several tensors in place (all or nothing); one handle, whose output is a tuple."""
    if is_compiling():
        return functional.reduced(
            "grouped_allreduce",
            list(tensors),
            average,
            name,
            op,
            (prescale_factor, postscale_factor),
            process_set,
            True,
        )
    tensors = tuple_of("grouped_allreduce_async_", tensors)
    reduce = resolve_reduce(average, op)
    return _start(tensors, tensors, name, reduce, (prescale_factor, postscale_factor), process_set)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Reduces several tensors in place as one operation and returns them."""
    return synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts one reduction of several tensors into new ones; one handle, whose output is a tuple."""
    if is_compiling():
        return functional.reduced(
            "grouped_allreduce",
            list(tensors),
            average,
            name,
            op,
            (prescale_factor, postscale_factor),
            process_set,
        )
    tensors = tuple_of("grouped_allreduce_async", tensors)
    reduce = resolve_reduce(average, op)
    try:
        outputs = tuple([torch.empty_like(t, requires_grad=False) for t in tensors])
    except TypeError:
        learns(tensors, name)  # refuses what is no tensor
        raise
    return _start(tensors, outputs, name, reduce, (prescale_factor, postscale_factor), process_set)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Returns the reductions of several tensors, done as one operation. Differentiable for Average and Sum."""
    reduce = resolve_reduce(average, op)
    pairs = (
        [compression.compress(t) for t in tensors]
        if is_compiling()
        else _compressed("grouped_allreduce", tensors, compression, name)
    )
    wires = [wire for wire, _ in pairs]
    if is_compiling():
        reduced = start(
            "grouped_allreduce",
            wires,
            name,
            reduce,
            (prescale_factor, postscale_factor),
            process_set,
            differentiable=True,
        )()
    elif learns(wires, name):
        *reduced, _ = GroupedAllreduce.apply(
            name, reduce, prescale_factor, postscale_factor, process_set, *wires
        )
    else:
        reduced = synchronize(
            grouped_allreduce_async(wires, None, name, reduce, prescale_factor, postscale_factor, process_set)
        )
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(reduced, pairs, strict=True)]


# --- allgather and reducescatter ---


def _make_group(tensors: Tensors, place: Place) -> Callable[[Runtime, int], tuple[torch.Tensor, ...]]:
    if place is not HOST:
        like = [t.detach()[:0] if t.dim() else t.detach() for t in tensors]
        return lambda rt, h: tuple([rows_of(rt, h, i, form, place) for i, form in enumerate(like)])
    forms = [(tuple(t.shape[1:]), t.dtype) for t in tensors]
    return lambda rt, h: tuple(
        [from_result(rt.result(h, i), row, kind) for i, (row, kind) in enumerate(forms)]
    )


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather of several tensors as one operation; one handle, whose output is a tuple."""
    if is_compiling():
        return start("grouped_allgather", list(tensors), name, process_set=process_set)
    tensors = tuple_of("grouped_allgather_async", tensors)
    runtime, handle, place = _submit_group(ALLGATHER, name, tensors, None, Sum, (1.0, 1.0), process_set)
    return remember(runtime, handle, None, tensors, _make_group(tensors, place))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Does several allgathers as one operation. Differentiable."""
    tensors = tuple(tensors) if is_compiling() else tuple_of("grouped_allgather", tensors)
    if is_compiling():
        return start("grouped_allgather", tensors, name, Sum, (1.0, 1.0), process_set, differentiable=True)()
    if learns(tensors, name):
        return GroupedAllgather.apply(name, process_set, *tensors)[:-1]
    return synchronize(grouped_allgather_async(tensors, name, process_set))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts several reducescatters as one operation; one handle, whose output is a tuple."""
    if is_compiling():
        return start(
            "grouped_reducescatter",
            list(tensors),
            name,
            share_reduce(op, name),
            (prescale_factor, postscale_factor),
            process_set,
        )
    tensors = tuple_of("grouped_reducescatter_async", tensors)
    refuse_scalar(tensors)
    reduce = share_reduce(op, name)
    scales = (prescale_factor, postscale_factor)
    runtime, handle, place = _submit_group(REDUCESCATTER, name, tensors, None, reduce, scales, process_set)
    return remember(runtime, handle, None, tensors, _make_group(tensors, place))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Does several reducescatters as one operation. Differentiable."""
    pairs = (
        [compression.compress(t) for t in tensors]
        if is_compiling()
        else _compressed("grouped_reducescatter", tensors, compression, name)
    )
    wires = [wire for wire, _ in pairs]
    if is_compiling():
        shares = start(
            "grouped_reducescatter",
            wires,
            name,
            share_reduce(op, name),
            (prescale_factor, postscale_factor),
            process_set,
            differentiable=True,
        )()
    elif learns(wires, name):
        *shares, _ = GroupedReducescatter.apply(
            name, op, process_set, prescale_factor, postscale_factor, None, *wires
        )
    else:
        handle = grouped_reducescatter_async(wires, name, op, process_set, prescale_factor, postscale_factor)
        shares = synchronize(handle)
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
