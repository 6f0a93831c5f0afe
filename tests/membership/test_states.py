"""The table of a member's states, and what decide() says in each situation, without processes, sockets or a clock."""

from __future__ import annotations

import pytest

from horoclone.bootstrap.failure_detector import HEARTBEAT_TIMEOUT_S, SUSPECT_TIMEOUT_S, FailureDetector
from horoclone.membership.decision import Decision, JobState, decide
from horoclone.membership.records import Limits, Record
from horoclone.membership.states import LIVE, TRANSITIONS, Drain, Event, Member, State

NOW = 100.0
LIMIT_S = 600.0


class Silent:
    """Of whom nothing was heard for so long, and whom perhaps another one has lost."""

    def __init__(self, index: int, for_s: float, suspected: bool = False) -> None:
        self.member, self.for_s, self.suspected = member(index, State.ACTIVE), for_s, suspected


def member(index: int, state: State, waits_after: int | None = None, **more: object) -> Member:
    more.setdefault("generation", 1 if state in (State.ACTIVE, State.DRAINING) else 0)
    return Member(bytes([index]) * 16, index, f"host{index}", 0, state=state, waits_after=waits_after, **more)  # type: ignore[arg-type]


def job(
    *members: Member | Silent, record: bool = True, since_s: float = NOW, **limits: int | bool | float
) -> JobState:
    """record: those who are in a generation are in number 1, and all of them are connected."""
    detector: FailureDetector[bytes] = FailureDetector()
    silent = {one.member.id: one for one in members if isinstance(one, Silent)}
    members = tuple(one.member if isinstance(one, Silent) else one for one in members)
    for one in members:
        detector.heard(one.id, NOW - (silent[one.id].for_s if one.id in silent else 0.0))
        if one.id in silent and silent[one.id].suspected:
            detector.suspect(one.id)
    made = JobState(
        Limits(**{"size": len(members), **limits}),
        members={one.id: one for one in members},
        detector=detector,
    )  # type: ignore[arg-type]
    made.forming_since_s = since_s
    if record:
        ids = tuple(one.id for one in members if one.state is not State.JOINING)
        numbers = tuple(range(len(ids)))
        made.record, made.voters = Record(1, ids, numbers, numbers, 0, 0, False, b""), ids
    return made


def comes(index: int, *commits: int) -> Member:
    return member(index, State.ACTIVE, 1, commits=commits, has_state=bool(commits), waiting_s=NOW)


def new(index: int) -> Member:
    return member(index, State.JOINING, 0, waiting_s=NOW)


@pytest.mark.parametrize(
    ("known", "members", "fenced", "reason"),
    [
        (job(new(0), new(1), record=False), [0, 1], [], "all who can come are there"),
        (job(new(0), size=2, record=False), [], [], "1 of at least 2 processes are there"),
        (job(new(0), member(1, State.STARTING), size=1, record=False), [], [], "others are being started"),
        (job(comes(0), Silent(1, 1.0)), [], [], "1 of 2 members have not come yet, as host1 (slot 0)"),
        (job(comes(0), Silent(1, SUSPECT_TIMEOUT_S)), [], [], "have not come yet"),
        (job(comes(0), Silent(1, SUSPECT_TIMEOUT_S, suspected=True)), [], [1], "nobody has heard of it"),
        (job(comes(0), Silent(1, HEARTBEAT_TIMEOUT_S)), [], [1], "nobody has heard of it"),
        (job(comes(0), Silent(1, 1.0), since_s=NOW - LIMIT_S), [], [1], "it did not come back"),
        (job(comes(0), member(1, State.DEAD, generation=1)), [0], [], "all who can come are there"),
        (job(comes(0), member(1, State.DEAD, generation=1), smallest=2), [], [], "1 of at least 2 processes"),
        (
            job(comes(0), member(1, State.DEAD, generation=1), new(2), smallest=2),
            [0, 2],
            [],
            "all who can come",
        ),
        (job(comes(0), new(1), new(2), largest=2), [0, 1], [], "all who can come are there"),
        (job(comes(0), member(1, State.DRAINING)), [0], [], "all who can come are there"),
        (
            job(comes(0), Silent(1, 60), Silent(2, 60), majority=True),
            [],
            [],
            "1 of 3 members are no majority",
        ),
        (job(comes(0), comes(1), Silent(2, 60), majority=True), [], [2], "nobody has heard of it"),
        (job(comes(0), Silent(1, 60), majority=True), [], [1], "nobody has heard of it"),
        (job(comes(1), member(0, State.FENCED, generation=1), majority=True), [1], [], "all who can come"),
    ],
)
def test_the_decision_and_its_reason(
    known: JobState, members: list[int], fenced: list[int], reason: str
) -> None:
    decision = decide(known, NOW)
    assert [one.index for one in decision.members] == members
    assert [one.index for one in decision.fenced] == fenced
    assert reason in decision.reason and decision.stop is None, decision


@pytest.mark.parametrize(
    ("known", "code", "text"),
    [
        (
            job(new(0), size=2, smallest=2, record=False, since_s=NOW - LIMIT_S),
            1,
            "1 of at least 2 processes",
        ),
        (
            job(comes(1), member(0, State.FENCED, generation=1), majority=True, since_s=NOW - LIMIT_S),
            None,
            "",
        ),
        (job(member(0, State.DEAD, generation=1), new(1)), 1, "nobody is left of those who had the state"),
        (job(comes(0), resets=0), 1, "exceeded limit: 0"),
    ],
)
def test_when_the_job_ends(known: JobState, code: int | None, text: str) -> None:
    decision = decide(known, NOW)
    assert (decision.stop and decision.stop.code) == code and text in decision.reason, decision


def test_a_decision_changes_nothing() -> None:
    known = job(comes(0), Silent(1, HEARTBEAT_TIMEOUT_S), new(2))
    before = repr(known)
    assert isinstance(decide(known, NOW), Decision) and repr(known) == before


def test_who_is_gone_never_comes_back() -> None:
    over = [state for state in State if state not in LIVE]
    assert {(one, to) for (one, _), to in TRANSITIONS.items() if one in over} == {(State.FENCED, State.DEAD)}
    for state in LIVE:
        assert TRANSITIONS[state, Event.DRAINED] is State.DRAINING, state
        assert TRANSITIONS[state, Event.LEAVES] is State.LEFT, state
        assert TRANSITIONS[state, Event.LOST] is State.FENCED, state
        assert TRANSITIONS[state, Event.ENDED] is State.DEAD, state


@pytest.mark.parametrize("state", [State.STARTING, State.JOINING, State.ACTIVE])
def test_whose_host_is_named_again_is_what_it_was(state: State) -> None:
    one = member(0, state, 0 if state is State.JOINING else None)
    one.to_drain(Drain.DISPLACED, "host0 is gone")
    assert one.state is State.DRAINING and one.planned_end() == "host0 is gone"
    one.recall()
    assert one.state is state and not one.leave_reason


def test_whose_host_was_closed_leaves_though_it_is_named_again() -> None:
    one = member(0, State.ACTIVE)
    one.to_drain(Drain.UNWANTED, "a process failed there")
    one.to_drain(Drain.DISPLACED, "host0 is gone")
    one.recall()
    assert one.state is State.DRAINING and one.leave_reason == "a process failed there"
