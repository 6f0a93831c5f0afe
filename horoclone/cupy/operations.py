"""Collectives on CuPy arrays, with the NumPy functions' names, arguments, meaning and errors (horoclone/arrays.py).

Taken: CuPy arrays and everything else on a GPU that speaks DLPack, read without a copy where it is C-contiguous.
Results are CuPy arrays on the same GPU. Work begins behind what CuPy's current stream has been given; what that stream
is given after a blocking function or synchronize() comes behind the result. The host does not wait for the GPU.
Thread: the caller's; its current stream counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy

from horoclone import ops, runtime
from horoclone.array_handles import Pending, now, remember, set_id, synchronize
from horoclone.array_memory import dtype_of, numpy_dtype, received, row_counts
from horoclone.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from horoclone._core import Runtime

Array = Any  # cupy.ndarray, which has no types
Place = tuple[int, int]  # CUDA's number of the device, and the stream that was current at submission

_PLAIN = (1.0, 1.0)


def _on_gpu(array: Any) -> Array:
    if isinstance(array, cupy.ndarray):
        return array
    try:
        return cupy.from_dlpack(array)
    except (TypeError, ValueError, AttributeError, BufferError) as error:
        raise ValueError(
            f"this {type(array).__name__} is no array on a GPU ({error}): horoclone.cupy takes CuPy's, and what speaks "
            "DLPack there. Pass cupy.asarray(...), or `import horoclone as hvd` for what is in host memory"
        ) from None


def readable(array: Any) -> Array:
    found = _on_gpu(array)
    dtype_of(found)
    return cupy.ascontiguousarray(found).reshape(found.shape)  # of 0-d arrays CuPy makes 1-d ones there


def writable(array: Any) -> Array:
    found = _on_gpu(array)
    dtype_of(found)
    if not found.flags.c_contiguous:
        raise ValueError("Tensor is required to be contiguous.")
    return found


def _stream(device: int) -> int:
    return int(cupy.cuda.get_current_stream(device).ptr)


def place_of(arrays: Sequence[Array]) -> Place:
    devices = {array.device.id for array in arrays}
    if len(devices) > 1:
        raise ValueError(f"the arrays of one group lie on different GPUs: {sorted(devices)}")
    device = devices.pop()
    return device, _stream(device)


def current_place() -> Place:
    """Where what comes from another GPU may be put."""
    device = int(cupy.cuda.Device().id)
    return device, _stream(device)


def follow(native: Runtime, handle: int, place: Place) -> None:
    """The current stream comes behind the result, and so does the one that made the input."""
    device, submitted_on = place
    for stream in {_stream(device), submitted_on}:
        native.stream_wait(handle, stream)


def arrived(native: Runtime, handle: int) -> Array:
    """What another rank sent, in its dtype and shape, on the GPU where the core has it or, else, the current one."""
    result = native.result(handle)
    if result.device < 0:
        return cupy.asarray(received(result))
    place = result.device, _stream(result.device)
    follow(native, handle, place)
    values = cupy.empty(tuple(result.shape), numpy_dtype(result))
    native.copy_result(handle, 0, values.data.ptr, values.nbytes, place[1])
    return values


def _submit(
    op: int,
    name: str | None,
    source: Array,
    out: Array | None,
    reduce: int,
    scales: tuple[float, float],
    root: int,
    process_set: ProcessSet,
    splits: list[int] | None = None,
) -> Pending:
    """out None: rows whose number the ranks agree on; with `splits`, also how many came from each rank."""
    native, place = runtime.native(), place_of([source])
    handle = native.submit(
        op, name, source.data.ptr, 0 if out is None else out.data.ptr, source.shape, dtype_of(source), reduce,
        *scales, root, set_id(process_set), splits, 0, *place,
    )  # fmt: skip

    def finish(native: Runtime, handle: int) -> Any:
        follow(native, handle, place)
        if out is not None:
            return out
        rows = _rows(native, handle, 0, source, place)
        return rows if splits is None else (rows, list(native.result(handle).rows_from))

    return Pending(native, handle, (source, out), finish)


def _group(
    op: int,
    sources: Sequence[Array],
    outs: Sequence[Array] | None,
    name: str | None,
    reduce: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Pending:
    """outs None: rows whose number the ranks agree on."""
    native = runtime.native()
    if not sources:
        return Pending(native, 0, None, lambda native, handle: [])
    place = place_of([*sources, *(outs or ())])
    targets = [0] * len(sources) if outs is None else [out.data.ptr for out in outs]
    handle = native.submit_group(
        op, name, [array.data.ptr for array in sources], targets, [array.shape for array in sources],
        [dtype_of(array) for array in sources], reduce, *scales, 0, set_id(process_set), *place,
    )  # fmt: skip

    def finish(native: Runtime, handle: int) -> list[Array]:
        follow(native, handle, place)
        if outs is not None:
            return list(outs)
        return [_rows(native, handle, i, array, place) for i, array in enumerate(sources)]

    return Pending(native, handle, (sources, outs), finish)


def _rows(native: Runtime, handle: int, index: int, like: Array, place: Place) -> Array:
    """A result whose number of rows the ranks have agreed on, copied once, on the GPU."""
    rows = cupy.empty((native.result(handle, index).first_dimension, *like.shape[1:]), like.dtype)
    native.copy_result(handle, index, rows.data.ptr, rows.nbytes, _stream(place[0]))
    return rows


def _allreduce(
    source: Array,
    out: Array,
    average: bool | None,
    name: str | None,
    op: int | None,
    scales: tuple[float, float],
    process_set: ProcessSet,
) -> Pending:
    return _submit(ops.ALLREDUCE, name, source, out, ops.resolve_reduce(average, op), scales, 0, process_set)


def allreduce_async(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce; returns a handle at once. Do not change the array before it is done."""
    source, scales = readable(array), (prescale_factor, postscale_factor)
    out = cupy.empty_like(source)
    return remember(_allreduce(source, out, average, name, op, scales, process_set))


def allreduce(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduces arrays of one shape and dtype over all ranks into a new array. Default op: Average."""
    source, scales = readable(array), (prescale_factor, postscale_factor)
    out = cupy.empty_like(source)
    return now(_allreduce(source, out, average, name, op, scales, process_set))


def allreduce_async_(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_; returns a handle at once. Do not touch the array before it is done."""
    target, scales = writable(array), (prescale_factor, postscale_factor)
    return remember(_allreduce(target, target, average, name, op, scales, process_set))


def allreduce_(
    array: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As allreduce, with the result in the array itself, which is returned."""
    target, scales = writable(array), (prescale_factor, postscale_factor)
    now(_allreduce(target, target, average, name, op, scales, process_set))
    return array


def grouped_allreduce_async(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce; returns one handle for the group at once."""
    sources, scales = [readable(array) for array in arrays], (prescale_factor, postscale_factor)
    outs = [cupy.empty_like(source) for source in sources]
    return remember(
        _group(ops.ALLREDUCE, sources, outs, name, ops.resolve_reduce(average, op), scales, process_set)
    )


def grouped_allreduce(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Reduces several arrays on one GPU as one operation: none of them before all are ready on every rank."""
    sources, scales = [readable(array) for array in arrays], (prescale_factor, postscale_factor)
    outs = [cupy.empty_like(source) for source in sources]
    pending = _group(ops.ALLREDUCE, sources, outs, name, ops.resolve_reduce(average, op), scales, process_set)
    return now(pending)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce_; returns one handle for the group at once."""
    targets, scales = [writable(array) for array in arrays], (prescale_factor, postscale_factor)
    return remember(
        _group(ops.ALLREDUCE, targets, targets, name, ops.resolve_reduce(average, op), scales, process_set)
    )


def grouped_allreduce_(
    arrays: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """As grouped_allreduce, with the results in the arrays themselves."""
    targets, scales = [writable(array) for array in arrays], (prescale_factor, postscale_factor)
    pending = _group(
        ops.ALLREDUCE, targets, targets, name, ops.resolve_reduce(average, op), scales, process_set
    )
    return now(pending)  # type: ignore[no-any-return]


def _allgather(array: Any, name: str | None, process_set: ProcessSet) -> Pending:
    return _submit(ops.ALLGATHER, name, readable(array), None, ops.Sum, _PLAIN, 0, process_set)


def allgather_async(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """As allgather; returns a handle at once."""
    return remember(_allgather(array, name, process_set))


def allgather(array: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Every rank's rows, in rank order. Shapes may differ in the first dimension only; there must be one."""
    return now(_allgather(array, name, process_set))


def grouped_allgather_async(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As grouped_allgather; returns one handle for the group at once."""
    sources = [readable(array) for array in arrays]
    return remember(_group(ops.ALLGATHER, sources, None, name, ops.Sum, _PLAIN, process_set))


def grouped_allgather(
    arrays: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """allgather of several arrays as one operation."""
    return synchronize(grouped_allgather_async(arrays, name, process_set))  # type: ignore[no-any-return]


def _scatterable(array: Any) -> Array:
    source = readable(array)
    if source.ndim == 0:
        raise ValueError("reducescatter needs an array with a first dimension to scatter; this one is 0-d")
    return source


def reducescatter_async(
    array: Any,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As reducescatter; returns a handle at once."""
    source, scales = _scatterable(array), (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(None, op)
    return remember(_submit(ops.REDUCESCATTER, name, source, None, reduce, scales, 0, process_set))


def reducescatter(
    array: Any,
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduces arrays of one shape and gives each rank its share of the rows (the first ranks one more if uneven)."""
    return synchronize(reducescatter_async(array, name, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter_async(
    arrays: Sequence[Any],
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As grouped_reducescatter; returns one handle for the group at once."""
    sources, scales = [_scatterable(array) for array in arrays], (prescale_factor, postscale_factor)
    reduce = ops.resolve_reduce(None, op)
    return remember(_group(ops.REDUCESCATTER, sources, None, name, reduce, scales, process_set))


def grouped_reducescatter(
    arrays: Sequence[Any],
    name: str | None = None,
    op: int = ops.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """reducescatter of several arrays as one operation."""
    handle = grouped_reducescatter_async(arrays, name, op, process_set, prescale_factor, postscale_factor)
    return synchronize(handle)  # type: ignore[no-any-return]


def _alltoall(array: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Pending:
    rows = row_counts(splits, "alltoall")
    return _submit(ops.ALLTOALL, name, readable(array), None, ops.Sum, _PLAIN, 0, process_set, rows)


def alltoall_async(
    array: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As alltoall; returns a handle at once."""
    return remember(_alltoall(array, splits, name, process_set))


def alltoall(
    array: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends splits[r] rows to each rank r (equal shares without splits) and gives the rows received, in rank order.

    splits: integers in host memory. With them: (rows, received), the latter a list of integers, one for each rank.
    """
    return now(_alltoall(array, splits, name, process_set))


def _broadcast(
    source: Array, out: Array, root_rank: int, name: str | None, process_set: ProcessSet
) -> Pending:
    return _submit(ops.BROADCAST, name, source, out, ops.Sum, _PLAIN, int(root_rank), process_set)


def broadcast_async(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast; returns a handle at once."""
    source = readable(array)
    return remember(_broadcast(source, cupy.empty_like(source), root_rank, name, process_set))


def broadcast(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Rank root_rank's array on every rank, as a new array. root_rank is the world rank also in a process set."""
    source = readable(array)
    return now(_broadcast(source, cupy.empty_like(source), root_rank, name, process_set))


def broadcast_async_(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_; returns a handle at once."""
    target = writable(array)
    return remember(_broadcast(target, target, root_rank, name, process_set))


def broadcast_(
    array: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As broadcast, into the array itself, which is returned."""
    target = writable(array)
    now(_broadcast(target, target, root_rank, name, process_set))
    return array


def join() -> int:
    """Says that this rank has no more data, and waits until every rank has said so. Returns the rank that joined last.

    Meanwhile this rank takes part in the others' allreduces with neutral elements, on the current GPU.
    """
    native, device = runtime.native(), int(cupy.cuda.Device().id)
    handle = native.submit(
        ops.JOIN, None, 0, 0, (), 0, ops.Sum, 1.0, 1.0, 0, 0, None, 0, device, _stream(device)
    )
    return now(Pending(native, handle, None, lambda native, handle: native.result(handle).join_rank))  # type: ignore[no-any-return]
