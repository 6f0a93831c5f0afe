"""How ranks of a benchmark meet outside of what is measured: mpi4py's communicator, or a file that all processes map.

The file serves processes of one machine that share no network, such as those in namespaces. It has of a communicator
what the benchmarks use. Thread: the rank's main one.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

LINE = 64  # bytes; each rank's count has a cache line of its own
YIELDS = 200  # looks before a waiting rank sleeps; it may share its core with the one that it waits for
NAP_S = 50e-6
DEADLINE_S = 300.0
FOLDER = "BENCHMARK_FOLDER"
ADDRESS = "BENCHMARK_ADDRESS"  # of the host of rank 0


class SharedFile:
    """Ranks that map one file: rank, size, address, Barrier(), bcast(), gather()."""

    def __init__(self, folder: Path, rank: int, size: int, address: str) -> None:
        self.rank, self.size = rank, size
        self.address = address  # of the host of rank 0, for those who listen there
        self._folder = folder
        fd = os.open(folder / "counts", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, LINE * size)
        self._counts = mmap.mmap(fd, LINE * size)
        os.close(fd)
        self._turn = 0
        self._values = 0

    def Barrier(self) -> None:
        """TimeoutError when somebody stays away: he has failed, and the starter will end us all."""
        self._turn += 1
        struct.pack_into("q", self._counts, LINE * self.rank, self._turn)
        looks, deadline = 0, time.monotonic() + DEADLINE_S
        for rank in range(self.size):
            while struct.unpack_from("q", self._counts, LINE * rank)[0] < self._turn:
                looks += 1
                if looks < YIELDS:
                    os.sched_yield()
                    continue
                time.sleep(NAP_S)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not come to barrier {self._turn}")

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Everybody's value on `root`, None elsewhere."""
        self._values += 1
        path = self._folder / f"{self._values}.{self.rank}"
        path.write_bytes(pickle.dumps(value))
        self.Barrier()
        if self.rank != root:
            return None
        return [
            pickle.loads((self._folder / f"{self._values}.{rank}").read_bytes()) for rank in range(self.size)
        ]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """The root's value on everybody."""
        self._values += 1
        path = self._folder / f"{self._values}.{root}"
        if self.rank == root:
            path.write_bytes(pickle.dumps(value))
        self.Barrier()
        return pickle.loads(path.read_bytes())


def communicator() -> Any:
    """Of this process's benchmark: the file, where its starter made one, else MPI's world."""
    if folder := os.environ.get(FOLDER):
        rank, size = (int(os.environ[f"HOROCLONE_{name}"]) for name in ("RANK", "SIZE"))
        return SharedFile(Path(folder), rank, size, os.environ[ADDRESS])
    from mpi4py import MPI

    return MPI.COMM_WORLD
