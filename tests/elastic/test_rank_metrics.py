"""What a view of an elastic job sees: generations, and who is in the newest."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from horoclone.live import job

pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")


def test_a_view_follows_the_generations(elastic: Any) -> None:
    run = elastic(["-np", 3, "--min-np", 1], steps=60)
    first = run.whole(1)
    run.step(5)
    view = job.of_process(run.started.process.pid)[0]
    assert {one.rank: one.pid for one in view.ranks()} == first
    os.kill(first[1], signal.SIGKILL)
    again = run.of_size(3, after=1)

    def seen() -> bool:
        ranks = view.ranks()
        return {one.rank: one.pid for one in ranks} == again and len({one.generation for one in ranks}) == 1

    run.wait(seen, "the metrics of the newest generation")
    events = view.events()
    assert [event.kind for event in events if event.kind != "stall"][:2] == ["member", "loss"]
    assert sum(event.kind == "member" for event in events) >= 2
    assert any(event.kind == "loss" and "SIGKILL" in event.text for event in events)
    run.finish()
    assert view.ranks() == []
