"""What the rendezvous server keeps for a connection, for a rank that waits, and for a gather."""

from __future__ import annotations

import socket
import struct
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Protocol

from horoclone.bootstrap.wire import MAX_FRAME_BYTES, Reader, Sealed


@dataclass(eq=False)
class Gather:
    size: int
    members: list[int]  # the launcher's number of each rank
    blobs: dict[int, bytes] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)  # ranks that came and would not wait any longer
    _packed: list[bytes] = field(default_factory=list)

    def packed(self) -> list[bytes]:
        """Of a complete one all blobs in the order of ranks, each behind its length, in parts that fit into a frame.
        Made once: each rank gets them."""
        if not self._packed:
            part = bytearray()
            for rank in range(self.size):
                blob = self.blobs[rank]
                if part and len(part) + 4 + len(blob) > MAX_FRAME_BYTES // 2:
                    self._packed.append(bytes(part))
                    part.clear()
                part += struct.pack("<I", len(blob)) + blob
            self._packed.append(bytes(part))
        return self._packed

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.blobs]

    def awaited(self) -> list[int]:
        """For whom the others wait: not who was there and has given up waiting for the same ranks."""
        missing = self.missing()
        return [rank for rank in missing if rank not in self.given_up] or missing

    def forget(self, gone: set[int]) -> None:
        """What a rank that is gone has given is no use to the others."""
        if len(self.blobs) < self.size:
            for rank in [one for one in self.blobs if self.members[one] in gone]:
                del self.blobs[rank]


@dataclass(eq=False)
class Waiter:
    kind: int  # GET, GATHER, or WATCH: until somebody is lost
    key: str
    deadline: float
    members: Container[int] = ()  # of a WATCH


@dataclass(eq=False)
class Connection:
    socket: socket.socket
    nonce: bytes
    sends: Sealed | None = None  # both once it has proved the secret
    receives: Sealed | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    waiter: Waiter | None = None
    rank: int = -1  # whose presence this is, as the launcher numbers it
    closing: bool = False

    @property
    def proved(self) -> bool:
        return self.receives is not None


class Membership(Protocol):
    """What the server asks the membership service of an elastic job (membership/service.py)."""

    def handle(self, connection: Any, kind: int, reader: Reader) -> tuple[int, bytes] | None: ...
    def answers(self, now: float) -> list[tuple[Any, int, bytes]]: ...
    def next_s(self) -> float: ...
    def look(self) -> None: ...
    def may_gather(self, connection: Any, key: str, rank: int) -> str: ...
    def gathered(self, key: str) -> None: ...
    def over(self) -> str: ...
    def newly_gone(self) -> list[tuple[int, str]]: ...
    def dropped(self, connection: Any) -> None: ...
