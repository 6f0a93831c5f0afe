"""BaseDataLoader and the mixin that reads ahead of it in a thread, under Horovod's names.

Thread: one named hc-loader for each iteration that is under way; it ends with the iteration, with close_async_loader()
or with the loader itself. Both sides wait with a limit, so neither hangs when the other is gone.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

_LOOK_S = 0.1  # how often a side that waits looks whether the other still wants to go on
_JOIN_S = 5.0  # a reader that is stuck in _iterate() is left behind after this time; it is a daemon


class BaseDataLoader:
    """Base class of sources of batches. A subclass writes `_iterate`, one generator per epoch, and `__len__`, its
    batches."""

    def __len__(self) -> int:
        """Number of batches in one epoch."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many batches it has")

    def _iterate(self) -> Iterator[Any]:
        """Yields the batches of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} does not write _iterate()")

    def _process_batch(self, batch: Any) -> Any:
        """What the consumer gets for a batch; a trainer's hook, called in the consumer's thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class _Reading:
    """One epoch being read ahead: the thread, what it has read, and the wish to stop."""

    def __init__(self, batches: Iterator[Any], room: int) -> None:
        self.read: queue.Queue[tuple[str, Any]] = queue.Queue(room)
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=_read, args=(batches, self.read, self.stop), name="hc-loader", daemon=True
        )

    def next(self) -> tuple[str, Any]:
        """("batch", it), ("error", the exception of _iterate) or ("end", None)."""
        while not self.stop.is_set():
            try:
                return self.read.get(timeout=_LOOK_S)
            except queue.Empty:
                if not self.thread.is_alive() and self.read.empty():
                    break
        return "end", None

    def end(self) -> None:
        self.stop.set()
        # One that has not been started yet cannot be joined; it will find that it is to stop.
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_S)


def _read(batches: Iterator[Any], read: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    try:
        for batch in batches:
            if not _put(read, ("batch", batch), stop):
                return
        _put(read, ("end", None), stop)
    except BaseException as error:  # whatever the user's generator raises, sys.exit() too, is the consumer's
        _put(read, ("error", error), stop)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def _put(read: queue.Queue[tuple[str, Any]], item: tuple[str, Any], stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            read.put(item, timeout=_LOOK_S)
            return True
        except queue.Full:
            pass
    return False


class AsyncDataLoaderMixin:
    """Reads ahead in a thread: class MyLoader(AsyncDataLoaderMixin, MyPlainLoader).

    async_loader_queue_size: batches kept ready; 0 reads in the consumer's own thread. debug_data_loader: says on stdout
    how long the consumer waited for each batch. An iteration that is broken off ends its thread, and the next one
    begins a new epoch. An exception of `_iterate` is raised in the consumer, at the batch where it happened.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(async_loader_queue_size, bool) or async_loader_queue_size < 0:
            raise ValueError(
                f"async_loader_queue_size={async_loader_queue_size!r} is not a number of batches; 0 turns it off"
            )
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readings: weakref.WeakSet[_Reading] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends what reads ahead; an iteration that is under way stops. The loader can be iterated again."""
        for reading in list(self._readings):
            reading.end()

    def __iter__(self) -> Iterator[Any]:
        process, batches = self._process_batch, self._iterate()  # type: ignore[attr-defined]
        if self.async_loader_queue_size == 0:
            for batch in batches:
                yield process(batch)
            return
        reading = _Reading(batches, self.async_loader_queue_size)
        self._readings.add(reading)  # before it starts, so that closing finds it
        reading.thread.start()
        try:
            while True:
                began = time.perf_counter()
                kind, value = reading.next()
                if self.debug_data_loader and kind == "batch":
                    print(f"hc-loader: waited {1000 * (time.perf_counter() - began):.1f} ms for a batch")
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                yield process(value)
        finally:
            reading.end()
