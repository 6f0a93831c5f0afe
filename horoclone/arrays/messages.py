"""Arrays from one rank to another: send, recv, and isend, irecv with handles for poll() and synchronize().

Only the two ranks take part; collectives are neither needed nor delayed, and a rank that has joined may still do it.
Messages match in order by process set, sender and tag. A send is done when its receiver has matched it and the data
have left, so two ranks that both send first, blocking, wait for each other: use isend. Only what a rank sends to itself
is copied (up to 64 MiB) and done at once. Between GPUs a message is done when both ends have enqueued it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horoclone import ops, runtime
from horoclone.arrays import requests
from horoclone.arrays.adapter import Array, Operations
from horoclone.arrays.handles import Pending, now, remember
from horoclone.process_sets import ProcessSet, global_process_set, set_id

if TYPE_CHECKING:
    from horoclone._core import Runtime


class Messages(Operations[Array]):
    """send and recv, over an adapter."""

    def _sent(self, array: Any, dst: int, tag: int, process_set: ProcessSet) -> Pending:
        native, memory = runtime.native(), self._memory
        source, to = memory.readable(array), ops.peer_number(dst, "dst")
        place = memory.place_of([source])
        handle = requests.submit(
            memory, native, ops.SEND, source=source, root=to, process_set=set_id(process_set), tag=tag, place=place
        )  # fmt: skip
        return Pending(native, handle, source, lambda native, handle: memory.follow(native, handle, place))

    def isend(self, array: Any, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
        """Starts send and returns a handle at once. Do not change the array before it is done."""
        return remember(self._sent(array, dst, tag, process_set))

    def send(self, array: Any, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
        """Sends an array of any shape and dtype to rank dst (a world rank); from a GPU only to a GPU.

        Returns when the receiver has taken it. Mismatch, on both sides, when it receives into an array that does not
        fit; PeerLost when it dies; ValueError for a dst that is not in the process set or a negative tag.
        """
        now(self._sent(array, dst, tag, process_set))

    def _received(self, array: Any, src: int | None, tag: int, process_set: ProcessSet) -> Pending:
        native, memory = runtime.native(), self._memory
        terms: dict[str, Any] = {
            "root": ops.peer_number(src, "src"), "process_set": set_id(process_set), "tag": tag,
        }  # fmt: skip
        if array is None:
            handle = requests.submit(memory, native, ops.RECEIVE, place=memory.place_to_receive(), **terms)
            return Pending(native, handle, None, memory.arrived)
        target = memory.writable(array)
        place = memory.place_of([target])
        handle = requests.submit(memory, native, ops.RECEIVE, target=target, place=place, **terms)

        def finish(native: Runtime, handle: int) -> Any:
            memory.follow(native, handle, place)
            return array

        return Pending(native, handle, target, finish)

    def irecv(
        self,
        array: Any = None,
        src: int | None = None,
        tag: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts recv and returns a handle at once. Do not touch the array before it is done."""
        return remember(self._received(array, src, tag, process_set))

    def recv(
        self,
        array: Any = None,
        src: int | None = None,
        tag: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Receives from rank src (a world rank; None: from whoever sends first) into `array`, which is returned.

        The array must have the sender's dtype and number of elements. Without one a new array of the sender's shape and
        dtype is made (with CuPy on the current GPU, also of what comes from host memory). Errors as those of send.
        """
        return now(self._received(array, src, tag, process_set))  # type: ignore[no-any-return]
