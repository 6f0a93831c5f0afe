"""CuPy arrays from one rank's GPU to another's: send, recv, and isend, irecv with handles for poll() and synchronize().

Meaning and errors as in horoclone/array_messages.py, but a message is done when both ends have enqueued it: the host
waits for no GPU. Thread: the caller's; its current stream counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horoclone import ops, runtime
from horoclone.array_handles import Pending, now, remember, set_id
from horoclone.array_memory import dtype_of
from horoclone.cupy.operations import Array, arrived, current_place, follow, place_of, readable, writable
from horoclone.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from horoclone._core import Runtime


def _sent(array: Any, dst: int, tag: int, process_set: ProcessSet) -> Pending:
    source, native, to = readable(array), runtime.native(), ops.peer_number(dst, "dst")
    place = place_of([source])
    handle = native.submit(
        ops.SEND, None, source.data.ptr, 0, source.shape, dtype_of(source), ops.Sum, 1.0, 1.0, to,
        set_id(process_set), None, tag, *place,
    )  # fmt: skip
    return Pending(native, handle, source, lambda native, handle: follow(native, handle, place))


def isend(array: Any, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """As send; returns a handle at once. Do not change the array before it is done."""
    return remember(_sent(array, dst, tag, process_set))


def send(array: Any, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Sends an array of any shape and dtype to rank dst (a world rank), which must receive it on a GPU."""
    now(_sent(array, dst, tag, process_set))


def _received(array: Any, src: int | None, tag: int, process_set: ProcessSet) -> Pending:
    native, peer = runtime.native(), ops.peer_number(src, "src")
    rest = (ops.Sum, 1.0, 1.0, peer, set_id(process_set), None, tag)
    if array is None:
        handle = native.submit(ops.RECEIVE, None, 0, 0, None, 0, *rest, *current_place())
        return Pending(native, handle, None, arrived)
    target = writable(array)
    place, dtype = place_of([target]), dtype_of(target)
    handle = native.submit(ops.RECEIVE, None, 0, target.data.ptr, target.shape, dtype, *rest, *place)

    def finish(native: Runtime, handle: int) -> Any:
        follow(native, handle, place)
        return array

    return Pending(native, handle, target, finish)


def irecv(
    array: Any | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As recv; returns a handle at once. Do not touch the array before it is done."""
    return remember(_received(array, src, tag, process_set))


def recv(
    array: Any | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Receives from rank src (a world rank; None: from whoever sends first) into `array`, which is returned.

    The array must have the sender's dtype and number of elements. Without one a new array of the sender's shape and
    dtype is made on the current GPU, also of what comes from host memory.
    """
    return now(_received(array, src, tag, process_set))
