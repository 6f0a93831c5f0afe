"""Collectives on CuPy arrays in which one rank has a part of its own: reduce and gather to it, scatter from it.

Arguments, meaning and errors as in horoclone/rooted_arrays.py; streams as in operations.py. root_rank is a world rank,
also within a process set. Thread: the caller's; its current stream counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from horoclone import ops, runtime
from horoclone.array_handles import Pending, now, remember, set_id
from horoclone.array_memory import dtype_of, row_counts
from horoclone.cupy.operations import Array, arrived, current_place, follow, place_of, readable, writable
from horoclone.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from horoclone._core import Runtime


def _reduced(
    source: Array,
    root_rank: int,
    op: int,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    in_place: Any = None,
) -> Pending:
    """in_place: what to return; the root's result is then in `source`."""
    native, place = runtime.native(), place_of([source])
    is_root = native.rank == root_rank
    out = source if in_place is not None else cupy.empty_like(source) if is_root else None
    handle = native.submit(
        ops.REDUCE, name, source.data.ptr, out.data.ptr if is_root and out is not None else 0, source.shape,
        dtype_of(source), ops.resolve_reduce(None, op), *scales, root_rank, set_id(process_set), None, 0, *place,
    )  # fmt: skip

    def finish(native: Runtime, handle: int) -> Any:
        follow(native, handle, place)
        return out if in_place is None else in_place

    return Pending(native, handle, (source, out), finish)


def reduce_async(
    array: Any,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As reduce; returns a handle at once."""
    scales = (prescale_factor, postscale_factor)
    return remember(_reduced(readable(array), root_rank, op, name, scales, process_set))


def reduce(
    array: Any,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array | None:
    """The reduction of everybody's array on rank root_rank, as a new array; None on the others."""
    scales = (prescale_factor, postscale_factor)
    return now(_reduced(readable(array), root_rank, op, name, scales, process_set))


def reduce_async_(
    array: Any,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As reduce_; returns a handle at once."""
    scales = (prescale_factor, postscale_factor)
    return remember(_reduced(writable(array), root_rank, op, name, scales, process_set, array))


def reduce_(
    array: Any,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrites rank root_rank's array with the reduction; the others' stay as they are. Returns the array."""
    scales = (prescale_factor, postscale_factor)
    return now(_reduced(writable(array), root_rank, op, name, scales, process_set, array))


def _gathered(array: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Pending:
    source, native = readable(array), runtime.native()
    place = place_of([source])
    handle = native.submit(
        ops.GATHER, name, source.data.ptr, 0, source.shape, dtype_of(source), ops.Sum, 1.0, 1.0, root_rank,
        set_id(process_set), None, 0, *place,
    )  # fmt: skip

    def finish(native: Runtime, handle: int) -> Array | None:
        follow(native, handle, place)
        if native.rank != root_rank:
            return None
        rows = cupy.empty((native.result(handle).first_dimension, *source.shape[1:]), source.dtype)
        native.copy_result(handle, 0, rows.data.ptr, rows.nbytes, place[1])
        return rows

    return Pending(native, handle, source, finish)


def gather_async(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As gather; returns a handle at once."""
    return remember(_gathered(array, root_rank, name, process_set))


def gather(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array | None:
    """Every rank's rows, in rank order, on rank root_rank; None on the others. There must be a first dimension."""
    return now(_gathered(array, root_rank, name, process_set))


def _scattered(array: Any, root_rank: int, splits: Any, name: str | None, process_set: ProcessSet) -> Pending:
    native, source = runtime.native(), None
    rest = (ops.Sum, 1.0, 1.0, root_rank, set_id(process_set))
    if native.rank == root_rank:
        if array is None:
            raise ValueError(f"scatter: rank {root_rank} is the root and must pass the array to scatter")
        source, rows = readable(array), row_counts(splits, "scatter")
        at, dtype, place = source.data.ptr, dtype_of(source), place_of([source])
        handle = native.submit(ops.SCATTER, name, at, 0, source.shape, dtype, *rest, rows, 0, *place)
    else:
        handle = native.submit(ops.SCATTER, name, 0, 0, None, 0, *rest, None, 0, *current_place())
    return Pending(native, handle, source, arrived)


def scatter_async(
    array: Any | None,
    root_rank: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As scatter; returns a handle at once."""
    return remember(_scattered(array, root_rank, splits, name, process_set))


def scatter(
    array: Any | None,
    root_rank: int,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """This rank's share of the rows of rank root_rank's array: splits[r] rows for the r-th rank of the process set.

    Without splits (integers in host memory) the shares are equal, the first ranks get one row more if uneven. The
    others may pass None; their share is on their current GPU.
    """
    return now(_scattered(array, root_rank, splits, name, process_set))
