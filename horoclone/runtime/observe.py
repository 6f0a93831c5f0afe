"""What the runtime tells about itself: the flight recorder and the counters."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from horoclone.live import rank_metrics
from horoclone.runtime import shared_metrics
from horoclone.runtime.current import native
from horoclone.settings import flag


def flight_record(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns this rank's last 1,000 operations, newest last, under "operations"; also rank, size, host and process
    sets.

    Each has op, name (None: unnamed), dtype, shape, process_set, call (its number among this rank's calls to that set,
    from 1), use (its number among those with its name), state ("pending", "running", "ok", or how it failed) and how
    many seconds ago it was submitted, agreed on and done (None: not yet). With `path` the record is written there too;
    `horoclone debug` compares the records of several ranks. NotInitialized before init; OSError from writing.
    """
    text = native().flight_record("asked for")
    if path is not None:
        Path(path).write_text(text)
    record: dict[str, Any] = json.loads(text)
    return record


def metrics() -> dict[str, Any]:
    """Returns counters of this rank since init: operations, batches, bytes, control frames, sleeps, ... All only grow.

    "last_ready" says who keeps the others waiting: process set id -> [{rank, times, seconds}]: how often that rank was
    the last to be ready, and how long the first one had waited by then. Rank 0 of a set knows about every operation
    that is negotiated; about an optimizer's declared buckets each rank knows whom it waited for itself. "slowest" names
    the rank with the most seconds per set. "autotune" has the settings in force: {searching, changes,
    fusion_threshold, cycle_time_ms, ...}; with HOROVOD_AUTOTUNE=1 they change until searching is False.
    "gpu" says how tensors in GPU memory are reduced, once there were some: process set id -> {backend ("nccl", "peers"
    or "host"), reason, no_kernels: "" or why what NCCL does not do by itself goes through host memory}.
    "mesh" counts what the connections moved; connections_remade: those that broke and were made again.

    Times, in seconds, of this rank's metrics block (docs/observing.md says how each is measured):
    "by_operation": kind ("allreduce", ...) -> {count, bytes, queued_seconds, running_seconds, histogram}, where
    histogram[i] counts those that took less than 2**i microseconds and no less than half of that, the last one all
    that took longer;
    "waiting": {for_peers_seconds, for_transfer_seconds}, of the threads that waited for operations, before and after
    the data began to move;
    "communication": {seconds, overlapped_seconds}: while operations were under way; of these, while no thread waited;
    "step": {number, seconds, smoothed_seconds, communication_seconds, waited_seconds, communication_share, overlap} of
    the last whole step; number counts those that have begun, and is 0 where nothing repeats;
    "stalled": what this rank has waited for too long, or "";
    "goodput": of an elastic job, how much of its time was training that counts: {share, whole_seconds, redone_seconds,
    recovering_seconds, joining_seconds, saving_seconds, stalled_seconds} (docs/elastic.md); else None.
    "why": with HOROCLONE_WHY=1 a list with {rank, cause, share, step_seconds, line, text, advice} for each rank that is
    late now, the latest first, as far as this rank sees the others' metrics (docs/observing.md#why-a-rank-is-late);
    else None.
    NotInitialized before init.
    """
    runtime = native()
    counters: dict[str, Any] = json.loads(runtime.counters())
    counters.update(_times(rank_metrics.read(runtime.rank_metrics())))
    last_ready = {int(set_id): ranks for set_id, ranks in counters["last_ready"].items()}
    counters["last_ready"] = last_ready
    counters["gpu"] = {int(set_id): way for set_id, way in counters["gpu"].items()}
    counters["slowest"] = {
        set_id: max(ranks, key=lambda one: one["seconds"])["rank"]
        for set_id, ranks in last_ready.items()
        if ranks
    }
    counters["why"] = _why() if flag(os.environ, "WHY") else None
    return counters


def _why() -> list[dict[str, Any]]:
    from horoclone.live import late_ranks

    return [
        {**dataclasses.asdict(one), "text": str(one), "advice": one.advice}
        for one in late_ranks.of_ranks(shared_metrics.of_all())
    ]


def _times(now: rank_metrics.RankMetrics) -> dict[str, Any]:
    """What metrics() tells out of the metrics block."""
    return {
        "by_operation": {
            kind: {**dataclasses.asdict(done), "histogram": list(done.histogram)}
            for kind, done in now.operations.items()
        },
        "waiting": {
            "for_peers_seconds": now.waited_for_peers_seconds,
            "for_transfer_seconds": now.waited_for_transfer_seconds,
        },
        "communication": {"seconds": now.communication_seconds, "overlapped_seconds": now.overlapped_seconds},
        "step": {
            "number": now.step,
            "seconds": now.step_seconds,
            "smoothed_seconds": now.step_seconds_smoothed,
            "communication_seconds": now.step_communication_seconds,
            "waited_seconds": now.step_waited_seconds,
            "communication_share": now.communication_share,
            "overlap": now.overlap,
        },
        "stalled": now.stalled_on,
        "goodput": now.goodput and {"share": now.goodput.share, **dataclasses.asdict(now.goodput)},
    }
