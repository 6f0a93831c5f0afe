"""Under Horovod's name: what a worker tells the callbacks of its executor's run(), which are called in the driver."""

from __future__ import annotations

import os
import warnings
from typing import Any

_queue: Any = None
_has_warned = False


def configure(queue: Any) -> None:
    """queue: has put(value); the worker calls this when a run with callbacks begins. None: there are no callbacks."""
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any], chief_only: bool = True) -> None:
    """Each callback is called with info_dict. chief_only: only what the process says that was started as rank 0."""
    global _has_warned
    if chief_only and os.environ.get("HOROVOD_RANK") != "0":
        return
    if _queue is not None:
        _queue.put(info_dict)
    elif not _has_warned:
        _has_warned = True
        warnings.warn(
            "`ray_logger.log` called but logging is not configured: run() has no callbacks", stacklevel=2
        )
