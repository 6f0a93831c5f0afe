"""A file of arrays as it will be on disk, in memory: the header of safetensors, and the elements that it lists.

The memory of an image is where the arrays are copied to, so a file is one piece of memory that begins at a page: it
goes to the disk as it is (docs/decisions/checkpoints.md).
"""

from __future__ import annotations

import json
import threading

import numpy as np

from horoclone.checkpoint.leaves import ITEM_BYTES, Bytes
from horoclone.checkpoint.tree import Leaf

PAGE = 4096  # bytes; what a disk is written in without a copy begins and ends at a multiple of it


class Image:
    """The layout of a file. Its arrays lie one behind the other, those with the largest elements first: so each element
    lies at a multiple of its size."""

    def __init__(self, leaves: list[Leaf]) -> None:
        self._leaves = sorted(leaves, key=lambda leaf: (-ITEM_BYTES[leaf.form.dtype], leaf.name))
        self._header = _header_of(self._leaves)
        self.nbytes = len(self._header) + sum(leaf.form.nbytes for leaf in leaves)

    def filled(self, memory: Bytes) -> Bytes:
        """Copies header and arrays to the beginning of `memory`, which is at a page; the part that is the file."""
        end = len(self._header)
        memory[:end] = np.frombuffer(self._header, np.uint8)
        for leaf in self._leaves:
            begin, end = end, end + leaf.form.nbytes
            leaf.kind.copy(leaf.value, memory[begin:end])
        return memory[:end]


def _header_of(leaves: list[Leaf]) -> bytes:
    """As safetensors defines it: its length in 8 bytes, little-endian, then JSON, and spaces up to the next page."""
    table, end = {}, 0
    for leaf in leaves:
        begin, end = end, end + leaf.form.nbytes
        table[leaf.name] = {
            "dtype": leaf.form.dtype,
            "shape": list(leaf.form.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (in_pages(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def in_pages(nbytes: int) -> int:
    """The bytes of the pages that so many bytes take."""
    return -(-nbytes // PAGE) * PAGE


def from_a_page(nbytes: int) -> Bytes:
    """New memory that begins at a page."""
    memory = np.empty(nbytes + PAGE, np.uint8)
    before = -memory.ctypes.data % PAGE
    return memory[before : before + nbytes]


class CopyMemory:
    """Memory for copies. It is kept from one save to the next: new memory costs more than the copy, as the kernel finds
    and clears each page. Thread: take on the one that saves, give on the one that writes."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free: Bytes | None = None

    def take(self, nbytes: int) -> Bytes:
        """Memory of at least `nbytes` that begins at a page, for this caller alone."""
        with self._mutex:
            free, self._free = self._free, None
        if free is not None and nbytes <= free.nbytes <= 2 * nbytes:
            return free
        return from_a_page(nbytes)

    def give(self, memory: Bytes) -> None:
        """Gives the memory back, once it is not read any more."""
        with self._mutex:
            self._free = memory
