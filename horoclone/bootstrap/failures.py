"""What the rendezvous server knows about ranks that will not come.

Sources are the ranks' own reports, processes that the launcher saw end, connections that broke and were not made again
(failure_detector.py), and ranks that gave up while they connected. The earliest of these is the cause, later ones are
consequences: nothing is told that came after a connection broke, until it is sure whether that rank comes back.
Thread: any, by one lock.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Container
from typing import NamedTuple

from horoclone.bootstrap.failure_detector import FailureDetector

MAX_FAILURES = 4096
MAX_GIVEN_UP = 64
MAX_TEXT_BYTES = 8192


class Failure(NamedTuple):
    """Why a rank will not come. `consequence`: it only passes on another rank's failure."""

    rank: int
    text: str
    consequence: bool
    at_s: float  # by the server's clock: since when its connection is gone, or when it was known

    def packed(self) -> bytes:
        """As an answer of status wire.FAILED carries it: the rank, then the end of the text."""
        return struct.pack("<I", self.rank) + self.text.encode("utf-8", "backslashreplace")[-MAX_TEXT_BYTES:]


def _order(one: Failure) -> tuple[bool, float]:
    return one.consequence, one.at_s


class Failures:
    """Ranks are numbered as the launcher numbers them, whatever part of them calls init."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._detector: FailureDetector[int] = FailureDetector()
        self._reports: list[Failure] = []  # in the order in which they came
        self._ended: dict[int, Failure] = {}
        self._gone: dict[int, Failure] = {}  # until it comes back
        self._given_up: dict[str, Failure] = {}  # gather -> who was the first to leave it
        self._sure: set[int] = set()  # of these it is known that they do not come back
        self._gone_now: set[int] = set()  # since the last settle()
        self._news: list[float] = []  # since when what is not told yet is so

    def came(self, rank: int) -> None:
        """A connection of this rank is there."""
        with self._mutex:
            self._detector.connected(rank, self._clock())
            self._gone.pop(rank, None)
            self._sure.discard(rank)

    def left(self, rank: int, for_good: bool) -> None:
        """It says so itself. for_good: its process ends; else it is only away until the next init."""
        with self._mutex:
            self._detector.disconnected(rank, self._clock(), is_planned=True)
            if for_good:
                self._lose(rank, f"rank {rank} has ended and does not come to this hvd.init()")

    def broke(self, rank: int) -> None:
        """The connection is gone, and nothing was said."""
        with self._mutex:
            self._detector.disconnected(rank, self._clock(), is_planned=rank in self._sure)

    def _lose(self, rank: int, text: str, since_s: float | None = None) -> None:
        self._gone[rank] = failure = Failure(rank, text, False, self._clock() if since_s is None else since_s)
        self._note(rank, failure.at_s)

    def _note(self, rank: int, at_s: float) -> None:
        self._gone_now.add(rank)
        self._news.append(at_s)

    def _lost_since_s(self, rank: int) -> float:
        """It is sure now. Its connection may have broken before."""
        self._sure.add(rank)
        since_s = self._detector.lost(rank)
        return self._clock() if since_s is None else since_s

    def ended(self, rank: int, text: str) -> None:
        """Somebody who knows has seen the process end, with whatever code."""
        with self._mutex:
            at_s = self._lost_since_s(rank)
            self._ended.setdefault(rank, Failure(rank, text, False, at_s))
            self._note(rank, at_s)

    def reported(self, rank: int, text: str, consequence: bool) -> None:
        with self._mutex:
            at_s = self._lost_since_s(rank)
            if len(self._reports) < MAX_FAILURES:
                self._reports.append(Failure(rank, text, consequence, at_s))
            self._note(rank, at_s)

    def gave_up(self, rank: int, gather: str, text: str) -> None:
        """It had come to the gather and failed while the ranks connected; it may call init again."""
        with self._mutex:
            while len(self._given_up) >= MAX_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
            self._given_up.setdefault(gather, Failure(rank, text, False, self._clock()))
            self._note(rank, self._clock())

    def reports(self) -> list[Failure]:
        with self._mutex:
            return list(self._reports)

    def next_s(self) -> float:
        """When settle() has something to do, by its clock."""
        with self._mutex:
            if self._gone_now or any(at_s <= self._detector.in_doubt_since_s() for at_s in self._news):
                return 0.0
            return self._detector.next_s()

    def settle(self, now: float) -> tuple[set[int], bool]:
        """The ranks about which something is new since the last call, and whether anything may be told now that could
        not be told then."""
        with self._mutex:
            for rank, since_s in self._detector.gone(now).items():
                self._lose(rank, f"rank {rank} has died or left", since_s)
            until_s = self._detector.in_doubt_since_s()
            waiting = [at_s for at_s in self._news if at_s > until_s]
            has_news, self._news = len(waiting) < len(self._news), waiting
            gone, self._gone_now = self._gone_now, set()
            return gone, has_news

    def culprit(self, ranks: Container[int], gather: str = "") -> Failure | None:
        """Why not all of these ranks can come: the cause, if anything is known. gather: a place to be given up."""
        with self._mutex:
            known = [one for one in self._causes() if one.rank in ranks]
            if gather in self._given_up:
                known.append(self._given_up[gather])
            until_s = self._detector.in_doubt_since_s()
        return min((one for one in known if one.at_s <= until_s), key=_order, default=None)

    def causes(self) -> list[Failure]:
        """Of every rank that will not come, whatever part of them calls init: the earliest first."""
        with self._mutex:
            return sorted(self._causes(), key=_order)

    def _causes(self) -> list[Failure]:
        return [*self._reports, *self._ended.values(), *self._gone.values()]
