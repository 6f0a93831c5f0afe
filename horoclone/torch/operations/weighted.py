"""Means of torch tensors in which each rank counts as much as its weight says: sum(w * x) / sum(w).

The weights travel behind the tensors, in the same operation (horoclone/weights.py). Nothing is written to the caller's
tensors before all of them are known to be right. Thread: the caller's.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horoclone import weights
from horoclone.ops import ALLREDUCE, Sum
from horoclone.process_sets import ProcessSet
from horoclone.torch.operations.calls import start_group
from horoclone.torch.operations.handles import synchronize, table
from horoclone.torch.operations.spans import profiler
from horoclone.torch.operations.tensors import number_of, uncompiled

Tensors = Sequence[torch.Tensor]


def wire_of(dtype: torch.dtype) -> torch.dtype | None:
    """In which dtype elements travel when they are weighted; None: they cannot be."""
    name = weights.wire_of(_name(dtype))
    return None if name is None else getattr(torch, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def length(dtype: torch.dtype, size: int) -> int:
    """Elements that the weights of so many ranks take behind others of this dtype."""
    return size * weights.places(_name(dtype))


def weigh(tensor: torch.Tensor, tail: torch.Tensor, weight: float, process_set: ProcessSet) -> None:
    """In place: multiplies what this rank has, and writes its weight into the tail."""
    wire = _name(tensor.dtype)
    own = weights.rounded(weight, wire)
    if own == 0:
        tensor.zero_()  # also what is not finite: the mean of no samples
    else:
        tensor.mul_(own)
    rank, size = process_set.rank() or 0, process_set.size() or 1
    tail.copy_(torch.tensor(weights.tail(own, wire, rank, size), dtype=tail.dtype, device="cpu"))


def divide(sums: torch.Tensor, tail: torch.Tensor, label: str, process_set: ProcessSet) -> float:
    """In place, after the reduction: the mean. Returns the sum of the weights; InvalidArgument on every rank where some
    weight is wrong."""
    whole = weights.total(tail.tolist(), _name(tail.dtype), label, process_set.ranks or [0])
    if sums.dtype == torch.bfloat16:
        sums.div_(whole)  # as a number it keeps its precision
    else:
        # By a number CUDA does not divide
        sums.div_(torch.tensor(whole, dtype=sums.dtype, device=sums.device))
    return whole


class Mean:
    """The handle of one: calling it, or hvd.synchronize, waits."""

    def __init__(
        self,
        handle: Any,
        tails: int,
        outputs: Tensors,
        weight: float,
        label: str,
        process_set: ProcessSet,
        single: bool,
    ) -> None:
        self.parts = (handle,)
        self.share = 0.0  # of this rank in the mean, once that is known
        self._tails, self._outputs, self._weight, self._label = tails, outputs, weight, label
        self._set, self._single = process_set, single

    @torch.no_grad()
    def __call__(self) -> Any:
        payload = synchronize(self.parts[0])
        if payload is None:
            return None  # given already
        sums, tails = payload[: -self._tails], payload[-self._tails :]
        for tail in tails:
            for one in sums:
                if one.dtype == tail.dtype:
                    self.share = self._weight / divide(one, tail, self._label, self._set)
        for output, mean in zip(self._outputs, sums, strict=True):
            output.copy_(mean)
        return self._outputs[0] if self._single else tuple(self._outputs)


@uncompiled
@torch.no_grad()
def start(
    call: str,
    tensors: Tensors,
    outputs: Tensors | None,
    name: str | None,
    reduce: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    weight: Any,
    single: bool = False,
) -> Any:  # a Mean, which passes for a handle
    """Starts it. outputs None: new ones. single: the output is one tensor, not a tuple."""
    weights.check_mean(call, reduce, scales)
    value = weights.number(call, weight)
    wires = [_wire(call, tensor, name) for tensor in tensors]
    ranks = process_set.size() or 1
    payload = [
        t.detach().to(wire, copy=True, memory_format=torch.contiguous_format)
        for t, wire in zip(tensors, wires, strict=True)
    ]
    tails = {
        wire: tensors[0].new_empty(length(wire, ranks), dtype=wire, requires_grad=False)
        for wire in dict.fromkeys(wires)
    }
    for part in payload:
        weigh(part, tails[part.dtype], value, process_set)
    payload += tails.values()
    handle = None
    if not profiler._is_profiler_enabled:
        handle = table.start_plain_group(payload, payload, None, name, Sum, 1.0, 1.0, process_set, 0)
    if handle is None:
        handle = start_group(ALLREDUCE, name, process_set, payload, payload, reduce=Sum)
    if outputs is None:
        outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
    kind = "allreduce" if single else "grouped_allreduce"
    label = f"{kind} {name!r}" if name else f"unnamed {kind} of {_shown(tensors[0])}"
    return Mean(handle, len(tails), outputs, value, label, process_set, single)


def _shown(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)}"


def _wire(call: str, tensor: torch.Tensor, name: str | None) -> torch.dtype:
    number_of(tensor, name, True)  # refuses what the core cannot take
    wire = wire_of(tensor.dtype)
    if wire is None:
        raise ValueError(
            f"{call}: weight= is for floating-point tensors; this one is {tensor.dtype}: convert it"
        )
    return wire


def check_compression(call: str, compression: Any, wires: Tensors, tensors: Tensors) -> None:
    """ValueError where compression leaves weighted elements without their range."""
    if any(
        wire.dtype != t.dtype and wire.dtype != torch.bfloat16 for wire, t in zip(wires, tensors, strict=True)
    ):
        raise ValueError(
            f"{call}: weight= works with hvd.Compression.none and hvd.Compression.bf16; weighted sums overflow in "
            "other forms"
        )
