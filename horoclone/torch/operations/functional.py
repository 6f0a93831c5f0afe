"""The operations as torch.library ops, `torch.ops.horoclone.*`: what hvd.allreduce becomes under torch.compile.

Each operation is a pair: `<kind>_start` submits and returns a ticket, `<kind>_wait` returns the results. Both are
marked as effects, so that a compiler keeps them, in the program's order: the same on every rank. `wait` takes the
inputs as well, because their memory is in use until then. Thread: the caller's.
"""

# mypy: disable-error-code="no-untyped-call, no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horoclone import ops, process_sets
from horoclone.errors import Unsupported
from horoclone.handles import ROWS
from horoclone.ops import CALLS, Average, Sum
from horoclone.process_sets import ProcessSet, set_id
from horoclone.runtime import native
from horoclone.torch.operations.handles import submit, submit_group, synchronize
from horoclone.torch.operations.tensors import refuse_scalar

__all__ = ["KINDS", "Started", "call", "start"]

Tensors = Sequence[torch.Tensor]

# Everything but the tensors. splits: alltoall's; for allgather everybody's first dimensions, where they differ.
OPTIONS = "str? name, int reduce, float prescale, float postscale, int root, int process_set, int[]? splits"
Options = tuple[str | None, int, float, float, int, int, "Sequence[int] | None"]

KINDS = {
    "allreduce": ops.ALLREDUCE,
    "grouped_allreduce": ops.ALLREDUCE,
    "allgather": ops.ALLGATHER,
    "grouped_allgather": ops.ALLGATHER,
    "reducescatter": ops.REDUCESCATTER,
    "grouped_reducescatter": ops.REDUCESCATTER,
    "broadcast": ops.BROADCAST,
    "alltoall": ops.ALLTOALL,
}

_library = torch.library.Library("horoclone", "FRAGMENT")


def _ranks_of(set_number: int) -> list[int]:
    """World ranks of a process set; NotInitialized before hvd.init()."""
    native()
    return process_sets.registered()[set_number]


# --- kernels ---


def _start(kind: str, tensors: Tensors, *options: Any) -> torch.Tensor:
    """Submits. The ticket is the handle, in an int64 tensor: it survives whatever a compiler does to tensors."""
    name, reduce, prescale, postscale, root, set_number, splits = options
    op = KINDS[kind]
    whole = [tensor.detach().contiguous() for tensor in tensors]
    if op == ops.BROADCAST:
        whole = [tensor.clone() for tensor in whole]
        outputs: list[torch.Tensor] | None = whole
    else:
        outputs = [torch.empty_like(tensor) for tensor in whole] if op == ops.ALLREDUCE else None
    terms: dict[str, Any] = {"reduce": reduce, "prescale": prescale, "postscale": postscale, "root": root}
    if kind.startswith("grouped"):
        handle = submit_group(op, name, set_number, whole, outputs, **terms)
    else:
        target, output = (None, ROWS) if outputs is None else (outputs[0], outputs[0])
        rows = splits if op == ops.ALLTOALL else None
        handle = submit(op, name, set_number, whole[0], target, output, splits=rows, **terms)
    return torch.tensor(handle, device="cpu")


def _wait(kind: str, ticket: torch.Tensor, tensors: Tensors, *options: Any) -> list[torch.Tensor]:
    given = synchronize(int(ticket))
    results = list(given) if isinstance(given, (tuple, list)) else [given]
    if not (KINDS[kind] == ops.ALLTOALL and options[-1] is not None):
        for result, shape in zip(results, _shapes(kind, tensors, options), strict=True):
            if tuple(result.shape) != tuple(shape):
                raise ValueError(
                    f"{kind} of {options[0] or 'an unnamed tensor'} in a compiled function: the result has shape "
                    f"{list(result.shape)}, not {list(shape)}: ranks gave different first dimensions. Take the call "
                    "out of the compiled function (torch.compiler.disable), or give every rank as many rows."
                )
    return results


def _shapes(kind: str, tensors: Tensors, options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Of the results, from those of the inputs; first dimensions are taken to be everybody's."""
    op, set_number, splits = KINDS[kind], options[5], options[6]
    if op in (ops.ALLREDUCE, ops.BROADCAST):
        return [tuple(tensor.shape) for tensor in tensors]
    ranks = _ranks_of(set_number)
    if op == ops.ALLGATHER:
        total = [sum(splits) if splits is not None else len(ranks) * tensor.shape[0] for tensor in tensors]
        return [(rows, *tensor.shape[1:]) for rows, tensor in zip(total, tensors, strict=True)]
    if op == ops.REDUCESCATTER:
        mine = ranks.index(native().rank)
        return [(_share(tensor.shape[0], len(ranks))[mine], *tensor.shape[1:]) for tensor in tensors]
    return [tuple(tensors[0].shape), (len(ranks),)]


def _share(rows: int, size: int) -> list[int]:
    return [rows // size + (rank < rows % size) for rank in range(size)]


def _fake_start(tensors: Tensors, *options: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _fake_wait(kind: str, tensors: Tensors, options: Sequence[Any]) -> list[torch.Tensor]:
    if KINDS[kind] == ops.ALLTOALL:
        size = len(_ranks_of(options[5]))
        rows = tensors[0].shape[0] if options[6] is None else torch.library.get_ctx().new_dynamic_size()
        return [
            tensors[0].new_empty((rows, *tensors[0].shape[1:])),
            torch.empty(size, dtype=torch.int32, device="cpu"),  # in host memory, wherever the rows are
        ]
    shapes = _shapes(kind, tensors, options)
    return [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]


def call(kind: str, tensors: Tensors, *options: Any) -> list[torch.Tensor]:
    """start and wait at once."""
    ticket = getattr(torch.ops.horoclone, f"{kind}_start")(tensors, *options)
    return list(getattr(torch.ops.horoclone, f"{kind}_wait")(ticket, tensors, *options))


# --- gradients: Horovod's factors, as in the operations' own modules ---


def _gradient(kind: str, shapes: list[Any], options: Options, grads: Tensors) -> list[torch.Tensor]:
    name, reduce, prescale, postscale, root, set_number, splits = options
    op, name = KINDS[kind], None if name is None else f"{name}.grad"
    group = "grouped_" if kind.startswith("grouped") else ""
    whole = [grad.contiguous() for grad in grads]
    if op in (ops.ALLREDUCE, ops.REDUCESCATTER) and reduce not in (Average, Sum):
        raise Unsupported(
            f"{kind} with op={ops.REDUCE_NAMES[reduce]} has no gradient here: only Average and Sum are linear. Call it "
            "on tensor.detach() if the gradient is not wanted."
        )
    if op == ops.ALLREDUCE:
        return call(kind, whole, name, reduce, prescale, postscale, root, set_number, splits)
    ranks = _ranks_of(set_number)
    if op == ops.REDUCESCATTER:
        factor = prescale * postscale * (len(ranks) if reduce == Sum else 1)
        parts = [grad if factor == 1.0 else grad * factor for grad in whole]
        if group and any(shape[0] % len(ranks) for shape in shapes):
            raise Unsupported(
                f"{kind} in a compiled function has a gradient only for rows that {len(ranks)} divides"
            )
        shares = None if shapes[0][0] % len(ranks) == 0 else _share(shapes[0][0], len(ranks))
        return call(f"{group}allgather", parts, name, Sum, 1.0, 1.0, 0, set_number, shares)
    if op == ops.ALLTOALL:
        if splits is not None:
            raise Unsupported("alltoall with splits in a compiled function has no gradient; leave it outside")
        return call(kind, whole[:1], name, Sum, 1.0, 1.0, 0, set_number, None)[:1]
    reduced = call(f"{group}allreduce", whole, name, Average, 1.0, 1.0, 0, set_number, None)
    if op == ops.BROADCAST:
        return reduced if native().rank == root else [torch.zeros_like(part) for part in reduced]
    mine, rows = ranks.index(native().rank), [shape[0] for shape in shapes]
    starts = [sum(splits[:mine]) if splits is not None else mine * count for count in rows]
    return [r.narrow(0, at, count) for r, at, count in zip(reduced, starts, rows, strict=True)]


def _define(kind: str) -> None:
    start, wait = f"{kind}_start", f"{kind}_wait"
    _library.define(f"{start}(Tensor[] tensors, {OPTIONS}) -> Tensor")
    _library.define(f"{wait}(Tensor ticket, Tensor[] tensors, {OPTIONS}) -> Tensor[]")
    _library.impl(
        start, lambda tensors, *options: _start(kind, tensors, *options), "CompositeExplicitAutograd"
    )
    _library.impl(
        wait,
        lambda ticket, tensors, *options: _wait(kind, ticket, tensors, *options),
        "CompositeExplicitAutograd",
    )

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shapes = [tensor.shape for tensor in inputs[1]]
        ctx.options = inputs[2:]
        if KINDS[kind] == ops.ALLTOALL:
            ctx.mark_non_differentiable(output[1])

    def backward(ctx: Any, grads: Any) -> Any:
        return (None, _gradient(kind, ctx.shapes, ctx.options, grads), *[None] * 7)

    torch.library.register_fake(f"horoclone::{start}", _fake_start, lib=_library)
    torch.library.register_fake(
        f"horoclone::{wait}",
        lambda ticket, tensors, *options: _fake_wait(kind, tensors, options),
        lib=_library,
    )
    torch.library.register_autograd(f"horoclone::{wait}", backward, setup_context=keep, lib=_library)
    for name in (start, wait):
        _mark_as_effect(f"horoclone::{name}")


def _mark_as_effect(name: str) -> None:
    """Where torch knows of effects; an older one keeps the order of a graph anyway."""
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is not None:
        from torch._library.effects import EffectType

        register(name, EffectType.ORDERED)


for _kind in KINDS:
    _define(_kind)


# --- what the public functions call while torch.compile traces them ---


class Started:
    """The handle of an asynchronous operation in a compiled function: calling it, or hvd.synchronize, waits."""

    def __init__(
        self,
        kind: str,
        tensors: list[torch.Tensor],
        options: Options,
        targets: list[torch.Tensor] | None = None,
    ) -> None:
        self.kind, self.tensors, self.options, self.targets = kind, tensors, options, targets
        self.ticket = getattr(torch.ops.horoclone, f"{kind}_start")(tensors, *options)

    def __call__(self) -> Any:
        wait = getattr(torch.ops.horoclone, f"{self.kind}_wait")
        results = list(wait(self.ticket, self.tensors, *self.options))
        if self.targets is not None:
            with torch.no_grad():
                for target, result in zip(self.targets, results, strict=True):
                    target.copy_(result)
            results = list(self.targets)
        if self.kind == "alltoall":
            return results[0], results[1]
        return tuple(results) if self.kind.startswith("grouped") else results[0]


def start(
    op: int,
    tensors: Tensors,
    name: str | None,
    process_set: ProcessSet,
    *,
    group: bool = False,
    differentiable: bool = False,
    in_place: bool = False,
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Sequence[int] | None = None,
    priority: int = 0,
) -> Any:  # a Started, which passes for a handle
    """Starts an operation of KINDS. in_place: the results go into the tensors. A graph has its own order, whatever the
    priority."""
    if op == ops.REDUCESCATTER:
        refuse_scalar(tensors)
    options = (name, reduce, float(prescale), float(postscale), root, set_id(process_set), splits)
    inputs = [(tensor if differentiable else tensor.detach()).contiguous() for tensor in tensors]
    kind = f"grouped_{CALLS[op]}" if group else CALLS[op]
    return Started(kind, inputs, options, list(tensors) if in_place else None)
