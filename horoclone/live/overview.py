"""What the views show of a job: figures of each rank and of all, out of pages that were read one after the other.

Rates are over the last seconds, not since the start. Pure but for the job that is asked.
"""

from __future__ import annotations

import dataclasses
import signal
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from horoclone.live.job import Event
from horoclone.live.page import BUCKETS, Operation, Page

WINDOW_S = 5.0  # for which a rate is given
MOST_EVENTS = 200
# In the order of how much they matter to who looks. A rank that has failed is "lost", whatever its page says.
STATES = ("lost", "stalled", "starting", "waiting", "running", "ended")


class Source(Protocol):
    """As far as a view is concerned: live.job.Job, or the launcher's own."""

    def pages(self) -> list[Page]: ...
    def events(self) -> list[Event]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One rank. note: why it is in this state, or "". None: not known (yet), or it has no sense in this state.

    communication: share of time in which operations were under way, 0 to 1, and overlap: of that, the share for which
    no thread waited; of the last whole step, or where there are no steps of the last seconds. late_s: how long others
    have waited for it since init(), as the one saw it who waited longest.
    """

    rank: int
    host: str
    pid: int
    state: str
    note: str
    generation: int
    step: int
    steps_per_s: float | None
    step_s: float | None
    communication: float | None
    overlap: float | None
    bytes: int
    bytes_per_s: float | None
    late_s: float
    operation: str


@dataclasses.dataclass(frozen=True, slots=True)
class Overview:
    """A job at the moment `now` (Unix seconds). step_s: of the median rank, slowest_step_s: of the slowest, both of the
    last whole step. communication: mean of the ranks. slowest: who was waited for longest, or None. new_events: of
    `events`, those that were not there at the look before."""

    now: float
    rows: tuple[Row, ...]
    operations: Mapping[str, Operation]
    step: int
    step_s: float | None
    slowest_step_s: float | None
    communication: float | None
    bytes_per_s: float | None
    slowest: int | None
    events: tuple[Event, ...]
    new_events: tuple[Event, ...]


class Observer:
    """Looks at a job again and again. Not for two threads at once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._before: deque[dict[tuple[int, int], Page]] = deque()  # (rank, pid) -> page, of the last seconds
        self._events: tuple[Event, ...] = ()

    def look(self) -> Overview:
        return self.digest(self._source.pages(), self._source.events())

    def digest(self, pages: Sequence[Page], events: Sequence[Event]) -> Overview:
        """What these pages and events say, as the next look after those before."""
        current = {(page.rank, page.pid): page for page in pages}
        now = max((page.now for page in pages), default=0.0)
        while len(self._before) > 1 and _time_of(self._before[1]) <= now - WINDOW_S:
            self._before.popleft()
        late = late_seconds(pages)
        rows = tuple(
            _row(page, self._earlier(key, page), late.get(page.rank, 0.0)) for key, page in current.items()
        )
        self._before.append(current)
        seen, self._events = set(self._events), tuple(events[-MOST_EVENTS:])
        active = [page for page in pages if state_of(page) in ("running", "waiting", "stalled")]
        steps = [page.step_seconds for page in active if page.step_seconds]
        slowest = max(late, key=lambda rank: late[rank], default=None)
        return Overview(
            now=now,
            rows=rows,
            operations=total(page.operations for page in pages),
            step=max((page.step for page in active or pages), default=0),
            step_s=statistics.median(steps) if steps else None,
            slowest_step_s=max(steps, default=None),
            communication=_mean(row.communication for row in rows),
            bytes_per_s=_sum(row.bytes_per_s for row in rows),
            slowest=slowest,
            events=self._events,
            new_events=tuple(one for one in self._events if one not in seen),
        )

    def _earlier(self, key: tuple[int, int], page: Page) -> Page | None:
        """The oldest page of the window of this process since its last init()."""
        for pages in self._before:
            found = pages.get(key)
            if found is not None and found.started == page.started and found.now < page.now:
                return found
        return None


def state_of(page: Page) -> str:
    """The page's state; a process that ended with another exit code than 0 has failed, whatever it wrote before."""
    return "lost" if page.exit_code not in (None, 0) else page.state


def end_of(exit_code: int | None) -> str:
    """How a process ended, in a few letters. exit_code: as subprocess has it; None: nobody saw it."""
    if exit_code is None:
        return "gone"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def late_seconds(pages: Iterable[Page]) -> dict[int, float]:
    """rank -> how long others have waited for it, as that page says which has the most."""
    found: dict[int, float] = {}
    for page in pages:
        for one in page.late:
            found[one.rank] = max(found.get(one.rank, 0.0), one.seconds)
    return found


def late_times(pages: Iterable[Page]) -> dict[int, int]:
    """rank -> how often it was the last one to come, as that page says which has the most."""
    found: dict[int, int] = {}
    for page in pages:
        for one in page.late:
            found[one.rank] = max(found.get(one.rank, 0), one.times)
    return found


def total(of_ranks: Iterable[Mapping[str, Operation]]) -> dict[str, Operation]:
    """The sum over ranks, by kind of operation."""
    by_kind: dict[str, list[Operation]] = {}
    for operations in of_ranks:
        for kind, one in operations.items():
            by_kind.setdefault(kind, []).append(one)
    return {
        kind: Operation(
            sum(one.count for one in each),
            sum(one.bytes for one in each),
            sum(one.queued_seconds for one in each),
            sum(one.running_seconds for one in each),
            tuple(map(sum, zip(*(one.histogram for one in each), strict=True))),
        )
        for kind, each in by_kind.items()
    }


def upper_bounds_s() -> tuple[float | None, ...]:
    """Of the buckets of a histogram, in seconds; None: the last one has none."""
    return (*(2**at / 1e6 for at in range(BUCKETS - 1)), None)


def _row(page: Page, before: Page | None, late_s: float) -> Row:
    state = state_of(page)
    moves = state in ("running", "waiting")  # what it does now may be told
    elapsed_s = page.now - before.now if before is not None else 0.0
    communication = overlap = None
    if page.step_seconds:
        communication, overlap = page.communication_share, page.overlap
    elif before is not None and elapsed_s > 0:
        busy_s = page.communication_seconds - before.communication_seconds
        communication = min(1.0, max(0.0, busy_s / elapsed_s))
        overlap = (page.overlapped_seconds - before.overlapped_seconds) / busy_s if busy_s > 0 else None
    rate = (page.bytes - before.bytes) / elapsed_s if before is not None and elapsed_s > 0 else None
    return Row(
        rank=page.rank,
        host=page.host,
        pid=page.pid,
        state=state,
        note=_note(page, state),
        generation=page.generation,
        step=page.step,
        steps_per_s=1 / page.step_seconds_smoothed if moves and page.step_seconds_smoothed else None,
        step_s=page.step_seconds or None,
        communication=communication if moves or state == "stalled" else None,
        overlap=None if overlap is None or not moves else min(1.0, max(0.0, overlap)),
        bytes=page.bytes,
        bytes_per_s=rate if moves or state == "stalled" else None,
        late_s=late_s,
        operation=_last(page),
    )


def _note(page: Page, state: str) -> str:
    if state == "lost":
        return end_of(page.exit_code)
    if state != "stalled":
        return ""
    who = f", for rank{'' if len(page.stalled_for) == 1 else 's'} {','.join(map(str, page.stalled_for))}"
    return page.stalled_on + (who if page.stalled_for else "")


def _last(page: Page) -> str:
    last = page.last_operation
    if last is None:
        return ""
    return f"{last.kind} '{last.name}'" if last.name else last.kind


def _time_of(pages: Mapping[tuple[int, int], Page]) -> float:
    return max((page.now for page in pages.values()), default=0.0)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
