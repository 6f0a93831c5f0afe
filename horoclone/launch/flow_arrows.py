"""Arrows between the ranks of a merged timeline: from the rank that was the last to be ready for an operation to the
ranks that waited for it. PURE.

Which spans are of one operation follows from their times: of one name a rank has one operation at a time, and none runs
anywhere before every rank is ready for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
Where = tuple[int, int]  # process and track of the merged file
Subject = tuple[str, str, Any]  # tensor, operation, and the number that tells unnamed operations apart

SLACK_MICROS = 5.0  # by which the times of two threads on one clock may contradict each other
SHARED_TRACK = "(more tensors)"  # many names in one track: nobody can tell its spans apart


@dataclass
class Run:
    """One operation on one rank, in the merged file. Times in microseconds."""

    rank: int
    begin: float
    where: Where
    end: float | None = None
    ready: float | None = None
    ready_where: Where = (0, 0)


@dataclass
class Rank:
    """Collects one rank's runs from its events, in the order of its file."""

    rank: int
    runs: dict[Subject, list[Run]] = field(default_factory=dict)
    _open: dict[Where, list[Event]] = field(default_factory=dict)  # spans that have begun in a track
    _running: dict[Where, Run] = field(default_factory=dict)
    _ready: dict[Subject, tuple[float, Where]] = field(default_factory=dict)  # the last marks

    def add(self, event: Event, tensor: str, kind: str) -> None:
        """An event of the merged file. kind: of the track, "negotiation" or "operation"."""
        where: Where = (event["pid"], event["tid"])
        spans = self._open.setdefault(where, [])
        phase = event["ph"]
        if phase == "E" and spans:
            spans.pop()
            if not spans and (over := self._running.pop(where, None)):
                over.end = event["ts"]
        elif phase == "X" and kind == "negotiation" and event["name"] == str(self.rank) and spans:
            operation = spans[0]["name"].removeprefix("NEGOTIATE_")
            self._ready[tensor, operation, _number_of(spans[0])] = (event["ts"], where)
        elif phase == "B":
            if kind == "operation" and not spans and tensor != SHARED_TRACK:
                self._begin(event, tensor, where)
            spans.append(event)

    def _begin(self, event: Event, tensor: str, where: Where) -> None:
        subject = (tensor, event["name"], _number_of(event))
        run = Run(self.rank, event["ts"], where)
        mark = self._ready.pop(subject, None)
        if mark is not None and mark[0] <= run.begin:
            run.ready, run.ready_where = mark
        self.runs.setdefault(subject, []).append(run)
        self._running[where] = run


def _number_of(event: Event) -> Any:
    return event.get("args", {}).get("sequence")


def arrows(ranks: Sequence[Rank], clock_error: float) -> list[Event]:
    """The arrows as pairs of flow events. clock_error: microseconds by which the ranks' clocks may differ."""
    events: list[Event] = []
    for subject in sorted({subject for rank in ranks for subject in rank.runs}, key=str):
        runs = [run for rank in ranks for run in rank.runs.get(subject, ())]
        for together in _operations(sorted(runs, key=lambda run: run.begin), clock_error + SLACK_MICROS):
            events += _arrows_of(together, len(events) // 2)
    return events


def _operations(runs: Sequence[Run], slack: float) -> Iterator[list[Run]]:
    """The runs of each operation, from all runs of one name in the order in which they began."""
    together: list[Run] = []
    for run in runs:
        of_the_same = (
            together
            and run.rank not in {other.rank for other in together}
            and run.ready is not None
            and run.ready <= together[0].begin + slack
        )
        if together and not of_the_same:
            yield together
            together = []
        together.append(run)
    if together:
        yield together


def _arrows_of(together: Sequence[Run], number: int) -> Iterator[Event]:
    marked = [run for run in together if run.ready is not None]
    if len(together) < 2 or not marked:
        return
    last = max(marked, key=lambda run: run.ready or 0.0)
    for run in together:
        if run is last:
            continue
        start = last.ready or 0.0
        # By clocks that differ a rank may begin before the last one is ready. Viewers drop an arrow that ends before it
        # begins, or lies outside of its spans: so it ends later in the span of the rank that waited, or there is none.
        end = max(run.begin, start)
        if run.end is not None and end > run.end:
            continue
        number += 1
        common = {"cat": "ranks", "name": "last to be ready", "id": number}
        yield {"ph": "s", **common, "ts": start, "pid": last.ready_where[0], "tid": last.ready_where[1]}
        yield {"ph": "f", "bp": "e", **common, "ts": end, "pid": run.where[0], "tid": run.where[1]}
