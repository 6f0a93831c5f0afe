"""Stand-ins: ranks that are threads of one process, and an `os` that kills the process at a chosen call."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any


class Ranks:
    """size ranks that meet in memory. Each thread gets its own by of(rank)."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self._lock = threading.Condition()
        self._said: dict[str, dict[int, Any]] = {}

    def of(self, rank: int) -> Ranks:
        mine = Ranks(self.size)
        mine.rank, mine._lock, mine._said = rank, self._lock, self._said
        return mine

    def gather(self, what: str, mine: Any, deadline: float) -> list[Any]:
        with self._lock:
            self._said.setdefault(what, {})[self.rank] = mine
            self._lock.notify_all()
            left_s = deadline - time.monotonic()
            assert self._lock.wait_for(lambda: len(self._said[what]) == self.size, left_s), what
            return [self._said[what][rank] for rank in range(self.size)]


class KillingOs:
    """os, but the process is killed before (or right after) the call of that number that changes the disk."""

    CALLS = ("makedirs", "mkdir", "open", "write", "fsync", "close", "rename")

    def __init__(self, kill_at: int, after: bool) -> None:
        self.count, self._kill_at, self._after, self._lock = 0, kill_at, after, threading.Lock()
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                mine = self.count
                self.names.append(name)
            if mine == self._kill_at and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "write":  # in pieces, so that a file can be half written
                value = real(args[0], args[1][: max(1, len(args[1]) // 2)])
            else:
                value = real(*args, **kwargs)
            if mine == self._kill_at and self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return call
