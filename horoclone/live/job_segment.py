"""The metrics segment of a job that our launcher has started: one piece of shared memory with all ranks' metrics.

    0       magic, whether the job is over, and JSON about it
    4 KiB   the last events, in slots of 512 bytes
    64 KiB  the metrics of each rank, in blocks of 8 KiB (rank_metrics.py)

The launcher writes all but the blocks of the ranks on its host, which their core writes. The memory has no name: it is
found among the open files of the launcher, or of ranks that have survived it.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

from horoclone.live import rank_metrics

NAME = "horoclone-job"
MAGIC = b"HCJOBS02"
BLOCKS_AT = 1 << 16
_HEAD = struct.Struct("=8sII")  # magic, 1: the job is over, bytes of the JSON that follows
_EVENTS_AT, _SLOT = 4096, 512
_SLOTS = (BLOCKS_AT - _EVENTS_AT) // _SLOT
# CRC-32 and length of the JSON that follows: a slot being written fits neither
_SLOT_HEAD = struct.Struct("=II")
_TEXT = 300  # characters of an event's text


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job. time: Unix seconds. kind: "stall" (a rank waits for others for longer than
    HOROVOD_STALL_CHECK_TIME_SECONDS), "resumed" (it goes on), "loss" (a process ended otherwise than it should),
    "member" (a generation of an elastic job was formed), "end" (the job ends). text: one sentence. ranks: those that it
    is about."""

    time: float
    kind: str
    text: str
    ranks: tuple[int, ...]


class Writer:
    """The launcher's side. OSError where there is no memory for it. Thread: the job's loop."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, BLOCKS_AT)  # a hole could not be filled later: SIGBUS
            text = json.dumps(about).encode()[: _EVENTS_AT - _HEAD.size]
            os.pwrite(self.descriptor, _HEAD.pack(MAGIC, 0, len(text)) + text, 0)
        except OSError:
            os.close(self.descriptor)
            raise
        self._events = self._blocks = 0

    def add_block(self, initial: bytes) -> int:
        """A new block for a rank; where it begins. OSError where there is no memory for it."""
        at = BLOCKS_AT + self._blocks * rank_metrics.BLOCK_BYTES
        os.posix_fallocate(self.descriptor, at, rank_metrics.BLOCK_BYTES)
        self._blocks += 1
        self.write(at, initial)
        return at

    def write(self, at: int, content: bytes) -> None:
        os.pwrite(self.descriptor, content, at)

    def read(self, at: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, at)

    def add_event(self, event: Event) -> None:
        """In the place of the oldest, when all slots are taken."""
        about = {"n": self._events, "time": event.time, "kind": event.kind, "text": event.text[:_TEXT]}
        ranks = list(event.ranks)
        text = json.dumps({**about, "ranks": ranks}, ensure_ascii=False).encode("utf-8", "backslashreplace")
        while len(text) > _SLOT - _SLOT_HEAD.size:
            # of many ranks the first are named, of a long text its beginning
            about["text"], ranks = (
                str(about["text"])[: len(str(about["text"])) * 3 // 4],
                ranks[: len(ranks) * 3 // 4],
            )
            text = json.dumps({**about, "ranks": ranks}, ensure_ascii=False).encode(
                "utf-8", "backslashreplace"
            )
        slot = _SLOT_HEAD.pack(zlib.crc32(text), len(text)) + text
        os.pwrite(self.descriptor, slot, _EVENTS_AT + self._events % _SLOTS * _SLOT)
        self._events += 1

    def close(self) -> None:
        """The job is over."""
        os.pwrite(self.descriptor, struct.pack("=I", 1), len(MAGIC))
        os.close(self.descriptor)


class Reader:
    """Somebody else's view of a segment. ValueError: it is no metrics segment, or of another version; OSError: it
    cannot be read."""

    def __init__(self, path: str) -> None:
        """path: of a descriptor in /proc."""
        # Kept: the descriptor of that path may be another reader's, and be closed before the segment grows.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self.inode = os.fstat(self._descriptor).st_ino
        self._memory = self._mapped()
        magic, _, length = _HEAD.unpack_from(self._memory)
        if magic != MAGIC:
            raise ValueError(
                f"a job's metrics segment begins with {magic!r}, not with {MAGIC!r}: another version wrote it"
            )
        self.about: dict[str, Any] = json.loads(self._memory[_HEAD.size : _HEAD.size + length])

    @property
    def is_over(self) -> bool:
        return bool(struct.unpack_from("=I", self._memory, len(MAGIC))[0])

    def blocks(self) -> Iterator[memoryview]:
        """The memory of each block that there is by now."""
        if os.fstat(self._descriptor).st_size > len(self._memory):  # it grows
            self._memory = self._mapped()
        for at in range(BLOCKS_AT, len(self._memory), rank_metrics.BLOCK_BYTES):
            yield memoryview(self._memory)[at : at + rank_metrics.BLOCK_BYTES]

    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)

    def events(self) -> list[Event]:
        """The oldest first."""
        found = []
        for at in range(_EVENTS_AT, BLOCKS_AT, _SLOT):
            checksum, length = _SLOT_HEAD.unpack_from(self._memory, at)
            text = self._memory[at + _SLOT_HEAD.size : at + _SLOT_HEAD.size + min(length, _SLOT)]
            if length and zlib.crc32(text) == checksum:
                found.append(json.loads(text))
        found.sort(key=lambda one: int(one["n"]))
        return [Event(one["time"], one["kind"], one["text"], tuple(one["ranks"])) for one in found]
