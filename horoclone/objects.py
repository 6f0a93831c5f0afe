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


ALIGNMENT = 64


def packed(obj: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An object as one stretch of bytes: a pickle, and behind it the elements of NumPy's arrays, copied once."""
    import cloudpickle

    buffers: list[Any] = []
    head = cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(head, np.uint8), *(np.frombuffer(one.raw(), np.uint8) for one in buffers)]
    table = np.array([len(parts), *(part.size for part in parts)], np.int64).view(np.uint8)
    places = _places([table.size, *(part.size for part in parts)])
    data = np.zeros(places[-1], np.uint8)
    for place, part in zip(places, [table, *parts], strict=False):
        data[place : place + part.size] = part
    return data


def unpacked(data: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    """What packed() was given. Arrays in it are views of `data`."""
    import cloudpickle

    count = int(data[:8].view(np.int64)[0])
    sizes = data[8 : 8 + 8 * count].view(np.int64).tolist()
    places = _places([8 + 8 * count, *sizes])[1:-1]
    head, *buffers = [data[place : place + size].data for place, size in zip(places, sizes, strict=True)]
    return cloudpickle.loads(head, buffers=buffers)


def _places(sizes: list[int]) -> list[int]:
    """Where parts of these sizes begin, each aligned, and where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return places


class _Packed:
    """An object's bytes, or why there are none: also that travels, else the other ranks would wait for ever."""

    def __init__(self, obj: Any = None, is_given: bool = True) -> None:
        import cloudpickle

        self.error: Exception | None = None
        try:
            data = cloudpickle.dumps(obj) if is_given else b""
        except Exception as error:
            self.error = error
            data = f"{type(error).__name__}: {error}".encode()
        self.data = np.frombuffer(data, np.uint8)

    @property
    def length(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[1]; below 0: -1 - the bytes of the reason."""
        return np.array([self.data.size if self.error is None else -1 - self.data.size], np.int64)


def _bytes_of(length: int) -> int:
    return length if length >= 0 else -1 - length


def _unpickled(data: np.ndarray[Any, np.dtype[np.uint8]], length: int, call: str, rank: int) -> Any:
    import cloudpickle

    if length < 0:
        raise ValueError(
            f"{call}: rank {rank} cannot pickle its object: {data.tobytes().decode(errors='replace')}. "
            f"See where rank {rank} raised it"
        )
    return cloudpickle.loads(data.data)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank root_rank (a world rank) on every rank of the process set; root_rank returns its own.

    Two collectives, unnamed unless `name` is given, so that concurrent calls match by their order. An object that
    cannot be pickled: root_rank raises what its pickling raised, and all others ValueError.
    """
    mine = runtime.native().rank == root_rank
    packed = _Packed(obj, is_given=mine)
    length = int(arrays.broadcast(packed.length, root_rank, _part(name, "size"), process_set)[0])
    data = packed.data if mine else np.empty(_bytes_of(length), np.uint8)
    received = arrays.broadcast(data, root_rank, _part(name, "data"), process_set)
    if packed.error is not None:
        raise packed.error
    return obj if mine else _unpickled(received, length, "broadcast_object", root_rank)


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
    """Every rank's object, in the order of the process set's ranks.

    Where a rank's object cannot be pickled, that rank raises what its pickling raised, and all others ValueError.
    """
    packed = _Packed(obj)
    lengths = arrays.allgather(packed.length, _part(name, "sizes"), process_set)
    everything = arrays.allgather(packed.data, _part(name, "data"), process_set)
    if packed.error is not None:
        raise packed.error
    ends = np.cumsum([_bytes_of(length) for length in lengths])
    ranks = process_set.ranks or range(len(lengths))
    return [
        _unpickled(everything[end - _bytes_of(length) : end], int(length), "allgather_object", rank)
        for length, end, rank in zip(lengths, ends, ranks, strict=True)
    ]
