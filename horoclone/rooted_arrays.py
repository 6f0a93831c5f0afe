"""Collectives on NumPy arrays in which one rank has a part of its own: reduce and gather to it, scatter from it.

Arguments, dtypes, handles and errors as in arrays.py. root_rank is a world rank, also within a process set. None of
them can run while a rank of the process set has joined (Unsupported).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from horoclone import array_memory as memory
from horoclone import ops, runtime
from horoclone.array_handles import Pending, now, remember, set_id
from horoclone.array_memory import Array
from horoclone.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from horoclone._core import Runtime


def _reduced(
    array: ArrayLike,
    root_rank: int,
    op: int,
    name: str | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
    in_place: bool = False,
) -> Pending:
    source, native, where = memory.readable(array), runtime.native(), set_id(process_set)
    reduce, dtype, is_root = ops.resolve_reduce(None, op), memory.dtype_of(source), native.rank == root_rank
    out = source if in_place else np.empty_like(source) if is_root else None
    places = memory.address(source), memory.address(out) if is_root and out is not None else 0
    handle = native.submit(ops.REDUCE, name, *places, source.shape, dtype, reduce, *scales, root_rank, where)
    return Pending(native, handle, (source, out), lambda native, handle: out)


def reduce_async(
    array: ArrayLike,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As reduce; returns a handle at once."""
    return remember(_reduced(array, root_rank, op, name, (prescale_factor, postscale_factor), process_set))


def reduce(
    array: ArrayLike,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array | None:
    """The reduction of everybody's array on rank root_rank, as a new array; None on the others.

    Shapes and dtypes must be the same. op: any but Adasum. Over channels partial sums travel up a
    binomial tree; in shared memory every rank reduces a slice, which the root collects.
    """
    scales = (prescale_factor, postscale_factor)
    return now(_reduced(array, root_rank, op, name, scales, process_set))  # type: ignore[no-any-return]


def reduce_async_(
    array: Array,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As reduce_; returns a handle at once."""
    scales = (prescale_factor, postscale_factor)
    return remember(_reduced(memory.writable(array), root_rank, op, name, scales, process_set, True))


def reduce_(
    array: Array,
    root_rank: int,
    op: int = ops.Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Overwrites rank root_rank's array with the reduction; the others' stay as they are. Returns the array."""
    scales = (prescale_factor, postscale_factor)
    return now(_reduced(memory.writable(array), root_rank, op, name, scales, process_set, True))  # type: ignore[no-any-return]


def _gathered(array: ArrayLike, root_rank: int, name: str | None, process_set: ProcessSet) -> Pending:
    source, native, where = memory.readable(array), runtime.native(), set_id(process_set)
    dtype, at = memory.dtype_of(source), memory.address(source)
    handle = native.submit(ops.GATHER, name, at, 0, source.shape, dtype, ops.Sum, 1.0, 1.0, root_rank, where)

    def finish(native: Runtime, handle: int) -> Array | None:
        return memory.rows(native.result(handle), source) if native.rank == root_rank else None

    return Pending(native, handle, source, finish)


def gather_async(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As gather; returns a handle at once."""
    return remember(_gathered(array, root_rank, name, process_set))


def gather(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array | None:
    """Every rank's rows, in rank order, on rank root_rank; None on the others.

    Shapes may differ in the first dimension only; there must be one.
    """
    return now(_gathered(array, root_rank, name, process_set))  # type: ignore[no-any-return]


def _scattered(
    array: ArrayLike | None,
    root_rank: int,
    splits: ArrayLike | None,
    name: str | None,
    process_set: ProcessSet,
) -> Pending:
    native, where = runtime.native(), set_id(process_set)
    rest = (ops.Sum, 1.0, 1.0, root_rank, where)
    source = None
    if native.rank == root_rank:
        if array is None:
            raise ValueError(f"scatter: rank {root_rank} is the root and must pass the array to scatter")
        source = memory.readable(array)
        rows, dtype = memory.row_counts(splits, "scatter"), memory.dtype_of(source)
        handle = native.submit(ops.SCATTER, name, memory.address(source), 0, source.shape, dtype, *rest, rows)
    else:
        handle = native.submit(ops.SCATTER, name, 0, 0, None, 0, *rest)
    return Pending(native, handle, source, lambda native, handle: memory.received(native.result(handle)))


def scatter_async(
    array: ArrayLike | None,
    root_rank: int,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As scatter; returns a handle at once."""
    return remember(_scattered(array, root_rank, splits, name, process_set))


def scatter(
    array: ArrayLike | None,
    root_rank: int,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """This rank's share of the rows of rank root_rank's array: splits[r] rows for the r-th rank of the process set.

    Without splits the shares are equal, the first ranks get one row more if uneven. The root passes the array and the
    splits; what the others pass for them is not looked at (None will do), and they get the root's dtype.
    """
    return now(_scattered(array, root_rank, splits, name, process_set))  # type: ignore[no-any-return]
