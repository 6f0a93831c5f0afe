"""Handles of operations on arrays, NumPy's and CuPy's: one table for both. Thread: any, with the GIL."""

from __future__ import annotations

from typing import Any

import numpy as np

from horoclone.handles import Handles

table = Handles((np.ndarray,))


def poll(handle: int) -> bool:
    """Returns whether synchronize(handle) would return at once."""
    return table.poll(handle) is not False


def synchronize(handle: int) -> Any:
    """Waits for an `_async` operation and returns what the blocking function would have. None for an unknown handle.

    Threads that wait for one handle each get the result; RuntimeError for one that comes after another has got it.
    """
    output = table.finish_plain(handle)
    return table.wait_for(handle) if output is NotImplemented else output
