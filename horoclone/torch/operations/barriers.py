"""Barrier and join: operations without tensors. Thread: the caller's."""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

from horoclone.arguments import check
from horoclone.ops import BARRIER, JOIN
from horoclone.process_sets import ProcessSet, global_process_set, set_id
from horoclone.runtime import native, steps
from horoclone.torch.operations import requests
from horoclone.torch.operations.gpu import place_to_join
from horoclone.torch.operations.handles import submit, synchronize


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits until every rank has said so. Returns the rank that joined last.

    Meanwhile this rank takes part in the others' allreduces with identity elements, on GPU number `device` (-1: the
    current one) where the others' tensors are on GPUs.
    """
    check("join", device=device)
    place = place_to_join(device)
    last = synchronize(submit(JOIN, None, 0, make=lambda rt, h: rt.result(h).join_rank, place=place))
    steps.joined()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the process set has called it."""
    requests.run(native(), BARRIER, process_set=set_id(process_set))
