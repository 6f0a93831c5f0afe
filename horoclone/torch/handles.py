"""Handles of operations in flight: what they will return, and the tensors that must live until they are done.

Blocking in-place calls have no handle: `run` crosses into the core once. Thread: any, under Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from horoclone import process_sets as _sets
from horoclone.errors import HorovodInternalError
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import native
from horoclone.torch.gpu import behind, place_of, rows_like
from horoclone.torch.tensors import ON_GPU, address_of

if TYPE_CHECKING:
    from horoclone._core import Runtime

# True only while torch.compile traces: its tracer takes it for a constant.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)

# handle -> (output, tensors to keep alive, maker of the output from the core's result or None)
_pending: dict[int, tuple[Any, Any, Callable[[Runtime, int], Any] | None]] = {}
_owner: Runtime | None = (
    None  # the runtime whose handles these are; a new life of the runtime begins a new table
)
_unfinished: list[
    Any
] = []  # memory of blocking calls that a signal broke off: the core may still write to it


def remember(
    runtime: Runtime, handle: int, output: Any, kept: Any, make: Callable[[Runtime, int], Any] | None = None
) -> int:
    global _owner
    if runtime is not _owner:
        _pending.clear()
        _unfinished.clear()
        _owner = runtime
    _pending[handle] = (output, kept, make)
    return handle


def set_id(process_set: ProcessSet) -> int:
    return 0 if process_set is global_process_set else _sets.id_of(process_set)


def poll(handle: Any) -> bool:
    """True when `synchronize(handle)` would not block (also for a handle that is not known)."""
    if callable(handle):
        return all(poll(part) for part in getattr(handle, "parts", ()))
    if handle not in _pending:
        return True
    return (_owner or native()).poll(handle)


def synchronize(handle: Any) -> Any:
    """Waits for an operation and returns its output (a list for grouped operations); None for an unknown handle.

    Raises the operation's error: ValueError for wrong arguments, HorovodInternalError or a child of it otherwise.
    """
    if is_compiling():
        return handle()
    entry = _pending.get(handle)
    if entry is None:
        return handle() if callable(handle) else None
    output, _, make = entry
    runtime = _owner or native()
    try:
        runtime.wait(handle)
    except (
        HorovodInternalError,
        ValueError,
    ):  # the core has let go of the tensors; after a signal it has not
        _pending.pop(handle, None)
        raise
    try:
        return output if make is None else make(runtime, handle)
    finally:
        _pending.pop(handle, None)
        runtime.release(handle)


def run(
    op: int, name: str | None, source: torch.Tensor, target: torch.Tensor, dtype: int, *rest: Any
) -> torch.Tensor:
    """Submits and waits in one crossing. rest: reduce, prescale, postscale, root, process set."""
    if dtype >= ON_GPU:
        output: torch.Tensor = synchronize(start_on_gpu(op, name, source, target, dtype, *rest))
        return output
    try:
        native().run(op, name, address_of(source), address_of(target), source.shape, dtype, *rest)
    except BaseException as error:
        keep_if_broken_off(error, (source, target))
        raise
    return target


def start_on_gpu(
    op: int,
    name: str | None,
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    dtype: int,
    *rest: Any,
    priority: int = 0,
) -> int:
    """Submits work on a tensor on a GPU and returns its handle. output None: rows whose number the ranks agree on.

    rest: reduce, prescale, postscale, root, process set and, for an alltoall, the rows to send.
    """
    runtime, place = native(), place_of(tensor)
    target = 0 if output is None else address_of(output)
    reduce, prescale, postscale, root, set_number, *splits = rest
    handle = runtime.submit(
        op, name, address_of(tensor), target, tensor.shape, dtype - ON_GPU, reduce, prescale, postscale, root,
        set_number, splits[0] if splits else None, 0, *place, priority,
    )  # fmt: skip
    make = rows_like(tensor, place) if output is None else behind(place, output)
    return remember(runtime, handle, output, (tensor, output), make)


def keep_if_broken_off(error: BaseException, tensors: Any) -> None:
    """Keeps the memory of a blocking call that ended by a signal's exception: the core may still write to it."""
    if not isinstance(error, (HorovodInternalError, ValueError)):
        _unfinished.append(tensors)
