"""What one member is told of the generation that it is in: its rank, those of the others, and whose state counts."""

from __future__ import annotations

import struct

from horoclone.membership.coordinator import NONCE_BYTES, Record

INCARNATION_BYTES = 8
GENERATION_KEY = "g/"  # ranks of a generation gather under this and its number

_HEAD = struct.Struct(f"<QIIQIB{NONCE_BYTES}s")


def packed(record: Record, id_: bytes, rest: bytes = b"") -> bytes:
    """What one member is told: [number, size, rank, commit, root, skip_sync, nonce][index, previous] by rank, the rest.

    rest: what a member needs to be the coordinator itself (failover.py); empty where none ever is.
    """
    size = len(record.members)
    head = _HEAD.pack(
        record.number,
        size,
        record.members.index(id_),
        record.commit,
        record.commit_root,
        record.skip_sync,
        record.nonce,
    )
    pairs = (number for pair in zip(record.indexes, record.previous, strict=True) for number in pair)
    return head + struct.pack(f"<{2 * size}i", *pairs) + rest


class Assignment:
    """A generation as one of its members knows it; previous: the rank of each rank in the generation before, or -1."""

    def __init__(self, body: bytes) -> None:
        try:
            number, size, rank, commit, root, skips, nonce = _HEAD.unpack_from(body)
            numbers = struct.unpack_from(f"<{2 * size}i", body, _HEAD.size)
        except struct.error as error:
            raise ConnectionError(f"a record of a generation that makes no sense: {error}") from error
        self.number, self.size, self.rank = int(number), int(size), int(rank)
        self.commit, self.commit_root, self.skip_sync = int(commit), int(root), bool(skips)
        self.nonce = bytes(nonce)
        self.rest = body[_HEAD.size + 8 * self.size :]
        self.indexes, self.previous = numbers[::2], numbers[1::2]
