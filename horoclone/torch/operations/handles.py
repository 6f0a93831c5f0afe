"""Handles of operations in flight: what they will return, and which tensors must stay alive until they are done.

Blocking calls have no handle: `run` and `call_plain` cross into the core once. Thread: any, with the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from horoclone.errors import HorovodInternalError
from horoclone.handles import Waits, given_away, nobody, not_yet, slow_path
from horoclone.process_sets import global_process_set
from horoclone.runtime import native
from horoclone.torch.operations import requests
from horoclone.torch.operations.gpu import HOST, behind, offer_memory, place_of, rows_here, rows_like
from horoclone.torch.operations.spans import profiler, waiting
from horoclone.torch.operations.tensors import ON_GPU, from_result

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime

# True only while torch.compile traces: its tracer takes it for a constant.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)

# handle -> (output, tensors to keep alive, maker of the output from the core's result or None), or just the output,
# where nothing else is to be kept
_pending: dict[int, Any] = {}
_owner: Runtime | None = (
    None  # the runtime whose handles these are; a new life of the runtime begins a new table
)
_unfinished: list[
    Any
] = []  # memory of blocking calls that a signal broke off: the core may still write to it

# DLPack's table of C functions, through which the core reads tensors by itself; torch has it from 2.10 on.
tensor_exchange: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


# The fast path, as in horoclone/arrays/handles.py. Callers read them from this module: they change with the runtime.
# Under a profiler callers take the slow path, which has the spans.
start_plain: Callable[..., int | None] = slow_path
call_plain: Callable[..., Any] = slow_path
start_plain_group: Callable[..., int | None] = slow_path
finish_plain: Callable[[Any], Any] = not_yet
given_elsewhere: Callable[[int], bool] = nobody  # whether finish_plain gave it to another thread

_waits = Waits()


def _begin_life(runtime: Runtime) -> None:
    """A new table, for the handles of another runtime."""
    global _owner, start_plain, call_plain, start_plain_group, finish_plain, given_elsewhere
    _pending.clear()
    _unfinished.clear()
    _owner = runtime
    offer_memory(runtime)
    if tensor_exchange is None:
        return
    from horoclone._core import FastPath

    fast_path = FastPath(
        runtime, (torch.Tensor, torch.nn.Parameter), tensor_exchange, global_process_set, _pending
    )
    start_plain, start_plain_group, finish_plain = fast_path.start, fast_path.start_group, fast_path.finish
    call_plain, given_elsewhere = fast_path.call, fast_path.given_elsewhere


def open_fast_path(runtime: Runtime) -> None:
    """Opens the fast path for what comes, behind a call that has taken the slow one."""
    if runtime is not _owner:
        _begin_life(runtime)


def remember(
    runtime: Runtime, handle: int, output: Any, kept: Any, make: Callable[[Runtime, int], Any] | None = None
) -> int:
    if runtime is not _owner:
        _begin_life(runtime)
    _pending[handle] = (output, kept, make)
    return handle


def poll(handle: Any) -> bool:
    """Returns True when `synchronize(handle)` would not block. ValueError for a handle that was synchronized, or is
    none."""
    if callable(handle):
        return all(poll(part) for part in getattr(handle, "parts", ()))
    _waits.refuse_no_handle("poll", handle)
    if handle not in _pending and not _waits.under_way(handle):
        raise ValueError(
            f"handle {handle!r} is not pending: synchronize() has given its result, or it is no handle"
        )
    return (_owner or native()).poll(handle)


def synchronize(handle: Any) -> Any:
    """Waits for an operation and returns its output (a tuple for grouped operations); None for an unknown handle.

    Raises the operation's error: ValueError for wrong arguments, HorovodInternalError or a child of it otherwise.
    Threads that wait for one handle each get the output; RuntimeError for one that comes after another has got it.
    """
    if is_compiling() and callable(handle):
        return handle()
    if profiler._is_profiler_enabled:
        return _synchronize_in_a_span(handle)
    output = finish_plain(handle)
    if output is not NotImplemented:
        return output
    return _synchronize_slowly(handle)


def _synchronize_slowly(handle: Any) -> Any:
    if callable(handle):
        return handle()
    if type(handle) is not int:
        _waits.refuse_no_handle("synchronize", handle)
    return _waits.once(handle, _wait)


def _synchronize_in_a_span(handle: Any) -> Any:
    span = waiting(handle)
    try:
        output = finish_plain(handle)
        return _synchronize_slowly(handle) if output is NotImplemented else output
    finally:
        if span is not None:
            span.end()


def _wait(handle: int) -> Any:
    entry = _pending.pop(handle, None)
    if entry is None:
        if _waits.given_elsewhere(handle) or given_elsewhere(handle):
            raise given_away(handle)
        return None
    output, _, make = entry if type(entry) is tuple else (entry, entry, None)
    runtime = _owner or native()
    try:
        runtime.wait(handle)
    except BaseException as error:
        if not isinstance(error, (HorovodInternalError, ValueError)):
            _pending[handle] = entry  # a signal's: the core has not let go of the tensors
        raise
    _waits.gave(handle)
    try:
        return output if make is None else make(runtime, handle)
    finally:
        runtime.release(handle)


def run(
    op: int, name: str | None, source: torch.Tensor, target: torch.Tensor, dtype: int, **terms: Any
) -> torch.Tensor:
    """Submits and waits in one crossing. terms: reduce, prescale, postscale, root, process_set."""
    if dtype >= ON_GPU:
        output: torch.Tensor = synchronize(start_for(op, name, source, target, dtype, **terms))
        return output
    runtime = native()
    try:
        requests.run(runtime, op, name, source=source, target=target, dtype=dtype, **terms)
    except BaseException as error:
        keep_if_broken_off(error, (source, target))
        raise
    open_fast_path(runtime)
    return target


def run_for_rows(
    op: int, name: str | None, tensor: torch.Tensor, dtype: int, **terms: Any
) -> tuple[torch.Tensor, Result]:
    """As `run`, in host memory, where only the core knows the result's rows: they and what came with them.

    terms: as for `run` and, for an alltoall, splits: the rows to send.
    """
    try:
        result = requests.run(native(), op, name, source=tensor, dtype=dtype, **terms)
    except BaseException as error:
        keep_if_broken_off(error, tensor)
        raise
    assert result is not None
    return from_result(result, tensor.shape[1:], tensor.dtype), result


def start_for(
    op: int, name: str | None, tensor: torch.Tensor, output: torch.Tensor, dtype: int, **terms: Any
) -> int:
    """Submits, on a GPU too, and returns the handle, which gives `output`. terms: as for `run`, and priority."""
    runtime, place = native(), HOST if dtype < ON_GPU else place_of(tensor)
    handle = requests.submit(
        runtime, op, name, source=tensor, target=output, dtype=dtype, place=place, **terms
    )
    return remember(runtime, handle, output, (tensor, output), behind(place, output))


def start_for_rows(
    op: int, name: str | None, tensor: torch.Tensor, dtype: int, counts_beside: Any = None, **terms: Any
) -> int:
    """Submits, on a GPU too, what gives rows whose number the ranks agree on. terms: as for `run_for_rows`.

    counts_beside: the splits of an alltoall; how many rows have come is told where they are.
    """
    runtime, place = native(), HOST if dtype < ON_GPU else place_of(tensor)
    handle = requests.submit(runtime, op, name, source=tensor, dtype=dtype, place=place, **terms)
    make = rows_here(tensor) if place is HOST else rows_like(tensor, place, counts_beside)
    return remember(runtime, handle, None, tensor, make)


def keep_if_broken_off(error: BaseException, tensors: Any) -> None:
    """Keeps the memory of a blocking call that ended by a signal's exception: the core may still write to it."""
    if not isinstance(error, (HorovodInternalError, ValueError)):
        _unfinished.append(tensors)
