"""Means of NumPy arrays in which each rank counts as much as its weight says: sum(w * x) / sum(w).

The weights travel behind the arrays, in the same operation (horoclone/weights.py). The caller's arrays are written to
once all weights are known to be right. Thread: the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horoclone import weights
from horoclone.arrays.handles import table
from horoclone.ops import ALLREDUCE, Sum
from horoclone.process_sets import ProcessSet
from horoclone.runtime import native

if TYPE_CHECKING:
    from horoclone._core import Runtime


def start(
    start_group: Callable[..., int],
    call: str,
    sources: Sequence[Any],
    outs: Sequence[Any],
    name: str | None,
    reduce: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    weight: Any,
    output: Any,
) -> int:
    """Starts it and returns the handle of `output`, whose arrays are `outs`. start_group: submits several arrays."""
    if not sources:
        return start_group(ALLREDUCE, name, process_set, sources)
    weights.check_mean(call, reduce, scales)
    value = weights.number(call, weight)
    wires = [_wire(call, source.dtype) for source in sources]
    rank, size = process_set.rank() or 0, process_set.size() or 1
    payload = [
        _times(source, weights.rounded(value, wire), wire)
        for source, wire in zip(sources, wires, strict=True)
    ]
    first = {wire: wires.index(wire) for wire in wires}
    for wire, i in first.items():
        tail = weights.tail(weights.rounded(value, wire), wire, rank, size)
        payload.append(np.array(tail, dtype=payload[i].dtype))
    handle = start_group(ALLREDUCE, name, process_set, payload, payload, reduce=Sum)
    label = f"{call} {name!r}" if name else f"unnamed {call} of an array of shape {list(sources[0].shape)}"

    def means(runtime: Runtime, handle: int) -> Any:
        tails = dict(zip(first, payload[len(sources) :], strict=True))
        ranks = process_set.ranks or [0]
        wholes = {w: weights.total([float(v) for v in tail], w, label, ranks) for w, tail in tails.items()}
        for sums, wire, out in zip(payload, wires, outs, strict=False):
            np.copyto(out, _wide(sums) / wholes[wire], casting="unsafe")
        return output

    return table.remember(native(), handle, output, (payload, outs), means)


def _wire(call: str, dtype: Any) -> str:
    wire = weights.wire_of(dtype.name)
    if wire is None:
        raise ValueError(f"{call}: weight= is for floating-point arrays; this one is {dtype}: convert it")
    return wire


def _wide(array: Any) -> Any:
    """bfloat16 as float32: there a product is rounded once."""
    return array if array.dtype.name in ("float32", "float64") else array.astype(np.float32)


def _times(source: Any, weight: float, wire: str) -> Any:
    if weight == 0:
        product = np.zeros_like(source)  # also of what is not finite: the mean of no samples
    else:
        with np.errstate(all="ignore"):
            product = _wide(source) * weight
    return np.ascontiguousarray(product, dtype=source.dtype if wire == "bfloat16" else wire)
