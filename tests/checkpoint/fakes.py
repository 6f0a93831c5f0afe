"""Stand-ins: ranks that are threads of one process."""

from __future__ import annotations

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
