"""What the coordinator says: generations, and why there is none for a process. Values, and their bytes."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

ID_BYTES = 16
NONCE_BYTES = 32
INCARNATION_BYTES = 8
NO_UPDATE, REMOVED, ADDED = 0, 1, 2  # flags of a notice, as Horovod's HostUpdateResult
LOW_BITS = 32  # of a generation's number: these count, those above name who counts (failover.py)
GENERATION_KEY = "g/"  # ranks of a generation gather under this and its number


class Loss(IntEnum):
    """How a rank was lost for another one. Of two the greater tells more."""

    UNREACHABLE = 0  # its connection has ended
    SILENT = 1  # it does not answer, and nothing more is known
    ENDED = 2  # the kernel of its host says that its process ends


class Limits(NamedTuple):
    """size: of the first generation. largest, resets: None for no limit. timeout_s: bounds every wait.

    majority: a generation needs more than half of those members of the last whole one that are not known to be dead, or
    half of them with the lowest. Another coordinator may have the rest.
    """

    size: int
    smallest: int = 1
    largest: int | None = None
    timeout_s: float = 600.0
    resets: int | None = None
    majority: bool = False


class Record(NamedTuple):
    """One generation. members: ids by rank; previous: the rank of each in the generation before, -1: none."""

    number: int
    members: tuple[bytes, ...]
    indexes: tuple[int, ...]  # the launcher's numbers of the members
    previous: tuple[int, ...]
    commit: int  # the newest that every survivor holds; 0: none
    commit_root: int  # the rank whose state the others take
    skip_sync: bool
    nonce: bytes

    @property
    def newcomers(self) -> tuple[int, ...]:
        return tuple(rank for rank, before in enumerate(self.previous) if before < 0)


class Evicted(NamedTuple):
    """The others go on without this process. code: with which it should end."""

    code: int
    text: str


class Stop(NamedTuple):
    """The job ends. code: of every process."""

    code: int
    text: str


class RescaleNotice(NamedTuple):
    """Another generation, of number `wanted`, shall be formed at the next commit. seq: rises with each."""

    seq: int
    wanted: int
    update: int


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
