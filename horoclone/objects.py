"""Collectives on Python objects, through cloudpickle. The only place where the runtime unpickles: the bytes come from
ranks that have proved the job secret, and only when the user calls these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from horoclone import arrays, runtime
from horoclone.process_sets import ProcessSet, global_process_set


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _pickled(obj: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import cloudpickle

    return np.frombuffer(cloudpickle.dumps(obj), np.uint8)


def _unpickled(data: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    import cloudpickle

    return cloudpickle.loads(data.data)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank root_rank (a world rank) on every rank of the process set; root_rank returns its own.

    Two collectives, unnamed unless `name` is given, so that concurrent calls match by their order.
    """
    mine = runtime.native().rank == root_rank
    data = _pickled(obj) if mine else np.empty(0, np.uint8)
    length = arrays.broadcast(np.array([data.size], np.int64), root_rank, _part(name, "size"), process_set)
    if not mine:
        data = np.empty(int(length[0]), np.uint8)
    received = arrays.broadcast(data, root_rank, _part(name, "data"), process_set)
    return obj if mine else _unpickled(received)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """broadcast_object with everything but the object fixed."""

    def broadcast(obj: Any = None) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in the order of the process set's ranks."""
    data = _pickled(obj)
    lengths = arrays.allgather(np.array([data.size], np.int64), _part(name, "sizes"), process_set)
    everything = arrays.allgather(data, _part(name, "data"), process_set)
    ends = np.cumsum(lengths)
    return [_unpickled(everything[end - length : end]) for length, end in zip(lengths, ends, strict=True)]
