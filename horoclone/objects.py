"""Collectives on Python objects, through cloudpickle. What a rank unpickles was made by a rank of this job, for this
call: a digest that is keyed with the job's secret says so, as the streams between ranks are not protected."""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from horoclone import arguments, arrays, errors, runtime
from horoclone.bootstrap import seal
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import current


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


@functools.cache
def pickler() -> Any:
    """cloudpickle's class, for ranks that run one script: it sends classes of the script by their content, and here one
    arrives as the class that is there already, if that has the same values. Else an Enum's member would be none of the
    members of the reader."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            reduced = super().reducer_override(value)
            if isinstance(value, type) and isinstance(reduced, tuple) and _is_of_script(value):
                make, arguments, content, *_, fill = reduced
                return (
                    _class_here,
                    (value.__qualname__, _values_of(value), make, arguments),
                    (fill, content),
                    None,
                    None,
                    _filled,
                )
            return reduced

    return Pickler


def pickled(obj: Any, **options: Any) -> bytes:
    """An object's pickle; options: those of the class."""
    stream = io.BytesIO()
    pickler()(stream, **options).dump(obj)
    return stream.getvalue()


def _of_script(name: str) -> Any:
    found: Any = sys.modules.get("__main__")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_of_script(kind: type) -> bool:
    return kind.__module__ == "__main__" and _of_script(kind.__qualname__) is kind


def _values_of(kind: type) -> bytes | None:
    """A digest of what a class of the script and those that it derives from keep besides code; None: cannot be said."""
    import cloudpickle

    kept = [
        [(one.name, one.value) for one in base]
        if issubclass(base, enum.Enum)
        else [(name, value) for name, value in vars(base).items() if _is_value(name, value)]
        for base in kind.__mro__
        if base.__module__ == "__main__"
    ]
    try:
        return hashlib.blake2b(cloudpickle.dumps(kept), digest_size=16).digest()
    except Exception:  # what cannot be sent by value is not compared
        return None


def _is_value(name: str, value: Any) -> bool:
    is_of_python = name.startswith("__") or name == "_abc_impl"
    return not (is_of_python or callable(value) or hasattr(type(value), "__get__"))


def _class_here(name: str, values: bytes | None, make: Callable[..., Any], arguments: Any) -> Any:
    own = _of_script(name)
    is_same = isinstance(own, type) and values is not None and _values_of(own) == values
    return own if is_same else make(*arguments)


def _filled(kind: type, content: Any) -> None:
    if _of_script(kind.__qualname__) is not kind:
        fill, state = content
        fill(kind, state)


ALIGNMENT = 64


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def packed(obj: Any) -> Bytes:
    """An object as one stretch of bytes: a pickle, behind it the elements of NumPy's arrays, copied once, and room for
    the digest that sealed() puts there."""
    buffers: list[Any] = []
    head = pickled(obj, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(head, np.uint8), *(np.frombuffer(one.raw(), np.uint8) for one in buffers)]
    table = np.array([len(parts), *(part.size for part in parts)], np.int64).view(np.uint8)
    places = _places([table.size, *(part.size for part in parts)])
    data = np.zeros(places[-1] + ALIGNMENT, np.uint8)
    for place, part in zip(places, [table, *parts], strict=False):
        data[place : place + part.size] = part
    return data


def sealed(data: Bytes, context: str) -> Bytes:
    """The same memory, what packed() has made, with its digest put in: ready for the way to another rank. context: see
    seal.tag_of()."""
    tag = seal.tag_of(current.lasting_secret(), context, [data[:-ALIGNMENT]])
    data[-ALIGNMENT:][: len(tag)] = np.frombuffer(tag, np.uint8)
    return data


def opened(data: Bytes, context: str) -> Bytes:
    """The same at its end. HorovodInternalError where it is not what a rank of this job has sealed for that."""
    tag = data[-ALIGNMENT:][: seal.TAG_BYTES].tobytes()
    if data.size < ALIGNMENT or not seal.is_right(
        tag, current.lasting_secret(), context, [data[:-ALIGNMENT]]
    ):
        raise errors.HorovodInternalError(seal.broken(context) + ".")
    return data


def unpacked(data: Bytes) -> Any:
    """What packed() was given. Arrays in it are views of `data`, which is this rank's own or was opened()."""
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
        self.error: Exception | None = None
        try:
            data = pickled(obj) if is_given else b""
        except Exception as error:
            self.error = error
            data = f"{type(error).__name__}: {error}".encode()
        self.data = np.frombuffer(data, np.uint8)
        self.length = self.data.size if self.error is None else -1 - self.data.size  # below 0: of the reason

    def sealed(self, call: _Call) -> Bytes:
        """With its digest."""
        tag = seal.tag_of(current.lasting_secret(), call.context(runtime.native().rank), [self.data])
        return np.concatenate([self.data, np.frombuffer(tag, np.uint8)])


class _Call(NamedTuple):
    """One call of all ranks of a process set. lengths: of what each rank sends, by rank. told: what all ranks said."""

    name: str
    lengths: dict[int, int]
    told: bytes

    def context(self, sender: int) -> str:
        """For the digest of what that rank sends: it holds for this call alone, by numbers that each rank draws."""
        return f"{self.name} from rank {sender}: {self.told.hex()}"

    def nbytes(self, sender: int) -> int:
        """What travels from that rank."""
        length = self.lengths[sender]
        return (length if length >= 0 else -1 - length) + seal.TAG_BYTES

    def unpickled(self, data: Bytes, sender: int) -> Any:
        """What a rank has sent. HorovodInternalError where somebody else has; ValueError where it could not pickle."""
        import cloudpickle

        content, tag = data[: -seal.TAG_BYTES], data[-seal.TAG_BYTES :].tobytes()
        if not seal.is_right(tag, current.lasting_secret(), self.context(sender), [content]):
            raise errors.HorovodInternalError(
                seal.broken(f"{self.name}: what rank {sender} has sent")
                + ". Or threads have called this at once: then each needs a name= of its own."
            )
        if self.lengths[sender] < 0:
            raise ValueError(
                f"{self.name}: rank {sender} raised {content.tobytes().decode(errors='replace')}, as its object was "
                "to be pickled"
            )
        return cloudpickle.loads(content.data)


def _agreed(call: str, length: int, name: str | None, process_set: ProcessSet) -> _Call:
    """Everybody's length, and a number that this rank draws: what was sent in another call does not fit this one."""
    rank = runtime.native().rank
    mine = np.array([rank, length, secrets.randbits(63), secrets.randbits(63)], np.int64)
    rows = np.array(arrays.allgather(mine, name, process_set)).reshape(-1, len(mine))
    rows[rows[:, 0] == rank] = mine  # as it was drawn, whatever has come back
    if not (rows[:, 0] == rank).any():
        raise errors.HorovodInternalError(seal.broken(f"{call}: what the ranks have said") + ".")
    return _Call(call, {int(row[0]): int(row[1]) for row in rows}, rows.tobytes())


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of rank root_rank (a world rank) on every rank of the process set; root_rank returns its own.

    Two collectives, unnamed unless `name` is given, so that concurrent calls match by their order. An object that
    cannot be pickled: root_rank raises what its pickling raised, and all others ValueError.
    """
    arguments.check("broadcast_object", root_rank=root_rank, name=name)
    mine = runtime.native().rank == root_rank
    if root_rank not in _ranks(process_set):
        arrays.broadcast(np.empty(0, np.uint8), root_rank, name, process_set)  # says what is wrong with it
    packed = _Packed(obj, is_given=mine)
    call = _agreed("broadcast_object", packed.length, _part(name, "size"), process_set)
    data = packed.sealed(call) if mine else np.empty(call.nbytes(root_rank), np.uint8)
    received = arrays.broadcast(data, root_rank, _part(name, "data"), process_set)
    if packed.error is not None:
        raise packed.error
    return obj if mine else call.unpickled(received, root_rank)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns broadcast_object with everything but the object fixed."""

    def broadcast(obj: Any = None) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the list of every rank's object, in the order of the process set's ranks.

    Where a rank's object cannot be pickled, that rank raises what its pickling raised, and all others ValueError.
    """
    arguments.check("allgather_object", name=name)
    packed = _Packed(obj)
    call = _agreed("allgather_object", packed.length, _part(name, "sizes"), process_set)
    everything = arrays.allgather(packed.sealed(call), _part(name, "data"), process_set)
    if packed.error is not None:
        raise packed.error
    found, end = [], 0
    for rank in call.lengths:
        begin, end = end, end + call.nbytes(rank)
        found.append(call.unpickled(everything[begin:end], rank))
    return found


def _ranks(process_set: ProcessSet) -> Sequence[int]:
    return getattr(process_set, "ranks", None) or range(runtime.native().size)
