"""The one way from the public functions to the core, for all operations but allreduce's fast path: see all_reduce.py.

While torch.compile traces, a call becomes an op of its graph (functional.py); else it is a request, in host memory or
on a GPU. terms: as for requests.submit. Thread: the caller's.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horoclone.handles import ROWS
from horoclone.process_sets import ProcessSet, set_id
from horoclone.torch.operations import functional
from horoclone.torch.operations.handles import number_for, run, submit, submit_group, synchronize
from horoclone.torch.operations.tensors import ON_GPU, is_compiling, not_a_tensor

Tensors = Sequence[torch.Tensor]


def start(
    op: int,
    name: str | None,
    process_set: ProcessSet,
    source: torch.Tensor,
    output: Any = ROWS,
    *,
    counts_beside: Any = None,
    **terms: Any,
) -> int:
    """Starts an operation and returns the handle of `output`, in which its result goes, or of the core's rows."""
    if is_compiling():
        return functional.start(op, [source], name, process_set, in_place=output is source, **terms)
    if source is None:  # a request without any tensor is another call
        raise not_a_tensor(source, name)
    target = None if output is ROWS else output
    return submit(op, name, set_id(process_set), source, target, output, counts_beside=counts_beside, **terms)


def call(
    op: int,
    name: str | None,
    process_set: ProcessSet,
    source: torch.Tensor,
    output: Any = ROWS,
    *,
    counts_beside: Any = None,
    **terms: Any,
) -> Any:
    """As start, and waits. In a compiled function the operation has a gradient, unless it works in place."""
    if is_compiling():
        in_place = output is source
        return functional.start(
            op, [source], name, process_set, in_place=in_place, differentiable=not in_place, **terms
        )()
    number, dtype = set_id(process_set), number_for(op, source, name)
    target = None if output is ROWS else output
    if dtype < ON_GPU:
        return run(op, name, number, source, target, output, dtype, **terms)
    return synchronize(
        submit(op, name, number, source, target, output, dtype=dtype, counts_beside=counts_beside, **terms)
    )


def start_group(
    op: int,
    name: str | None,
    process_set: ProcessSet,
    tensors: Tensors,
    outputs: Tensors | None = None,
    **terms: Any,
) -> int:
    """As start, for several tensors at once."""
    if is_compiling():
        in_place = outputs is tensors
        return functional.start(op, tensors, name, process_set, group=True, in_place=in_place, **terms)
    return submit_group(op, name, set_id(process_set), tensors, outputs, **terms)


def call_group(
    op: int, name: str | None, process_set: ProcessSet, tensors: Tensors, **terms: Any
) -> tuple[torch.Tensor, ...]:
    """As start_group, and waits; the core owns the results."""
    if is_compiling():
        return functional.start(op, tensors, name, process_set, group=True, differentiable=True, **terms)()
    return synchronize(submit_group(op, name, set_id(process_set), tensors, None, **terms))
