"""What began the generation that this process trains in: where its state came from, and how long each part took.

Thread: the one that trains.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from horoclone.elastic.generation import Generation
from horoclone.runtime import current, shared_metrics
from horoclone.runtime.lifecycle import member

# What follows on what, from the last commit before to the first one after.
PARTS = ("noticed", "restored", "formed", "connected", "synchronised", "first_step")


@dataclass(frozen=True)
class Recovery:
    """Says how this process joined its generation, and how long each part of that took, in seconds.

    source: "memory", the state is that of this process's own commit; "peers", others of the job sent it; "disk", it was
    loaded from a save; "start", it is what the script made. lost: ranks of the generation before that are gone.
    newcomers: ranks of this one that were not in it. commit: the one that training went on from, 0: none. bytes_moved:
    what the collectives of the synchronisation carried on this rank.

    seconds: "noticed", from the last commit until the failure reached elastic.run, so it holds the work that is lost;
    "restored", going back to the commit; "formed", until the members of the generation were known; "connected";
    "synchronised"; "first_step", until the first commit. A part that is not over yet is absent.
    """

    source: str
    generation: int
    rank: int
    size: int
    lost: tuple[int, ...]
    newcomers: tuple[int, ...]
    commit: int
    bytes_moved: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Seconds from the failure's arrival to the first commit, as far as it is over."""
        return sum(taken for part, taken in self.seconds.items() if part != "noticed")


class Watch:
    """Takes the times. elastic.run tells it what is over, and commits tell it that they were made."""

    def __init__(self) -> None:
        self.record: Recovery | None = None
        self._began = 0.0
        self._ends: dict[str, float] = {}  # of the parts that are over, on the monotonic clock
        self._is_open = False
        self._progress = self._commit_began = 0.0  # when the last commit was made, and when it began
        self._size = 0  # of the generation before
        self._bytes = 0
        self._lost = _Lost()

    def starts(self) -> None:
        """elastic.run begins in this process: init() has formed and connected the generation already."""
        now = time.monotonic()
        self._open(now - current.connected_s - current.formed_s)
        self._ends.update(
            noticed=self._began, restored=self._began, formed=now - current.connected_s, connected=now
        )
        self._size = 0

    def failed(self, is_failure: bool) -> None:
        """The generation is over; where it never came to a commit, what began it goes on. is_failure: else others join
        or leave, and nothing is lost."""
        self._lost.interrupted(is_failure, self._progress)
        if not self._is_open:
            self._open(self._progress)
            self._ends["noticed"] = time.monotonic()

    def restored(self) -> None:
        """The state is that of the commit."""
        self._ends["restored"] = time.monotonic()

    def connected(self) -> None:
        """Another generation is formed and connected."""
        now = time.monotonic()
        self._ends.update(formed=now - current.connected_s, connected=now)

    def synchronises(self) -> None:
        """The collectives that come now belong to it."""
        self._bytes = _bytes()

    def synchronised(self, now: Generation, source: str) -> None:
        """Training begins. The record is there from now on."""
        self._ends["synchronised"] = time.monotonic()
        previous = member.assignment.previous if member.assignment is not None else ()
        lost = tuple(rank for rank in range(self._size) if rank not in previous)
        moved = _bytes() - self._bytes
        self.record = Recovery(
            source, now.number, now.rank, now.size, lost, now.newcomers, now.commit, moved, self._seconds()
        )
        self._size = now.size
        self._lost.resumed()

    def commits(self) -> None:
        """A commit begins."""
        self._commit_began = time.monotonic()

    def committed(self) -> None:
        """A commit was made: the first one ends the recovery."""
        self._progress = time.monotonic()
        self._lost.saved(self._progress - self._commit_began)
        if self._is_open and "synchronised" in self._ends and self.record is not None:
            self._ends["first_step"] = self._progress
            self.record.seconds.update(self._seconds())
            self._is_open = False
            self._show()

    def _open(self, began: float) -> None:
        self._began, self._ends, self._is_open = began, {}, True

    def _seconds(self) -> dict[str, float]:
        return {part: end - begin for part, begin, end in self._spans()}

    def _spans(self) -> list[tuple[str, float, float]]:
        spans, before = [], self._began
        for part in PARTS:
            if part in self._ends:
                spans.append((part, before, max(before, self._ends[part])))
                before = max(before, self._ends[part])
        return spans

    def _show(self) -> None:
        """In the timeline, if one is written."""
        if current.runtime is None or self.record is None:
            return
        record = self.record
        attributes = {
            "source": record.source, "generation": record.generation, "lost": list(record.lost),
            "newcomers": list(record.newcomers), "commit": record.commit, "bytes_moved": record.bytes_moved,
        }  # fmt: skip
        spans = self._spans()
        args = json.dumps(attributes)[1:-1]
        current.runtime.timeline_span("RECOVERY", self._began, spans[-1][2] - self._began, args)
        for part, begin, end in spans:
            current.runtime.timeline_span(part.upper(), begin, end - begin)


def _bytes() -> int:
    counters = json.loads(current.runtime.counters()) if current.runtime is not None else {}
    return int(counters.get("bytes", 0))


class _Lost:
    """Adds up the time of an elastic job that was not training, for rank_metrics.Goodput. Seconds."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._redone = self._recovering = self._joining = self._saving = self._stalled = 0.0
        self._resumed_s = 0.0  # on the monotonic clock
        self._interrupted_s: float | None = None  # training stands still since
        self._is_failure = False

    def interrupted(self, is_failure: bool, committed_s: float) -> None:
        if self._began_ns and self._interrupted_s is None:  # who has not trained yet has lost nothing
            self._interrupted_s, self._is_failure = time.monotonic(), is_failure
            if is_failure:
                self._redone += self._interrupted_s - max(committed_s, self._resumed_s)
        self._is_failure |= is_failure
        if current.runtime is not None:  # its block begins anew
            self._stalled = shared_metrics.stalled_seconds(current.runtime)

    def resumed(self) -> None:
        """Training begins or goes on."""
        self._resumed_s = time.monotonic()
        if self._interrupted_s is not None:
            taken = self._resumed_s - self._interrupted_s
            self._interrupted_s = None
            if self._is_failure:
                self._recovering += taken
            else:
                self._joining += taken
        self._began_ns = self._began_ns or time.time_ns()
        self._show()

    def saved(self, taken_s: float) -> None:
        self._saving += taken_s
        self._show()

    def _show(self) -> None:
        if self._began_ns:
            parts = (self._redone, self._recovering, self._joining, self._saving, self._stalled)
            shared_metrics.note_elastic(self._began_ns, [int(1000 * one) for one in parts])


watch = Watch()


def last_recovery() -> Recovery | None:
    """Returns how this process joined the generation in which it trains; None before the function of elastic.run
    begins."""
    return watch.record
