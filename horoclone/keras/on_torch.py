"""Gradients of Keras on the torch backend: all groups are submitted, then waited for.

Which gradients exist may differ between ranks and steps (a branch that a batch did not take). So every rank sends all
of them, zeros for those it lacks, and beside them flags that say who had one.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horoclone.torch import mpi_ops

if TYPE_CHECKING:
    from horoclone.keras.reduction import Part, Reduction


def scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """The gradient times a factor, as a new tensor."""
    return gradient * factor


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Sparse gradients as dense ones."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def value_of(variable: Any) -> torch.Tensor:
    """The torch parameter of a Keras variable."""
    value = variable.value if hasattr(variable, "value") else variable
    return value() if callable(value) else value


@torch.compiler.disable
@torch.no_grad()
def reduce(
    parts: Sequence[Part], grads: Sequence[Any], variables: Sequence[Any], settings: Reduction
) -> dict[int, Any]:
    """Place in the list -> reduced gradient; None where no rank had one. The tensors given stay as they are."""
    running = [_submit(part, grads, variables, settings) for part in parts]
    result: dict[int, Any] = {}
    for part, (handle, flags, contexts) in zip(parts, running, strict=True):
        *outputs, somebody = mpi_ops.synchronize(handle)
        for place, output, context, some, mine in zip(
            part.places, outputs, contexts, somebody.tolist(), flags, strict=True
        ):
            if some or mine:
                decompress = part.compression is not None
                result[place] = part.compression.decompress(output, context) if decompress else output
            else:
                result[place] = None
    return result


def _submit(
    part: Part, grads: Sequence[Any], variables: Sequence[Any], settings: Reduction
) -> tuple[int, list[bool], list[Any]]:
    """The handle of one group, which gradients this rank had, and what decompression needs."""
    wires, contexts, flags = [], [], []
    for place in part.places:
        gradient = grads[place]
        flags.append(gradient is not None)
        if gradient is None:
            gradient = torch.zeros_like(value_of(variables[place]), requires_grad=False)
        wire, context = dense(gradient).detach(), None
        if part.compression is not None:
            wire, context = part.compression.compress(wire)
        wires.append(wire.contiguous())
        contexts.append(context)
    wires.append(torch.tensor(flags, dtype=torch.float32))
    handle = mpi_ops.grouped_allreduce_async(
        wires,
        name=part.name,
        op=part.op,
        prescale_factor=part.prescale,
        postscale_factor=part.postscale,
        process_set=settings.process_set,
    )
    return handle, flags, contexts


@torch.no_grad()
def add_in_place(variable: Any, gradient: torch.Tensor) -> None:
    """variable += gradient."""
    value_of(variable).add_(dense(gradient))


@torch.no_grad()
def clear(variable: Any) -> None:
    """Sets a variable to zero."""
    value_of(variable).zero_()
