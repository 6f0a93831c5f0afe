"""One handle, several threads: each gets the result, or is told why not; and a wait that a signal breaks off."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from world import ranks

import horoclone
import horoclone.torch
from horoclone.handles import Waits

KINDS = ["numpy", "torch"]
THREADS = 8


def api(kind: str) -> tuple[Any, Callable[[int], Any]]:
    if kind == "numpy":
        return horoclone, lambda count: np.ones(count, np.float32)
    return horoclone.torch, lambda count: torch.ones(count)


def all_at_once(call: Callable[[], Any]) -> list[Any]:
    """What each of eight threads got: a value or an exception."""
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == THREADS
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_threads_that_wait_for_one_handle_all_get_its_result(kind: str) -> None:
    hvd, ones = api(kind)
    started = {
        "plain": lambda: hvd.allreduce_async(ones(3), op=hvd.Sum, name="shared"),
        "rows": lambda: hvd.allgather_async(ones(3), name="shared"),
        "group": lambda: hvd.grouped_allreduce_async([ones(3), ones(2)], op=hvd.Sum, name="shared"),
    }
    for what, start in started.items():
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(0.5)  # so that all of rank 0's threads are there before it is done
        handle = start()
        for outcome in all_at_once(lambda handle=handle: hvd.synchronize(handle)):
            if isinstance(outcome, RuntimeError) and hvd.rank() == 1:
                assert "another thread" in str(outcome), what
                continue
            assert outcome is not None and not isinstance(outcome, Exception), (what, outcome)
            sums = outcome[0] if what == "group" else outcome
            assert sums.tolist() == ([1.0] * 6 if what == "rows" else [2.0] * 3), what
        assert not isinstance(hvd.allreduce(ones(2)), Exception)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_a_thread_that_comes_after_another_one_is_told_so_and_the_same_one_gets_none(kind: str) -> None:
    hvd, ones = api(kind)
    for start in (lambda: hvd.allreduce_async(ones(3)), lambda: hvd.allgather_async(ones(3))):
        for seconds in (0.0, 0.3):  # waits for it; finds it done
            handle = start()
            time.sleep(seconds)
            assert hvd.synchronize(handle) is not None
            for outcome in all_at_once(lambda handle=handle: hvd.synchronize(handle)):
                assert isinstance(outcome, RuntimeError) and "another thread" in str(outcome), outcome
            assert hvd.synchronize(handle) is None
    assert all(outcome is None for outcome in all_at_once(lambda: hvd.synchronize(123456789)))


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_an_error_reaches_every_thread_that_waits(kind: str) -> None:
    hvd, ones = api(kind)
    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(0.5)
    handle = hvd.allreduce_async(ones(3 + hvd.rank()), name="of different shapes")
    outcomes = all_at_once(lambda: hvd.synchronize(handle))
    if hvd.rank() == 0:
        assert all(isinstance(outcome, horoclone.Mismatch) for outcome in outcomes), outcomes
    assert any(isinstance(outcome, horoclone.Mismatch) for outcome in outcomes)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_a_wait_that_ctrl_c_breaks_off_keeps_the_handle_and_its_memory(kind: str) -> None:
    """The core goes on with the operation: its memory must not go away."""
    hvd, ones = api(kind)
    if hvd.rank() == 1:
        hvd.barrier()
        assert hvd.allgather(ones(2), name="late").tolist() == [1] * 4
        return
    handle = hvd.allgather_async(ones(2), name="late")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
    finally:
        signal.signal(signal.SIGALRM, before)
    hvd.barrier()
    assert hvd.synchronize(handle).tolist() == [1] * 4


def test_where_the_first_is_broken_off_the_next_one_waits() -> None:
    waits, entered, go = Waits(), threading.Event(), threading.Event()
    calls: list[int] = []

    def wait(handle: int) -> str:
        calls.append(handle)
        if len(calls) > 1:
            return "result"
        entered.set()
        go.wait(30)
        raise KeyboardInterrupt

    broken: list[BaseException] = []

    def first() -> None:
        try:
            waits.once(7, wait)
        except KeyboardInterrupt as error:
            broken.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(30)
    results: list[Any] = []
    second = threading.Thread(target=lambda: results.append(waits.once(7, wait)))
    second.start()
    time.sleep(0.2)
    go.set()
    thread.join(30)
    second.join(30)
    assert results == ["result"] and broken and calls == [7, 7]
    assert not waits.under_way(7)
