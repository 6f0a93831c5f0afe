"""Collectives on NumPy arrays: `import horoclone as hvd`, no framework needed.

Every function takes anything that np.asarray takes and works for bool, 8- to 64-bit integers, float16, bfloat16 (with
ml_dtypes), float32 and float64; 0-d and empty arrays are fine. Arrays that are not C-contiguous or not in native byte
order are copied; in-place functions refuse them with ValueError. `name` makes an operation match by name on every
rank; without it operations match by their order. Errors: ValueError for wrong arguments, else those of errors.py.
Handles of the `_async` functions are integers for poll() and synchronize(); they keep their arrays alive until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from horoclone import array_handles, ops, runtime
from horoclone import array_memory as memory
from horoclone.array_handles import Pending, remember, set_id, synchronize
from horoclone.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime

Array = NDArray[Any]


# --- allreduce


Description = tuple[int, str | None, int, int, tuple[int, ...], int, int, float, float, int, int]


def _allreduce(
    array: Array,
    out: Array,
    name: str | None,
    reduce: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Description:
    """The arguments of Runtime.submit and Runtime.run."""
    place = memory.address(array)
    target = place if out is array else memory.address(out)
    dtype = memory.dtype_of(array)
    return (ops.ALLREDUCE, name, place, target, array.shape, dtype, reduce, *scales, 0, set_id(process_set))


def _now_in(out: Array, description: Description) -> Array:
    native = runtime.native()
    native.run(*description)
    array_handles.open_way(native)
    return out


def _later_in(array: Array, out: Array, description: Description, priority: int = 0) -> int:
    native = runtime.native()
    keep = (array, out)
    handle = native.submit(*description, *ops.at_priority(priority))
    return remember(Pending(native, handle, keep, lambda native, handle: out))


def allreduce(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduces arrays of one shape and dtype over all ranks; the same bits on every rank. Default op: Average.

    Integers average with truncation toward zero; bool reduces with Sum and Max = or, Min and
    Product = and. And, Or and Xor take the bits of integers and bools; they are not in Horovod.
    """
    source = memory.readable(array)
    scales = (prescale_factor, postscale_factor)
    out, reduce = np.empty_like(source), ops.resolve_reduce(average, op)
    plain = array_handles.call_plain(source, out, None, name, reduce, *scales, process_set, 0)
    if plain is None:
        return _now_in(out, _allreduce(source, out, name, reduce, scales, process_set))
    return out if plain is out else array_handles.synchronize(plain)


def allreduce_async(
    array: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> int:
    """As allreduce; returns a handle at once. Do not change the array before it is done.

    priority: of what all ranks have submitted, the highest runs first (docs/priority.md).
    """
    source = memory.readable(array)
    scales = (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(average, op)
    out = np.empty_like(source)
    plain = array_handles.start_plain(source, out, None, name, reduce, *scales, process_set, priority)
    if plain is not None:
        return plain
    return _later_in(source, out, _allreduce(source, out, name, reduce, scales, process_set), priority)


def allreduce_(
    array: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """As allreduce, with the result in the array itself, which is returned."""
    plain = array_handles.call_plain(
        array, array, average, name, op, prescale_factor, postscale_factor, process_set, 0
    )
    if plain is not None:
        return array if plain is array else array_handles.synchronize(plain)
    target = memory.writable(array)
    scales = (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(average, op)
    return _now_in(target, _allreduce(target, target, name, reduce, scales, process_set))


def allreduce_async_(
    array: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> int:
    """As allreduce_; returns a handle at once. Do not touch the array before it is done. priority: as there."""
    plain = array_handles.start_plain(
        array, array, average, name, op, prescale_factor, postscale_factor, process_set, priority
    )
    if plain is not None:
        return plain
    target = memory.writable(array)
    scales = (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(average, op)
    return _later_in(target, target, _allreduce(target, target, name, reduce, scales, process_set), priority)


# --- groups


def _group(
    op: int,
    arrays: Sequence[Array],
    outs: Sequence[Array] | None,
    name: str | None,
    reduce: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Pending:
    """outs None: the core owns the results, row by row."""
    native = runtime.native()
    if not arrays:
        return Pending(native, 0, None, lambda native, handle: [])
    handle = native.submit_group(
        op,
        name,
        [memory.address(array) for array in arrays],
        [memory.address(out) for out in outs] if outs is not None else [0] * len(arrays),
        [array.shape for array in arrays],
        [memory.dtype_of(array) for array in arrays],
        reduce,
        *scales,
        0,
        set_id(process_set),
    )

    def finish(native: Runtime, handle: int) -> list[Array]:
        if outs is not None:
            return list(outs)
        return [memory.rows(native.result(handle, index), array) for index, array in enumerate(arrays)]

    return Pending(native, handle, (arrays, outs), finish)


def grouped_allreduce_async(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce; returns one handle for the group at once."""
    sources = [memory.readable(array) for array in arrays]
    outs = [np.empty_like(source) for source in sources]
    scales = (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(average, op)
    plain = array_handles.start_plain_group(sources, outs, None, name, reduce, *scales, process_set, 0)
    if plain is not None:
        return plain
    return remember(_group(ops.ALLREDUCE, sources, outs, name, reduce, scales, process_set))


def grouped_allreduce(
    arrays: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Reduces several arrays as one operation: none of them before all are ready on every rank."""
    reduce = ops.resolve_reduce(average, op)
    handle = grouped_allreduce_async(
        arrays, None, name, reduce, prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    arrays: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce_; returns one handle for the group at once."""
    targets = [memory.writable(array) for array in arrays]
    scales = (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(average, op)
    plain = array_handles.start_plain_group(targets, targets, None, name, reduce, *scales, process_set, 0)
    if plain is not None:
        return plain
    return remember(_group(ops.ALLREDUCE, targets, targets, name, reduce, scales, process_set))


def grouped_allreduce_(
    arrays: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """As grouped_allreduce, with the results in the arrays themselves."""
    reduce = ops.resolve_reduce(average, op)
    handle = grouped_allreduce_async_(
        arrays, None, name, reduce, prescale_factor, postscale_factor, process_set
    )
    return synchronize(handle)  # type: ignore[no-any-return]


# --- allgather, reducescatter, alltoall: results whose size only the core knows


def _gathered(
    op: int,
    array: Array,
    name: str | None,
    reduce: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Pending:
    native, at, dtype = runtime.native(), memory.address(array), memory.dtype_of(array)
    handle = native.submit(op, name, at, 0, array.shape, dtype, reduce, *scales, 0, set_id(process_set))
    return Pending(native, handle, array, lambda native, handle: memory.rows(native.result(handle), array))


def _rows_now(op: int, array: Array, name: str | None, *rest: Any) -> tuple[Array, Result]:
    """Submits and waits in one crossing. rest: reduce, scales, root, process set and the splits of an alltoall."""
    place, dtype = memory.address(array), memory.dtype_of(array)
    result = runtime.native().run(op, name, place, 0, array.shape, dtype, *rest)
    assert result is not None
    return memory.rows(result, array), result


def allgather_async(
    array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As allgather; returns a handle at once."""
    return remember(_gathered(ops.ALLGATHER, memory.readable(array), name, ops.Sum, (1.0, 1.0), process_set))


def allgather(
    array: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Every rank's rows, in rank order. Shapes may differ in the first dimension only; there must be one."""
    return _rows_now(ops.ALLGATHER, memory.readable(array), name, ops.Sum, 1.0, 1.0, 0, set_id(process_set))[
        0
    ]


def grouped_allgather_async(
    arrays: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As grouped_allgather; returns one handle for the group at once."""
    sources = [memory.readable(array) for array in arrays]
    return remember(_group(ops.ALLGATHER, sources, None, name, ops.Sum, (1.0, 1.0), process_set))


def grouped_allgather(
    arrays: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """allgather of several arrays as one operation."""
    return synchronize(grouped_allgather_async(arrays, name, process_set))  # type: ignore[no-any-return]


def _scatterable(array: ArrayLike) -> Array:
    source = memory.readable(array)
    if source.ndim == 0:
        raise ValueError(
            "reducescatter needs an array with a first dimension to scatter; this one is 0-d: reshape it to [1]."
        )
    return source


def reducescatter_async(
    array: ArrayLike,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As reducescatter; returns a handle at once."""
    scales = (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(None, op)
    return remember(_gathered(ops.REDUCESCATTER, _scatterable(array), name, reduce, scales, process_set))


def reducescatter(
    array: ArrayLike,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduces arrays of one shape and gives each rank its share of the rows (the first ranks one more if uneven)."""
    rest = (ops.resolve_reduce(None, op), prescale_factor, postscale_factor, 0, set_id(process_set))
    return _rows_now(ops.REDUCESCATTER, _scatterable(array), name, *rest)[0]


def grouped_reducescatter_async(
    arrays: Sequence[ArrayLike],
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As grouped_reducescatter; returns one handle for the group at once."""
    sources = [_scatterable(array) for array in arrays]
    scales = (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(None, op)
    return remember(_group(ops.REDUCESCATTER, sources, None, name, reduce, scales, process_set))


def grouped_reducescatter(
    arrays: Sequence[ArrayLike],
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """reducescatter of several arrays as one operation."""
    handle = grouped_reducescatter_async(arrays, name, op, process_set, prescale_factor, postscale_factor)
    return synchronize(handle)  # type: ignore[no-any-return]


def alltoall_async(
    array: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As alltoall; returns a handle at once."""
    source, rows = memory.readable(array), memory.row_counts(splits, "alltoall")

    def finish(native: Runtime, handle: int) -> Any:
        result = native.result(handle)
        output = memory.rows(result, source)
        return output if rows is None else (output, np.array(result.rows_from, np.int32))

    native, at, dtype = runtime.native(), memory.address(source), memory.dtype_of(source)
    where = set_id(process_set)
    handle = native.submit(ops.ALLTOALL, name, at, 0, source.shape, dtype, ops.Sum, 1.0, 1.0, 0, where, rows)
    return remember(Pending(native, handle, source, finish))


def alltoall(
    array: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends splits[r] rows to each rank r (equal shares without splits) and gives the rows received, in rank order.

    With splits: (rows, received_splits), the latter int32, one for each rank.
    """
    source, rows = memory.readable(array), memory.row_counts(splits, "alltoall")
    rest = (ops.Sum, 1.0, 1.0, 0, set_id(process_set), rows)
    output, result = _rows_now(ops.ALLTOALL, source, name, *rest)
    return output if rows is None else (output, np.array(result.rows_from, np.int32))


# --- broadcast, barrier, join


def _broadcast(
    array: Array, out: Array, root_rank: int, name: str | None, process_set: ProcessSet
) -> Description:
    places = memory.address(array), memory.address(out)
    dtype, root = memory.dtype_of(array), int(root_rank)
    return (ops.BROADCAST, name, *places, array.shape, dtype, ops.Sum, 1.0, 1.0, root, set_id(process_set))


def broadcast_async(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast; returns a handle at once."""
    source = memory.readable(array)
    out = np.empty_like(source)
    return _later_in(source, out, _broadcast(source, out, root_rank, name, process_set))


def broadcast(
    array: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Rank root_rank's array on every rank, as a new array. root_rank is the world rank also in a process set."""
    source = memory.readable(array)
    out = np.empty_like(source)
    return _now_in(out, _broadcast(source, out, root_rank, name, process_set))


def broadcast_async_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_; returns a handle at once."""
    target = memory.writable(array)
    return _later_in(target, target, _broadcast(target, target, root_rank, name, process_set))


def broadcast_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """As broadcast, into the array itself, which is returned."""
    target = memory.writable(array)
    return _now_in(target, _broadcast(target, target, root_rank, name, process_set))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    runtime.native().run(ops.BARRIER, None, 0, 0, (), 0, ops.Sum, 1.0, 1.0, 0, set_id(process_set))


def join(device: int = -1) -> int:
    """This rank has no more data: the others' allreduces go on with its neutral elements. Returns, when every rank has
    joined, the rank that was last. `device` is accepted for Horovod's sake."""
    native = runtime.native()
    handle = native.submit(ops.JOIN, None, 0, 0, (), 0)
    native.wait(handle)
    try:
        return native.result(handle).join_rank
    finally:
        native.release(handle)
