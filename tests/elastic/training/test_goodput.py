"""What an elastic job says of its time: work done again, recoveries, newcomers, commits; the rest was training.

What whole jobs say is in test_jobs.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from horoclone.elastic import recovery
from horoclone.live import rank_metrics


def test_a_job_of_a_fixed_size_says_nothing_of_it(launch: Any) -> None:
    done = launch(["horoclonerun", "-np", "2", "true"], timeout_s=30)
    assert done.returncode == 0 and "goodput" not in done.output


def test_each_second_is_counted_for_one_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    shown: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(recovery.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recovery.shared_metrics, "note_elastic", lambda *one: shown.append(one))
    lost = recovery._Lost()
    committed = 0.0

    def after(seconds: float, do: Callable[[], None]) -> list[int]:
        now[0] += seconds
        do()
        return shown[-1][1] if shown else []

    assert after(7, lost.resumed) == [0, 0, 0, 0, 0], "what was before it trained is not its time"
    assert after(3, lambda: lost.saved(0.5)) == [0, 0, 0, 500, 0]
    committed = now[0]
    after(2, lambda: lost.interrupted(True, committed))
    assert after(1, lost.resumed) == [2000, 1000, 0, 500, 0]
    after(4, lambda: lost.interrupted(True, committed))  # before another commit
    after(1, lambda: lost.interrupted(True, committed))  # and again, before training went on
    assert after(1, lost.resumed) == [6000, 3000, 0, 500, 0]
    after(5, lambda: lost.interrupted(False, committed))
    assert after(0.25, lost.resumed) == [6000, 3000, 250, 500, 0]
    after(1, lambda: lost.interrupted(False, committed))
    after(1, lambda: lost.interrupted(True, committed))  # a loss while others join
    assert after(1, lost.resumed) == [6000, 5000, 250, 500, 0]


def test_what_a_rank_has_written_is_read_with_what_its_core_counts() -> None:
    block = bytearray(
        rank_metrics.initial(
            rank_metrics.Origin(0, 1, 0, "here", "it", rank_metrics.ProcessIdentity(1, 1, 1))
        )
    )
    block += bytes(rank_metrics.BYTES - len(block))
    assert rank_metrics.decode(bytes(block), time.time()).goodput is None
    now = time.time()
    at, content = rank_metrics.elastic_at(0, int((now - 20) * 1e9), [1000, 2000, 500, 250, 2**40])
    block[at : at + len(content)] = content
    found = rank_metrics.decode(bytes(block), now).goodput
    assert found is not None and found.whole_seconds == pytest.approx(20, abs=0.01)
    assert (found.redone_seconds, found.recovering_seconds, found.joining_seconds) == (1, 2, 0.5)
    assert found.share == 0, "more was lost than there was: a clock was set"
    at, content = rank_metrics.elastic_at(0, int((now - 20) * 1e9), [1000, 2000, 500, 250, 250])
    block[at : at + len(content)] = content
    found = rank_metrics.decode(bytes(block), now).goodput
    assert found is not None and found.share == pytest.approx(0.8, abs=0.01)
