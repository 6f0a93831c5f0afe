"""NumPy arrays from one rank to another: send, recv, and isend, irecv with handles for poll() and synchronize().

Only the two ranks take part; collectives are neither needed nor delayed, and a rank that has joined may still do it.
Messages match in order by process set, sender and tag. A send is done when its receiver has matched it and the data
have left, so two ranks that both send first, blocking, wait for each other: use isend. Only what a rank sends to itself
is copied (up to 64 MiB) and done at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from horoclone import array_memory as memory
from horoclone import ops, runtime
from horoclone.array_handles import Pending, now, remember, set_id
from horoclone.array_memory import Array
from horoclone.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from horoclone._core import Runtime


def _sent(array: ArrayLike, dst: int, tag: int, process_set: ProcessSet) -> Pending:
    source, native, to = memory.readable(array), runtime.native(), ops.peer_number(dst, "dst")
    places, dtype, where = (memory.address(source), 0), memory.dtype_of(source), set_id(process_set)
    handle = native.submit(
        ops.SEND, None, *places, source.shape, dtype, ops.Sum, 1.0, 1.0, to, where, None, tag
    )
    return Pending(native, handle, source, lambda native, handle: None)


def isend(array: ArrayLike, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """As send; returns a handle at once. Do not change the array before it is done."""
    return remember(_sent(array, dst, tag, process_set))


def send(array: ArrayLike, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Sends an array of any shape and dtype to rank dst (a world rank).

    Returns when the receiver has taken it. Mismatch, on both sides, when it receives into an array that does not fit;
    PeerLost when it dies; ValueError for a dst that is not in the process set or a negative tag.
    """
    now(_sent(array, dst, tag, process_set))


def _received(array: Array | None, src: int | None, tag: int, process_set: ProcessSet) -> Pending:
    native, where, peer = runtime.native(), set_id(process_set), ops.peer_number(src, "src")
    rest = (ops.Sum, 1.0, 1.0, peer, where, None, tag)
    if array is None:
        handle = native.submit(ops.RECEIVE, None, 0, 0, None, 0, *rest)
    else:
        target = memory.writable(array)
        dtype = memory.dtype_of(target)
        handle = native.submit(ops.RECEIVE, None, 0, memory.address(target), target.shape, dtype, *rest)

    def finish(native: Runtime, handle: int) -> Any:
        return array if array is not None else memory.received(native.result(handle))

    return Pending(native, handle, array, finish)


def irecv(
    array: Array | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As recv; returns a handle at once. Do not touch the array before it is done."""
    return remember(_received(array, src, tag, process_set))


def recv(
    array: Array | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Receives from rank src (a world rank; None: from whoever sends first) into `array`, which is returned.

    The array must have the sender's dtype and number of elements. Without one a new array of the sender's shape and
    dtype is made. Errors as those of send.
    """
    return now(_received(array, src, tag, process_set))  # type: ignore[no-any-return]
