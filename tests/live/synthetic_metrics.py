"""Metrics as a rank would have written them, for questions of arithmetic and layout."""

from __future__ import annotations

import time
from typing import Any

from horoclone.live.job import Event
from horoclone.live.rank_metrics import BUCKETS, LastOperation, Late, Operation, RankMetrics

NOW = 1_700_000_000.0


def histogram(**counts: int) -> tuple[int, ...]:
    """histogram(at8=5): five in bucket 8."""
    found = [0] * BUCKETS
    for name, count in counts.items():
        found[int(name.removeprefix("at"))] = count
    return tuple(found)


def metrics_of(rank: int = 0, size: int = 2, **different: Any) -> RankMetrics:
    """A rank that runs: 40 steps of 0.12 s, of which 0.05 s were communication and 0.02 s waited for."""
    done = Operation(100, 4_000_000, 0.5, 1.25, histogram(at8=50, at9=40, at10=10))
    fields: dict[str, Any] = {
        "rank": rank, "size": size, "local_rank": rank, "host": "node-a", "pid": 4000 + rank, "program": "train.py",
        "generation": 1, "started": NOW - 60, "heartbeat": NOW, "now": NOW, "state": "running", "exit_code": None,
        "step": 40, "step_seconds": 0.12, "step_seconds_smoothed": 0.125, "step_communication_seconds": 0.05,
        "step_waited_seconds": 0.02, "operations": {"allreduce": done}, "waited_for_peers_seconds": 1.0,
        "waited_for_transfer_seconds": 2.0, "communication_seconds": 5.0, "overlapped_seconds": 2.0,
        "last_operation": LastOperation("allreduce", "grad.0", 4000, 0.01), "is_stalled": False, "stalled_on": "",
        "stalled_for": (), "late": (Late(1, 5, 2.5),),
    }  # fmt: skip
    return RankMetrics(**{**fields, **different})


class FixedJob:
    """A job whose metrics and events are these."""

    def __init__(self, ranks: list[RankMetrics], events: list[Event] | None = None) -> None:
        self._ranks, self._events = ranks, events or []

    def ranks(self) -> list[RankMetrics]:
        return self._ranks

    def events(self) -> list[Event]:
        return self._events


def a_mixed_job(size: int) -> FixedJob:
    """Rank 1 was killed, rank 0 waits for it, the others run."""
    ranks = [metrics_of(rank, size) for rank in range(size)]
    ranks[0] = metrics_of(
        0, size, state="stalled", is_stalled=True, stalled_on="allreduce 'grad.0'", stalled_for=(1,)
    )
    ranks[1] = metrics_of(1, size, state="lost", exit_code=-9)
    return FixedJob(ranks, [Event(time.time(), "loss", "rank 1 was killed by SIGKILL", (1,))])
