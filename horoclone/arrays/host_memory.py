"""The adapter for NumPy arrays: address, dtype number, and the core's results as arrays without a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from horoclone import ops
from horoclone.arguments import given as described
from horoclone.arguments import refuse_mask
from horoclone.arrays.adapter import HOST, Copy, Place

if TYPE_CHECKING:
    from horoclone._core import Result, Runtime

Array = NDArray[Any]

IN_HOST_MEMORY = True
empty_like = np.empty_like
NAMES = {number: name for name, number in ops.MOVABLE.items()}
# By dtype, of those seen: making a name takes NumPy longer than the core's whole call
_numbers: dict[Any, int] = {}


def dtype_of(array: Array) -> int:
    """The core's number of the dtype of an array, NumPy's or CuPy's; ValueError names those that there are."""
    number = _numbers.get(array.dtype)
    if number is None:
        number = _number_of(array)
    return number


def _number_of(array: Array) -> int:
    number = ops.MOVABLE.get(array.dtype.name)
    if number is None:
        raise ValueError(
            f"Tensor type {array.dtype.name} is not supported. Supported: {', '.join(ops.MOVABLE)}."
        )
    _numbers[array.dtype] = number
    return number


def readable(array: ArrayLike) -> Array:
    """As a C-contiguous array in native byte order; a copy only where that needs one."""
    refuse_mask(array)
    try:
        found = np.asarray(array)
    except TypeError as error:
        raise _refusal(array) or error from None
    if not found.flags.c_contiguous or not found.dtype.isnative:
        found = np.array(found, dtype=found.dtype.newbyteorder("="), order="C", copy=True)
    return found


def _refusal(array: object) -> ValueError | None:
    """The error for an array on a GPU, which NumPy does not read."""
    if not hasattr(array, "__cuda_array_interface__"):
        return None
    return ValueError(
        f"this {type(array).__name__} is in the memory of a GPU: `import horoclone.cupy as hvd`, or horoclone.torch "
        "for torch's tensors, has the same functions for it"
    )


def writable(array: Array) -> Array:
    if not isinstance(array, np.ndarray):
        raise _refusal(array) or ValueError(
            f"an in-place operation needs a NumPy array, not {described(array)}: np.asarray() makes one"
        )
    refuse_mask(array)
    flags = array.flags
    if not flags.c_contiguous:
        raise ValueError("Tensor is required to be contiguous.")
    if not array.dtype.isnative:
        raise ValueError(
            f"an in-place operation needs an array in this machine's byte order, not {array.dtype.str}"
        )
    if not flags.writeable:
        raise ValueError("an in-place operation needs a writable array, and this one is read-only")
    return array


_addressof = ctypes.addressof
_first_byte_of: Any = ctypes.c_char.from_buffer


def address(array: Array) -> int:
    """Where its elements begin. The buffer protocol is faster, for those that have it."""
    if array.flags.carray:
        try:
            return _addressof(_first_byte_of(array))
        except (TypeError, ValueError, BufferError):  # an empty array, bfloat16
            pass
    return int(array.__array_interface__["data"][0])


def place_of(arrays: Sequence[Array]) -> Place:
    return HOST


def place_to_receive() -> Place:
    return HOST


def place_to_join(device: int) -> Place:
    return HOST


def follow(native: Runtime, handle: int, place: Place) -> None:
    """The result is there when wait() returns."""


def rows(result: Result, like: Array, copy: Copy | None) -> Array:
    """The core's bytes as an array of the rows' shape and dtype, without a copy."""
    shape = (result.first_dimension, *like.shape[1:])
    if result.nbytes == 0:
        return np.empty(shape, like.dtype)
    return np.frombuffer(memoryview(result), np.uint8).view(like.dtype).reshape(shape)


def row_counts(splits: ArrayLike | None, what: str) -> list[int] | None:
    """The rows for each rank that a caller gave; ValueError unless it is a 1-d array of integers."""
    if splits is None:
        return None
    given = np.asarray(splits)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"{what}: splits={described(splits)} cannot be used; splits is a 1-d array of integers, one for each rank "
            "of the process set"
        )
    return [int(count) for count in given]


def numpy_dtype(result: Result) -> np.dtype[Any]:
    """The dtype of an array that another rank sent."""
    name = NAMES[result.dtype]
    try:
        return np.dtype(name)
    except TypeError:  # not one of NumPy's own
        import ml_dtypes
    if not hasattr(ml_dtypes, name):
        raise ValueError(
            f"what arrived is {name}, which ml_dtypes {ml_dtypes.__version__} lacks: let the sender convert it, or "
            "pass its bits as uint8"
        )
    return np.dtype(getattr(ml_dtypes, name))


def received(result: Result) -> Array:
    """What another rank sent, in its dtype and shape, without a copy."""
    dtype = numpy_dtype(result)
    if result.nbytes == 0:
        return np.empty(result.shape, dtype)
    return np.frombuffer(memoryview(result), np.uint8).view(dtype).reshape(result.shape)


def arrived(native: Runtime, handle: int) -> Array:
    return received(native.result(handle))


def counts(rows_from: list[int]) -> NDArray[np.integer]:
    return np.array(rows_from, ops.counts_dtype(rows_from))
