"""Torch tensors from one rank to another: send, recv, and isend, irecv with handles for poll() and synchronize().

Only the two ranks take part; collectives are neither needed nor delayed, and a rank that has joined may still do it.
Messages match in order by process set, sender and tag. A send is done when its receiver has matched it and the data
have left, so two ranks that both send first, blocking, wait for each other: use isend. Only what a rank sends to itself
is copied (up to 64 MiB) and done at once. Between GPUs a message is done when both ends have enqueued it; the host does
not wait for the GPU. Gradients do not travel. Thread: the caller's.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import torch

from horoclone.ops import RECEIVE, SEND, peer_number
from horoclone.process_sets import ProcessSet, global_process_set, set_id
from horoclone.torch.operations.gpu import arrived, place_to_receive
from horoclone.torch.operations.handles import submit, synchronize
from horoclone.torch.operations.tensors import are_written_to, number_of

__all__ = ["irecv", "isend", "recv", "send"]


def _number_of(tensor: Any, what: str) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{what} takes a torch.Tensor, not {type(tensor).__name__}")
    return number_of(tensor, None, True)


def isend(tensor: torch.Tensor, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> int:
    """Starts a send and returns a handle at once. Do not change the tensor before it is done."""
    dtype, root = _number_of(tensor, "send"), peer_number(dst, "dst")
    return submit(SEND, None, set_id(process_set), tensor, output=None, dtype=dtype, root=root, tag=tag)


def send(tensor: torch.Tensor, dst: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Sends a contiguous tensor of any shape and dtype to rank dst (a world rank).

    Returns when the receiver has taken it. Mismatch, on both sides, when it receives into a tensor that does not fit;
    PeerLost when it dies; ValueError for a dst that is not in the process set or a negative tag.
    """
    synchronize(isend(tensor, dst, tag, process_set))


def irecv(
    tensor: torch.Tensor | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a receive and returns a handle at once. Do not touch the tensor before it is done."""
    root, number = peer_number(src, "src"), set_id(process_set)
    if tensor is None:
        return submit(RECEIVE, None, number, make=arrived, place=place_to_receive(), root=root, tag=tag)
    dtype = _number_of(tensor, "recv")
    handle = submit(RECEIVE, None, number, None, tensor, tensor, dtype=dtype, root=root, tag=tag)
    are_written_to((tensor,))
    return handle


def recv(
    tensor: torch.Tensor | None = None,
    src: int | None = None,
    tag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Receives from rank src (a world rank; None: from whoever sends first) into `tensor`, which is returned.

    The tensor must have the sender's dtype and number of elements, and lie on a GPU if the sender's does. Without one a
    new tensor of the sender's shape and dtype is made: what comes from a GPU is on the current GPU, if torch uses one
    here, else in host memory. Errors as those of send.
    """
    return synchronize(irecv(tensor, src, tag, process_set))
