"""horovod.data: reading ahead in a thread, and that neither side hangs when the other stops. Needs no ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from horoclone.data import AsyncDataLoaderMixin, BaseDataLoader, data_loader_base


class Numbers(BaseDataLoader):
    """Batches 0..count-1; remembers what was read, waits where it is told to, fails where it is told to."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at
        self.read: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.closed = threading.Event()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.gate.wait(20)
                if number == self.fails_at:
                    raise KeyError(number)
                self.read.append(number)
                yield number
        finally:
            self.closed.set()

    def _process_batch(self, batch: int) -> Any:
        return batch, threading.current_thread() is threading.main_thread()


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def loader_threads() -> int:
    return sum(thread.name == "hc-loader" for thread in threading.enumerate())


@pytest.mark.parametrize("make", [Numbers, AsyncNumbers, lambda n: AsyncNumbers(0, False, n)])
def test_every_epoch_gives_every_batch_in_order_processed_by_the_consumer(make: Any) -> None:
    loader = make(count=20) if make is Numbers else (make(count=20) if make is AsyncNumbers else make(20))
    for _ in range(3):
        assert list(loader) == [(number, True) for number in range(20)]
    assert len(loader) == 20 and loader_threads() == 0


def test_it_reads_ahead_as_far_as_the_queue_has_room() -> None:
    loader = AsyncNumbers(async_loader_queue_size=4, count=100)
    batches = iter(loader)
    assert next(batches)[0] == 0
    deadline = threading.Event()
    # One given out, four in the queue, one in the hand
    while len(loader.read) < 6 and not deadline.wait(0.01):
        pass
    deadline.wait(0.2)
    assert len(loader.read) == 6
    assert [number for number, _ in batches] == list(range(1, 100))


def test_an_iteration_that_is_broken_off_ends_its_thread_and_the_next_epoch_is_whole() -> None:
    loader = AsyncNumbers(async_loader_queue_size=2, count=50)
    for number, _ in loader:
        if number == 3:
            break
    assert loader.closed.wait(20) and loader_threads() == 0
    assert [number for number, _ in loader] == list(range(50))


def test_closing_ends_an_iteration_that_waits_and_the_loader_can_be_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_loader_base, "_JOIN_S", 0.2)  # for a reader that is stuck, as this one is
    loader = AsyncNumbers(async_loader_queue_size=2, count=5)
    loader.gate.clear()
    seen: list[Any] = []
    consumer = threading.Thread(target=lambda: seen.extend(loader))
    consumer.start()
    closing = threading.Thread(target=loader.close_async_loader)
    while loader_threads() == 0:
        threading.Event().wait(0.01)
    closing.start()
    consumer.join(20)
    assert not consumer.is_alive() and seen == []
    loader.gate.set()
    closing.join(20)
    assert len(list(loader)) == 5


def test_closing_finds_a_reading_whose_thread_has_not_started_yet() -> None:
    reading = data_loader_base._Reading(iter([1, 2]), 2)
    reading.end()
    assert reading.next() == ("end", None)
    reading.thread.start()
    reading.thread.join(20)
    assert not reading.thread.is_alive() and reading.read.empty()


def test_an_error_of_the_source_is_raised_at_its_batch() -> None:
    loader = AsyncNumbers(count=9, fails_at=4)
    seen = []
    with pytest.raises(KeyError, match="4"):
        for number, _ in loader:
            seen.append(number)
    assert seen == [0, 1, 2, 3] and loader_threads() == 0


def test_an_exit_of_the_source_is_no_early_end_of_the_epoch() -> None:
    class Leaving(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self) -> Iterator[int]:
            yield 0
            raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        for _ in Leaving():
            pass
    assert loader_threads() == 0


def test_what_a_subclass_must_write_is_said_and_wrong_sizes_are_refused(capsys: Any) -> None:
    with pytest.raises(NotImplementedError, match="_iterate"):
        next(iter(BaseDataLoader()))
    with pytest.raises(NotImplementedError, match="batches"):
        len(BaseDataLoader())
    with pytest.raises(ValueError, match="async_loader_queue_size=-1"):
        AsyncNumbers(async_loader_queue_size=-1, count=1)
    assert len(list(AsyncNumbers(debug_data_loader=True, count=2))) == 2
    assert capsys.readouterr().out.count("hc-loader: waited") == 2
