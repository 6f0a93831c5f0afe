"""The bytes between the launcher and its bootstrap on another host (remote.py), over ssh's stdin and stdout.

A frame is kind (1 byte), rank (u32), length (u32), payload; JSON and raw bytes only, nothing that could execute.
"""

from __future__ import annotations

import struct

# The remote login shell may print things of its own first; everything before this is skipped.
GREETING = b"\x00\x01horoclone remote 1\n"
WHOLE_HOST = 0xFFFFFFFF
LONGEST = 1 << 20
_HEAD = struct.Struct("<cII")

# launcher -> remote
SPEC, SECRET, FUNCTION, GO, KILL = b"J", b"S", b"F", b"G", b"K"
# remote -> launcher
STARTED, OUT, ERR, ENDED_STREAM, RESULT, EXITED, GONE, REFUSED, PAGE = (
    b"P", b"O", b"E", b"C", b"R", b"X", b"N", b"L", b"M"
)  # fmt: skip

KILL_PAYLOAD = struct.Struct("<iB")  # signal number, 1 = the whole process group


def frame(kind: bytes, rank: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(kind, rank, len(payload)) + payload


def frames(kind: bytes, rank: int, content: bytes) -> bytes:
    """Long content as several frames of one kind; the reader joins them."""
    step = LONGEST // 2
    return b"".join(frame(kind, rank, content[at : at + step]) for at in range(0, len(content), step))


class BrokenFrame(Exception):
    """The other side does not speak this protocol."""


class FrameReader:
    """Takes bytes as they come, gives whole frames."""

    def __init__(self, greeting: bytes = b"") -> None:
        self._received = bytearray()
        self._greeting = greeting
        self.noise = b""  # what came before the greeting, at most 4 KiB of it

    @property
    def greeted(self) -> bool:
        return not self._greeting

    def feed(self, data: bytes) -> list[tuple[bytes, int, bytes]]:
        self._received += data
        if self._greeting:
            at = self._received.find(self._greeting)
            if at < 0:
                spare = len(self._received) - len(self._greeting)
                if spare > 0:
                    self.noise = (self.noise + bytes(self._received[:spare]))[-4096:]
                    del self._received[:spare]
                return []
            self.noise = (self.noise + bytes(self._received[:at]))[-4096:]
            del self._received[: at + len(self._greeting)]
            self._greeting = b""
        found = []
        while len(self._received) >= _HEAD.size:
            kind, rank, length = _HEAD.unpack_from(self._received)
            if length > LONGEST:
                raise BrokenFrame(f"a frame of {length} bytes; the longest allowed is {LONGEST}")
            if len(self._received) < _HEAD.size + length:
                break
            found.append((kind, rank, bytes(self._received[_HEAD.size : _HEAD.size + length])))
            del self._received[: _HEAD.size + length]
        return found
