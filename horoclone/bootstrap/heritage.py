"""What members learn from the record of a generation so that one of them can become the roster if the launcher dies.

Pure: encodes a roster as bytes, and restores a roster that continues from the last record and these bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from horoclone.bootstrap.desk import Told
from horoclone.bootstrap.roster import LOW_BITS, NONCE_BYTES, Limits, Member, Record, Roster

MOST_MEMBERS = 1024  # the names of more do not fit into one frame
MOST_HEIRS = 16  # that a member may look for when the roster is gone
FIND_S = 10.0  # so much longer than later is a member waited for at first, as it has to find the new roster


class Named(NamedTuple):
    """A member, as every other one knows it. near: it is on the host of the roster that wrote the record."""

    id: bytes
    number: int  # the launcher's
    host: str
    slot: int
    near: bool
    addresses: tuple[str, ...]  # where it would be the roster; only of heirs


class Heritage(NamedTuple):
    """members: by rank. voters: whose majority may go on."""

    limits: Limits
    voters: tuple[bytes, ...]
    gone: tuple[bytes, ...]  # of the voters, those who are dead for sure
    members: tuple[Named, ...]

    def heirs(self) -> list[int]:
        """Ranks in the order in which they take over: of other hosts than the roster's first, the lowest first."""
        ranks = [rank for rank, one in enumerate(self.members) if one.addresses]
        return sorted(ranks, key=lambda rank: (self.members[rank].near, rank))[:MOST_HEIRS]


def packed(roster: Roster) -> bytes:
    """Of the roster's newest record."""
    assert roster.record is not None
    members = [roster.members[id_] for id_ in roster.record.members]
    first = sorted((one for one in members if one.addresses), key=lambda one: one.near)[:MOST_HEIRS]
    rows = [
        [one.id.hex(), one.index, one.host, one.slot, one.near, one.addresses if one in first else ""]
        for one in members
    ]
    gone = [id_.hex() for id_ in roster.voters if id_ in roster.certainly_gone]
    voters = [id_.hex() for id_ in roster.voters]
    return json.dumps([list(roster.limits), voters, gone, rows], separators=(",", ":")).encode()


def unpacked(body: bytes) -> Heritage:
    """ConnectionError for what makes no sense."""
    try:
        limits, voters, gone, rows = json.loads(body)
        members = tuple(
            Named(bytes.fromhex(id_), int(index), str(host), int(slot), bool(near), _parts(addresses))
            for id_, index, host, slot, near, addresses in rows
        )
        return Heritage(
            Limits(*limits), tuple(map(bytes.fromhex, voters)), tuple(map(bytes.fromhex, gone)), members
        )
    except (ValueError, TypeError) as error:
        raise ConnectionError(f"a record of a generation that makes no sense: {error}") from error


def _parts(addresses: str) -> tuple[str, ...]:
    return tuple(part for part in str(addresses).split(",") if part)


def resumed(
    told: Told, heritage: Heritage, is_whole: bool, draw: Callable[[int], bytes], now: float
) -> Roster:
    """The roster in the member that was told this record last. is_whole: all of its members were connected.

    Its numbers are higher than those of the roster before, and no other heir's: the high half of the number counts the
    takeovers, and holds the rank of the heir.
    """
    ids = tuple(one.id for one in heritage.members)
    me = heritage.members[told.rank]
    roster = Roster(heritage.limits, draw)
    roster.term = ((told.number >> (LOW_BITS + 16)) + 1) << 16 | told.rank
    roster.record = Record(
        told.number,
        ids,
        tuple(told.indexes),
        tuple(told.previous),
        told.commit,
        told.commit_root,
        told.skip_sync,
        told.nonce[:NONCE_BYTES],
    )
    for one in heritage.members:
        member = Member(one.id, one.number, one.host, one.slot, now + FIND_S, near=one.host == me.host)
        member.generation, member.addresses = told.number, ",".join(one.addresses)
        roster.members[one.id] = member
    roster.voters = ids if is_whole else heritage.voters
    roster.certainly_gone = set(heritage.gone)
    roster.newest_commit = told.commit
    roster.numbers_from(max(told.indexes, default=-1) + 1)
    return roster
