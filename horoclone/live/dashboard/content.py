"""What the dashboard shows of a job, ready for JSON, under the names that the script of web/ knows.

Nothing of the environment or the command line is in it.

Thread: the dashboard's; end() is called by the launcher's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping
from typing import Any

from horoclone.live.overview import Observer, Row, Source, upper_bounds_s
from horoclone.live.rank_metrics import Operation, RankMetrics


class Content:
    """Of the job `name`."""

    def __init__(self, source: Source, name: str) -> None:
        self._observer, self._source, self._name = Observer(source), source, name
        self._ranks: dict[int, RankMetrics] = {}
        self._started = time.time()
        self._ended: dict[str, Any] | None = None
        self._codes: Mapping[int, int] = {}
        self._stopped: Collection[int] = ()

    def end(self, exit_code: int, text: str, codes: Mapping[int, int], stopped: Collection[int]) -> None:
        """The job is over, and its metrics are gone. codes: of ranks, as subprocess has them. stopped: ranks that ended
        since another had."""
        self._codes, self._stopped = codes, stopped
        self._ended = {"exit_code": exit_code, "text": text}

    def look(self) -> dict[str, Any]:
        """`point` goes into the charts: [Unix s, step s of the median and of the slowest rank, share in communication].
        `events` are those since the look before."""
        ended, ranks = self._ended, self._source.ranks()
        if ranks or not self._ranks:
            self._ranks = {metrics.rank: metrics for metrics in ranks}
        if ended is not None:
            self._ranks = {
                rank: _last_of(metrics, self._codes.get(rank), rank in self._stopped)
                for rank, metrics in self._ranks.items()
            }
        overview = self._observer.digest(list(self._ranks.values()), self._source.events())
        now = time.time()
        point = [now, overview.step_s, overview.slowest_step_s, overview.communication]
        late_s = max((row.late_s for row in overview.rows if row.rank == overview.slowest), default=0.0)
        return {
            "time": now,
            "job": {"id": self._name, "started": self._started, "ended": ended},
            "sum": {
                "step": overview.step,
                "step_s": overview.step_s,
                "communication": overview.communication,
                "bytes_per_s": overview.bytes_per_s,
                "slowest": overview.slowest,
                "late_s": late_s,
            },
            "ranks": [_row(one) for one in overview.rows],
            "operations": _operations(overview.operations),
            "point": point if overview.rows else None,
            "events": [{"time": one.time, "kind": one.kind, "text": one.text} for one in overview.new_events],
        }

    def look_at(self, rank: int) -> dict[str, Any] | None:
        """The operations of one rank, as of the last look; None: there is no such rank."""
        metrics = self._ranks.get(rank)
        return None if metrics is None else {"operations": _operations(metrics.operations)}


def _last_of(metrics: RankMetrics, code: int | None, is_consequence: bool) -> RankMetrics:
    """Metrics that were read before the job ended, with what became of its process. code: None: not known. A process
    may fail after its rank has shut down in order, so a failure counts for more than what the rank wrote."""
    is_consequence = is_consequence or metrics.is_consequence
    if metrics.exit_code is not None or (not code and metrics.state in ("ended", "lost")):
        return dataclasses.replace(metrics, is_consequence=is_consequence)
    state = "lost" if code else "ended"
    return dataclasses.replace(
        metrics,
        state=state,
        exit_code=code,
        is_stalled=False,
        stalled_on="",
        stalled_for=(),
        is_consequence=is_consequence,
    )


def _row(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}


def _operations(by_kind: Mapping[str, Operation]) -> dict[str, Any]:
    return {kind: _operation(one) for kind, one in by_kind.items()}


def _operation(one: Operation) -> dict[str, Any]:
    """histogram: [upper bound in seconds, count] from the first bucket that is not empty to the last."""
    filled = [at for at, count in enumerate(one.histogram) if count]
    inside = range(filled[0], filled[-1] + 1) if filled else ()
    bounds = upper_bounds_s()
    return {
        "count": one.count,
        "bytes": one.bytes,
        "queued_s": one.queued_seconds,
        "running_s": one.running_seconds,
        "histogram": [[bounds[at], one.histogram[at]] for at in inside],
    }
