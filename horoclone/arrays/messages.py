"""Arrays from one rank to another: send, recv, and isend, irecv with handles for poll() and synchronize().

Only the two ranks take part; collectives are neither needed nor delayed, and a rank that has joined may still do it.
Messages match in order by process set, sender and tag. A send is done when its receiver has matched it and the data
have left, so two ranks that both send first, blocking, wait for each other: use isend. Only what a rank sends to itself
is copied (up to 64 MiB) and done at once. Between GPUs a message is done when both ends have enqueued it.
"""

from __future__ import annotations

from typing import Any

from horoclone import ops
from horoclone.arrays.adapter import Array, Operations
from horoclone.arrays.handles import synchronize
from horoclone.process_sets import ProcessSet, global_process_set


class Messages(Operations[Array]):
    """send and recv, over an adapter."""

    def isend(self, array: Any, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
        """Starts send and returns a handle at once. Do not change the array before it is done."""
        source, root = self._memory.readable(array), ops.peer_number(dst, "dst")
        return self._start(ops.SEND, None, process_set, source, output=None, root=root, tag=tag)

    def send(self, array: Any, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
        """Sends an array of any shape and dtype to rank dst (a world rank); from a GPU only to a GPU.

        Returns when the receiver has taken it. Mismatch, on both sides, when it receives into an array that does not
        fit; PeerLost when it dies; ValueError for a dst that is not in the process set or a negative tag.
        """
        synchronize(self.isend(array, dst, tag, process_set))

    def irecv(
        self,
        array: Any = None,
        src: int | None = None,
        tag: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Starts recv and returns a handle at once. Do not touch the array before it is done."""
        target = None if array is None else self._memory.writable(array)
        make = self._memory.arrived if array is None else None
        root = ops.peer_number(src, "src")
        return self._start(ops.RECEIVE, None, process_set, None, target, array, make, root=root, tag=tag)

    def recv(
        self,
        array: Any = None,
        src: int | None = None,
        tag: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> Array:
        """Receives from rank src (a world rank; None: from whoever sends first) into `array`, which is returned.

        The array must have the sender's dtype and number of elements. Without one a new array of the sender's shape and
        dtype is made (with CuPy on the GPU that this rank works on, also of what comes from host memory). Errors as
        those of send.
        """
        return synchronize(self.irecv(array, src, tag, process_set))  # type: ignore[no-any-return]
