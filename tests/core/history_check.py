"""What a history of operations may look like when ranks die, and what is a violation.

Every rank writes an Event when it submits an operation and one when that has ended. The checker is given the events of all ranks
and who was killed; it knows nothing of how operations are carried out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DONE, MISMATCH, LOST = "done", "Mismatch", "PeerLost"


@dataclass(frozen=True)
class Event:
    """One line of a rank's history. `end` is None where the operation was submitted, else how it ended."""

    number: int  # of the operation, in program order; the same on all ranks
    what: str  # operation, name, shape: what all ranks must have in common
    end: str | None = None
    right: bool = True  # the result is what a model of all ranks gives
    lost: int | None = None  # the rank that PeerLost names
    planted: bool = False  # the ranks were made to disagree


def event_of(line: Mapping[str, Any]) -> Event:
    return Event(**{key: value for key, value in line.items() if key in Event.__dataclass_fields__})


def violations(histories: Sequence[Sequence[Event]], killed: set[int]) -> list[str]:
    """Sentences, one for each broken rule; none if the history is sound."""
    found: list[str] = []
    ends: list[dict[int, Event]] = []
    for rank, history in enumerate(histories):
        submitted: dict[int, Event] = {}
        ended: dict[int, Event] = {}
        failed: Event | None = None
        for event in history:
            if event.end is None:
                submitted[event.number] = event
                continue
            if event.number not in submitted:
                found.append(f"rank {rank}: operation {event.number} ended and was never submitted")
            if event.number in ended:
                found.append(f"rank {rank}: operation {event.number} ended twice")
            ended[event.number] = event
            found += _of_one_end(rank, event, killed)
            if event.end == DONE and failed is not None and event.number > failed.number:
                found.append(
                    f"rank {rank}: operation {event.number} is done after {failed.number} lost rank {failed.lost}"
                )
            if event.end == LOST and failed is None:
                failed = event
        if rank not in killed:
            found += [
                f"rank {rank}: operation {number} ({event.what}) never ended"
                for number, event in submitted.items()
                if number not in ended
            ]
        ends.append(ended)
    return found + _between_ranks(ends, killed)


def _of_one_end(rank: int, event: Event, killed: set[int]) -> list[str]:
    where = f"rank {rank}: operation {event.number} ({event.what})"
    if event.end == DONE:
        if event.planted:
            return [f"{where} is done although the ranks disagreed"]
        return [] if event.right else [f"{where} has a wrong result"]
    if event.end == MISMATCH:
        return [] if event.planted else [f"{where} is a Mismatch that nobody planted"]
    if event.end == LOST:
        return [] if event.lost in killed else [f"{where} names rank {event.lost}, which was not killed"]
    return [f"{where} ended with {event.end}"]


def _between_ranks(ends: Sequence[Mapping[int, Event]], killed: set[int]) -> list[str]:
    """Done on one rank: every rank that lives has it done, too, or has an error. The same operations in the same order."""
    found: list[str] = []
    last = {rank: max(ended, default=-1) for rank, ended in enumerate(ends)}
    lost_first = {
        rank: min((number for number, event in ended.items() if event.end == LOST), default=None)
        for rank, ended in enumerate(ends)
    }
    for number in sorted(set().union(*ends)):
        having = {rank: ended[number] for rank, ended in enumerate(ends) if number in ended}
        if len({event.what for event in having.values()}) > 1:
            found.append(
                f"operation {number} is not the same everywhere: {sorted({e.what for e in having.values()})}"
            )
        if not any(event.end == DONE for event in having.values()):
            continue
        for rank in set(range(len(ends))) - set(having) - killed:
            if lost_first[rank] is None or last[rank] > number:
                found.append(f"operation {number} is done elsewhere and unknown to rank {rank}")
        if any(event.end == MISMATCH for event in having.values()):
            found.append(f"operation {number} is done on one rank and a Mismatch on another")
    return found
