"""How gradients are reduced, and the reduction of those outside of buckets: in a first step, and sparse ones."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from horoclone.ops import Average
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.torch import operations
from horoclone.torch.compression import Compression
from horoclone.torch.compressor import GradientCompressor
from horoclone.torch.optimizer.buckets import GradState, is_dense


@dataclass(frozen=True)
class Terms:
    """How gradients are reduced; the same on every rank."""

    op: int = Average
    predivide: float = 1.0
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    unused_as_none: bool = False
    scale_local_gradients: bool = True
    process_set: ProcessSet = global_process_set

    def scales(self) -> tuple[float, float]:
        return 1.0 / self.predivide, self.predivide

    def reduction(self) -> dict[str, Any]:
        """The same for a request to the core."""
        return {"reduce": self.op, "prescale": 1.0 / self.predivide, "postscale": self.predivide}


def reduces_buckets(compression: Any) -> bool:
    return isinstance(compression, GradientCompressor)


def submit_alone(state: GradState, terms: Terms, weight: float | None = None) -> None:
    """Starts the reduction of a gradient that lies in no bucket (zeros where this rank has none). weight: of this rank
    in the mean; None: all count alike."""
    state.arrived = True
    grad = state.parameter.grad
    state.used = grad is not None
    if grad is None:
        grad = state.zeros()
        if state.parameter.requires_grad:
            state.parameter.grad = grad
    start_alone(state, grad, terms, weight)


def start_alone(state: GradState, grad: torch.Tensor, terms: Terms, weight: float | None = None) -> None:
    """Starts it with this gradient, whatever parameter.grad is."""
    if grad.is_sparse and terms.sparse_as_dense:
        grad = grad.to_dense()
    if grad.is_sparse:
        handle: Any = operations.sparse_allreduce_async(grad, state.name, terms.op, terms.process_set)
        state.pending = (handle, None, None)
        return
    wire, ctx = _single_compression(terms).compress(grad.detach())
    wire = wire.contiguous()
    # Not in place: another parameter's gradient may lie in the same memory, and would be reduced twice.
    handle = operations.allreduce_async(
        wire, None, state.name, terms.op, *terms.scales(), terms.process_set, weight=weight
    )
    state.pending = (handle, wire, ctx)


def _single_compression(terms: Terms) -> Any:
    """For gradients that are reduced alone, as all are in a learning step."""
    chosen = terms.compression
    return Compression.none if reduces_buckets(chosen) else chosen


def wait_alone(state: GradState, terms: Terms) -> Callable[[], None]:
    """Waits for the result, and returns what puts it into parameter.grad: when all are there, since several gradients
    may lie in one memory, from which another reduction still reads."""
    (handle, wire, ctx), state.pending = state.pending, None
    output = operations.synchronize(handle)
    state.reduced = True
    return partial(_hand_out_alone, state, output, ctx, wire is None, terms)


def _hand_out_alone(state: GradState, output: Any, ctx: Any, is_sparse: bool, terms: Terms) -> None:
    parameter = state.parameter
    grad = parameter.grad
    if is_sparse:
        parameter.grad = output
        return
    if grad is None and not parameter.requires_grad:
        return
    output = _single_compression(terms).decompress(output, ctx)
    if state.becomes_sparse:
        state.hand_out_sparse(output)
    elif grad is None or grad.is_sparse or not is_dense(grad):
        parameter.grad = output
    else:
        grad.copy_(output)
