"""What the runtime tells about itself: the flight recorder and the counters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from horoclone.runtime.current import native


def flight_record(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """This rank's last 1,000 operations, newest last, under "operations"; also rank, size, host and process sets.

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
    """Counters of this rank since init: operations, batches, bytes, control frames, sleeps, ... All only grow.

    "last_ready" says who keeps the others waiting: process set id -> [{rank, times, seconds}]: how often that rank was
    the last to be ready, and how long the first one had waited by then. Rank 0 of a set knows about every operation
    that is negotiated; about an optimizer's declared buckets each rank knows whom it waited for itself. "slowest" names
    the rank with the most seconds per set. "autotune" has the settings in force: {searching, changes,
    fusion_threshold, cycle_time_ms, ...}; with HOROVOD_AUTOTUNE=1 they change until searching is False.
    "gpu" says how tensors in GPU memory are reduced, once there were some: process set id -> {backend ("nccl", "peers"
    or "host"), reason, no_kernels: "" or why what NCCL does not do by itself goes through host memory}.
    NotInitialized before init.
    """
    counters: dict[str, Any] = json.loads(native().counters())
    last_ready = {int(set_id): ranks for set_id, ranks in counters["last_ready"].items()}
    counters["last_ready"] = last_ready
    counters["gpu"] = {int(set_id): way for set_id, way in counters["gpu"].items()}
    counters["slowest"] = {
        set_id: max(ranks, key=lambda one: one["seconds"])["rank"]
        for set_id, ranks in last_ready.items()
        if ranks
    }
    return counters
