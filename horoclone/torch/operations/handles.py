"""Handles of operations on torch tensors: a request to the core, and what will be made of its result.

Blocking calls in host memory have no handle: `run` crosses into the core once. Thread: any, with the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from horoclone.errors import EmptyGroup
from horoclone.handles import ROWS, Handles
from horoclone.ops import ALLREDUCE, ALLTOALL, REDUCESCATTER, Sum
from horoclone.runtime import native
from horoclone.torch.operations import requests
from horoclone.torch.operations.gpu import (
    HOST,
    Place,
    behind,
    offer_memory,
    place_of,
    place_of_all,
    rows_here,
    rows_like,
    rows_of,
)
from horoclone.torch.operations.spans import profiler, waiting
from horoclone.torch.operations.tensors import (
    ON_GPU,
    from_result,
    is_compiling,
    number_of,
    received_counts,
    refuse_scalar,
)

if TYPE_CHECKING:
    from horoclone._core import Runtime


def _begin_life(runtime: Runtime) -> None:
    table.pending.clear()  # nobody keeps tensors for the handles of another runtime
    offer_memory(runtime)


# DLPack's table of C functions, through which the core reads tensors by itself; torch has it from 2.10 on.
tensor_exchange: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
_kinds = () if tensor_exchange is None else (torch.Tensor, torch.nn.Parameter)
table = Handles(_kinds, tensor_exchange, _begin_life)


def poll(handle: Any) -> bool:
    """Returns True when `synchronize(handle)` would not block. ValueError for a handle that was synchronized, or is
    none."""
    if callable(handle):
        return all(poll(part) for part in getattr(handle, "parts", ()))
    is_done = table.poll(handle)
    if is_done is None:
        raise ValueError(
            f"handle {handle!r} is not pending: synchronize() has given its result, or it is not a handle"
        )
    return is_done


def synchronize(handle: Any) -> Any:
    """Waits for an operation and returns its output (a tuple for grouped operations); None for an unknown handle.

    Raises the operation's error: ValueError for wrong arguments, HorovodInternalError or a child of it otherwise.
    Threads that wait for one handle each get the output; RuntimeError for one that comes after another has got it.
    """
    if is_compiling() and callable(handle):
        return handle()
    if profiler._is_profiler_enabled:
        return _synchronize_in_a_span(handle)
    output = table.finish_plain(handle)
    return _synchronize_slowly(handle) if output is NotImplemented else output


def _synchronize_slowly(handle: Any) -> Any:
    return handle() if callable(handle) else table.wait_for(handle)


def _synchronize_in_a_span(handle: Any) -> Any:
    span = waiting(handle)
    try:
        output = table.finish_plain(handle)
        return _synchronize_slowly(handle) if output is NotImplemented else output
    finally:
        if span is not None:
            span.end()


# --- requests: `process_set` is the number of the set ---


def number_for(op: int, tensor: torch.Tensor, name: str | None) -> int:
    """The dtype's number, for an operation on that tensor; ValueError where there are no rows to scatter."""
    number = number_of(tensor, name, True)
    if op == REDUCESCATTER:
        refuse_scalar([tensor])
    return number


def submit(
    op: int,
    name: str | None,
    process_set: int,
    source: torch.Tensor | None = None,
    target: torch.Tensor | None = None,
    output: Any = ROWS,
    make: Callable[[Runtime, int], Any] | None = None,
    *,
    dtype: int | None = None,
    place: Place | None = None,
    counts_beside: Any = None,
    **terms: Any,
) -> int:
    """Submits, on a GPU too, and returns the handle of `output`, or of what `make` makes of the core's result.

    target None: none on this rank, or the core's own. place: for a rank that has no tensor. counts_beside: the splits
    of an alltoall; how many rows have come is told where they are. terms: as for requests.submit.
    """
    form = target if source is None else source
    if form is not None:
        dtype = number_for(op, form, name) if dtype is None else dtype
        place = HOST if dtype < ON_GPU else place_of(form)
    runtime = native()
    handle = requests.submit(
        runtime, op, name, source=source, target=target, dtype=dtype or 0, process_set=process_set,
        place=place or HOST, **terms,
    )  # fmt: skip
    if make is None and place is not None:
        if output is not ROWS:
            make = behind(place, output)
        elif source is not None:
            make = rows_here(source) if place is HOST else rows_like(source, place, counts_beside)
    return table.remember(runtime, handle, output, (source, target), make)


def submit_group(
    op: int,
    name: str | None,
    process_set: int,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None = None,
    **terms: Any,
) -> int:
    """As submit, for several tensors at once. outputs None: rows whose number the ranks agree on."""
    if not tensors:
        empty = ValueError if op == ALLREDUCE else EmptyGroup
        raise empty("a grouped operation needs at least one tensor")
    dtypes = [number_of(tensor, name, True) for tensor in tensors]
    place = place_of_all(tensors) if max(dtypes) >= ON_GPU else HOST
    runtime = native()
    handle = requests.submit_group(
        runtime, op, name, sources=tensors, targets=outputs, dtypes=dtypes, process_set=process_set, place=place,
        **terms,
    )  # fmt: skip
    make = _group_of_rows(tensors, place) if outputs is None else behind(place, outputs)
    return table.remember(runtime, handle, outputs, tensors, make)


def _group_of_rows(
    tensors: Sequence[torch.Tensor], place: Place
) -> Callable[[Runtime, int], tuple[torch.Tensor, ...]]:
    forms = [tensor.detach()[:0] if tensor.dim() else tensor.detach() for tensor in tensors]
    return lambda runtime, handle: tuple(
        [rows_of(runtime, handle, i, form, place) for i, form in enumerate(forms)]
    )


def run(
    op: int,
    name: str | None,
    process_set: int,
    source: torch.Tensor,
    target: torch.Tensor | None,
    output: Any,
    dtype: int,
    reduce: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    splits: Sequence[int] | None = None,
) -> Any:
    """As submit, and waits; in host memory. Of an alltoall with splits also how many rows have come from each rank."""
    runtime = native()
    try:
        result = requests.run(
            runtime, op, name, source=source, target=target, dtype=dtype, reduce=reduce, prescale=prescale,
            postscale=postscale, root=root, process_set=process_set, splits=splits,
        )  # fmt: skip
    except BaseException as error:
        table.keep_if_broken_off(error, (source, target))
        raise
    if output is not ROWS:
        table.open_fast_path(runtime)
        return output
    assert result is not None
    rows = from_result(result, source.shape[1:], source.dtype)
    if op != ALLTOALL:
        return rows
    return rows, None if splits is None else received_counts(result.rows_from)
