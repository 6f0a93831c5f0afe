"""What members learn from the record of a generation so that one of them can become the coordinator if the launcher
dies.

Pure: encodes a coordinator as bytes, and restores a coordinator that continues from the last record and these bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from horoclone.membership.coordinator import Coordinator
from horoclone.membership.records import LOW_BITS, NONCE_BYTES, Assignment, Limits, Record
from horoclone.membership.states import Member, State
from horoclone.membership.timeouts import FIND_S

MAX_MEMBERS = 1024  # the names of more do not fit into one frame
MAX_CANDIDATES = 16  # that a member may look for when the coordinator is gone


class Named(NamedTuple):
    """A member, as every other one knows it. near: it is on the host of the coordinator that wrote the record."""

    id: bytes
    number: int  # the launcher's
    host: str
    slot: int
    near: bool
    addresses: tuple[str, ...]  # where it would be the coordinator; only of failover_candidates


class Snapshot(NamedTuple):
    """members: by rank. voters: whose majority may go on."""

    limits: Limits
    voters: tuple[bytes, ...]
    gone: tuple[bytes, ...]  # of the voters, those who are dead for sure
    members: tuple[Named, ...]

    def failover_candidates(self) -> list[int]:
        """Ranks in the order in which they take over: of other hosts than the coordinator's first, the lowest first."""
        ranks = [rank for rank, one in enumerate(self.members) if one.addresses]
        return sorted(ranks, key=lambda rank: (self.members[rank].near, rank))[:MAX_CANDIDATES]


def packed(coordinator: Coordinator) -> bytes:
    """Of the coordinator's newest record."""
    assert coordinator.record is not None
    members = [coordinator.members[id_] for id_ in coordinator.record.members]
    first = sorted((one for one in members if one.addresses), key=lambda one: one.near)[:MAX_CANDIDATES]
    rows = [
        [one.id.hex(), one.index, one.host, one.slot, one.near, one.addresses if one in first else ""]
        for one in members
    ]
    gone = [id_.hex() for id_ in coordinator.voters if coordinator.has_ended(id_)]
    voters = [id_.hex() for id_ in coordinator.voters]
    return json.dumps([list(coordinator.limits), voters, gone, rows], separators=(",", ":")).encode()


def unpacked(body: bytes) -> Snapshot:
    """ConnectionError for what makes no sense."""
    try:
        limits, voters, gone, rows = json.loads(body)
        members = tuple(
            Named(bytes.fromhex(id_), int(index), str(host), int(slot), bool(near), _parts(addresses))
            for id_, index, host, slot, near, addresses in rows
        )
        return Snapshot(
            Limits(*limits), tuple(map(bytes.fromhex, voters)), tuple(map(bytes.fromhex, gone)), members
        )
    except (ValueError, TypeError) as error:
        raise ConnectionError(f"a record of a generation that makes no sense: {error}") from error


def _parts(addresses: str) -> tuple[str, ...]:
    return tuple(part for part in str(addresses).split(",") if part)


def resumed(
    assignment: Assignment, snapshot: Snapshot, is_whole: bool, draw: Callable[[int], bytes], now: float
) -> Coordinator:
    """The coordinator in the member that was told this record last. is_whole: all of its members were connected.

    Its numbers are higher than those of the coordinator before, and no other candidate's: the high half of the number
    counts the takeovers, and holds the rank of the candidate.
    """
    ids = tuple(one.id for one in snapshot.members)
    me = snapshot.members[assignment.rank]
    coordinator = Coordinator(snapshot.limits, draw)
    coordinator.term = ((assignment.number >> (LOW_BITS + 16)) + 1) << 16 | assignment.rank
    coordinator.record = Record(
        assignment.number,
        ids,
        tuple(assignment.indexes),
        tuple(assignment.previous),
        assignment.commit,
        assignment.commit_root,
        assignment.skip_sync,
        assignment.nonce[:NONCE_BYTES],
    )
    for one in snapshot.members:
        member = Member(one.id, one.number, one.host, one.slot, near=one.host == me.host)
        coordinator.detector.heard(one.id, now + FIND_S)
        member.state, member.generation = State.ACTIVE, assignment.number
        member.addresses = ",".join(one.addresses)
        coordinator.members[one.id] = member
    voters = ids if is_whole else snapshot.voters
    coordinator.voters = tuple(id_ for id_ in voters if id_ not in snapshot.gone)
    coordinator.newest_commit = assignment.commit
    coordinator.numbers_from(max(assignment.indexes, default=-1) + 1)
    return coordinator
