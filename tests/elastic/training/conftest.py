"""A fake of an elastic job: this process believes that it is a member, and the test says which generation it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from horoclone.elastic import member, notice, run, state
from horoclone.elastic.generation import Generation


@dataclass
class FakeJob:
    """now: what generation() answers. offers: what this process has offered, in order."""

    now: Generation
    offers: list[tuple[int, ...]] = field(default_factory=list)
    leaving: str | None = None
    left: list[str] = field(default_factory=list)
    listeners: list[Callable[[int, int], None]] = field(default_factory=list)

    def becomes(self, number: int, **changes: Any) -> None:
        fields = {"rank": 0, "size": 1, "newcomers": (), "commit_root": 0, "commit": 0, "skip_sync": False}
        self.now = Generation(**{**fields, "dropped_sets": (), **changes, "number": number})


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    job = FakeJob(Generation(1, 0, 1, (0,), 0, 0, False, ()))
    monkeypatch.setattr(member, "is_elastic", lambda: True)
    monkeypatch.setattr(member, "offer_commits", job.offers.append)
    monkeypatch.setattr(member, "start_notices", job.listeners.append)
    monkeypatch.setattr(member, "leave_requested", lambda: job.leaving)
    monkeypatch.setattr(member, "leave", job.left.append)
    monkeypatch.setattr(run, "generation", lambda: job.now)
    monkeypatch.setattr(state, "generation", lambda: job.now)
    monkeypatch.setattr(run, "notification_manager", notice.NoticeBoard())
    return job
