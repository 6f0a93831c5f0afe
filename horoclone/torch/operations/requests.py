"""Builds this binding's requests to the core, by keyword, from tensors. No other module of the binding does.

Every function takes `runtime`, `op` and `name`; `reduce`, the scales, `root` and `process_set` (its number); and
`place`, where the work runs (gpu.HOST, or a GPU and its stream). `dtype` is what tensors.number_of() returns, also with
ON_GPU in it. The caller keeps tensors alive until the operation is done. Thread: the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from horoclone.arguments import explained
from horoclone.ops import CALLS, Sum
from horoclone.torch.operations.gpu import HOST, Place
from horoclone.torch.operations.spans import Span, Submission, profiler
from horoclone.torch.operations.tensors import ON_GPU, address_of

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime


def submit(
    runtime: Runtime,
    op: int,
    name: str | None = None,
    *,
    source: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    dtype: int = 0,
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    splits: Sequence[int] | None = None,
    tag: int = 0,
    place: Place = HOST,
    priority: int = 0,
) -> int:
    """Queues one operation and returns its handle. source None: only the target's form is given, or no tensor at all.
    target None: the core owns the result, if this rank gets one."""
    form = target if source is None else source
    span = Submission(CALLS[op], name) if profiler._is_profiler_enabled else None
    # By place: for keywords the native function compares the names of all arguments, which takes a third of the call.
    try:
        handle = runtime.submit(
            op, name, 0 if source is None else address_of(source), 0 if target is None else address_of(target),
            None if form is None else form.shape, dtype % ON_GPU, reduce, prescale, postscale, root, process_set,
            splits, tag, *place, priority,
        )  # fmt: skip
        return handle if span is None else span.gave(handle)
    except TypeError as error:
        raise explained(
            CALLS[op], error, name=name, prescale_factor=prescale, postscale_factor=postscale, root_rank=root,
            splits=splits, tag=tag, priority=priority,
        ) from None  # fmt: skip
    finally:
        if span is not None:
            span.end()


def submit_empty(runtime: Runtime, op: int, *, process_set: int = 0, place: Place = HOST) -> int:
    """Queues an operation that has no tensors: join or barrier."""
    span = Submission(CALLS[op], None) if profiler._is_profiler_enabled else None
    try:
        handle = runtime.submit(op, None, 0, 0, (), 0, Sum, 1.0, 1.0, 0, process_set, None, 0, *place)
        return handle if span is None else span.gave(handle)
    finally:
        if span is not None:
            span.end()


def submit_group(
    runtime: Runtime,
    op: int,
    name: str | None = None,
    *,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor] | None,
    dtypes: Sequence[int],
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    place: Place = HOST,
) -> int:
    """Queues several tensors as one operation and returns its handle. targets None: the core owns the results."""
    span = Submission(f"grouped_{CALLS[op]}", name) if profiler._is_profiler_enabled else None
    try:
        handle = runtime.submit_group(
            op, name, [address_of(tensor) for tensor in sources],
            [0] * len(sources) if targets is None else [address_of(tensor) for tensor in targets],
            [tensor.shape for tensor in sources], [number % ON_GPU for number in dtypes], reduce, prescale, postscale,
            root, process_set, *place,
        )  # fmt: skip
        return handle if span is None else span.gave(handle)
    except TypeError as error:
        raise explained(
            f"grouped {CALLS[op]}", error, name=name, prescale_factor=prescale, postscale_factor=postscale,
            root_rank=root,
        ) from None  # fmt: skip
    finally:
        if span is not None:
            span.end()


def run(
    runtime: Runtime,
    op: int,
    name: str | None = None,
    *,
    source: torch.Tensor,
    target: torch.Tensor | None = None,
    dtype: int = 0,
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    splits: Sequence[int] | None = None,
) -> Result | None:
    """Submits and waits in one crossing, in host memory; gives the core's result where there is no target."""
    span = Span(CALLS[op], name) if profiler._is_profiler_enabled else None
    try:
        return runtime.run(
            op, name, address_of(source), 0 if target is None else address_of(target), source.shape, dtype, reduce,
            prescale, postscale, root, process_set, splits,
        )  # fmt: skip
    except TypeError as error:
        raise explained(
            CALLS[op], error, name=name, prescale_factor=prescale, postscale_factor=postscale, root_rank=root,
            splits=splits,
        ) from None  # fmt: skip
    finally:
        if span is not None:
            span.end()


def run_empty(runtime: Runtime, op: int, *, process_set: int = 0) -> None:
    """Submits an operation that has no tensors, and waits for it."""
    span = Span(CALLS[op], None) if profiler._is_profiler_enabled else None
    try:
        runtime.run(op, None, 0, 0, (), 0, Sum, 1.0, 1.0, 0, process_set)
    finally:
        if span is not None:
            span.end()
