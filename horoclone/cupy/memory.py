"""The adapter for CuPy arrays, and for everything else on a GPU that speaks DLPack; read without a copy where possible.

Results are CuPy arrays on the same GPU, also where another one is current: new memory comes from that which is. Work
begins after what was enqueued on CuPy's current stream; what is enqueued there after a blocking function or
synchronize() runs after the result is ready. The host does not wait for the GPU.
Thread: the caller's; its current stream counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy

from horoclone.arrays.adapter import Copy, Place
from horoclone.arrays.host_memory import dtype_of as dtype_of  # as of a NumPy array
from horoclone.arrays.host_memory import numpy_dtype, received

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime

Array = Any  # cupy.ndarray, which has no types

IN_HOST_MEMORY = False


def _on_gpu(array: Any) -> Array:
    if isinstance(array, cupy.ndarray):
        return array
    try:
        return cupy.from_dlpack(array)
    except (TypeError, ValueError, AttributeError, BufferError) as error:
        raise ValueError(
            f"this {type(array).__name__} is not an array on a GPU ({error}): horoclone.cupy takes CuPy's, and what "
            "speaks DLPack there. Pass cupy.asarray(...), or `import horoclone as hvd` for what is in host memory"
        ) from None


def readable(array: Any) -> Array:
    found = _on_gpu(array)
    dtype_of(found)
    with found.device:
        return cupy.ascontiguousarray(found).reshape(found.shape)  # of 0-d arrays CuPy makes 1-d ones there


def writable(array: Any) -> Array:
    found = _on_gpu(array)
    dtype_of(found)
    if not found.flags.c_contiguous:
        raise ValueError("Tensor is required to be contiguous.")
    return found


def empty_like(array: Array) -> Array:
    with array.device:
        return cupy.empty_like(array)


def address(array: Array) -> int:
    return int(array.data.ptr)


def _stream(device: int) -> int:
    return int(cupy.cuda.get_current_stream(device).ptr)


def place_of(arrays: Sequence[Array]) -> Place:
    devices = {array.device.id for array in arrays}
    if len(devices) > 1:
        raise ValueError(f"the arrays of one group lie on different GPUs: {sorted(devices)}")
    device = devices.pop()
    return device, _stream(device)


def place_to_receive() -> Place:
    device = int(cupy.cuda.Device().id)
    return device, _stream(device)


def place_to_join(device: int) -> Place:
    return place_to_receive() if device < 0 else (device, _stream(device))


def follow(native: Runtime, handle: int, place: Place) -> None:
    """The current stream comes behind the result, and so does the one that made the input."""
    device, submitted_on = place
    for stream in {_stream(device), submitted_on}:
        native.stream_wait(handle, stream)


def rows(result: Result, like: Array, copy: Copy | None) -> Array:
    """Copied once, on the GPU of `like`."""
    with like.device:
        made = cupy.empty((result.first_dimension, *like.shape[1:]), like.dtype)
    assert copy is not None
    copy(made.data.ptr, made.nbytes, _stream(like.device.id))
    return made


def arrived(native: Runtime, handle: int) -> Array:
    """On the GPU where the core has it or, else, the current one."""
    result = native.result(handle)
    if result.device < 0:
        return cupy.asarray(received(result))
    place = result.device, _stream(result.device)
    follow(native, handle, place)
    with cupy.cuda.Device(result.device):
        values = cupy.empty(tuple(result.shape), numpy_dtype(result))
    native.copy_result(handle, 0, values.data.ptr, values.nbytes, place[1])
    return values


def counts(rows_from: list[int]) -> list[int]:
    return list(rows_from)
