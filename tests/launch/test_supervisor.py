"""The supervisor of elastic jobs over a process backend that starts nothing: what is started and ended, and when."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from horoclone.launch.discovery import Fixed
from horoclone.launch.elastic_options import Elastic
from horoclone.launch.elastic_policy import LEFT_S, Cooldown, Plan
from horoclone.launch.hosts import Host
from horoclone.launch.supervisor import ROOM_IS_KNOWN_S, Supervisor, Worker
from horoclone.membership.records import Loss


class Processes:
    """A ProcessBackend. are_late: processes are announced by the test, and not when they are started."""

    def __init__(self, job: Elastic, are_late: bool = False) -> None:
        self.supervisor = Supervisor(job, self, lambda: None)
        self.are_late = are_late
        self.free: Mapping[str, int] | None = None
        self.started: list[Worker] = []
        self.variables: dict[Worker, dict[str, str]] = {}
        self.killed: list[Worker] = []
        self.dismissed: list[Worker] = []
        self.generations: list[tuple[list[int], bool]] = []
        self.said: list[str] = []
        self.has_failed = False
        self.more: bool | None = None
        self.supervisor.find_hosts()
        self.server = self.supervisor.serve(b"s" * 32, "job", ["127.0.0.1"])

    def start(self, worker: Worker) -> None:
        self.started.append(worker)
        if not self.are_late:
            self.variables[worker] = self.supervisor.announce(worker)

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker)

    def dismiss(self, worker: Worker) -> None:
        self.dismissed.append(worker)

    def room(self, now: float) -> Mapping[str, int] | None:
        return self.free

    def more_hosts_to_come(self) -> bool | None:
        return self.more

    def is_ending(self) -> bool:
        return self.has_failed

    def fail(self, now: float) -> None:
        self.has_failed = True

    def formed(self, number: int, ranks: Sequence[Worker], is_first: bool) -> None:
        self.generations.append(([worker.number for worker in ranks], is_first))

    def named(self, worker: Worker) -> str:
        return f"slot {worker.place.number}"

    def no_room_text(self, limit_s: float) -> str:
        return f"no room for {limit_s:g} s"

    def say(self, text: str) -> None:
        self.said.append(text)

    # --- what the processes do

    def step(self, now: float | None = None) -> None:
        self.supervisor.step(time.monotonic() if now is None else now)

    def come(self, *workers: Worker, seen: int = 0) -> None:
        """They call init()."""
        now, coordinator = time.monotonic(), self.supervisor._service.coordinator
        for worker in workers:
            if not seen:
                coordinator.join(worker.id, b"process%d" % (worker.number % 10), "", worker.place.local, now)
            coordinator.form(worker.id, seen, [], now)
        self.step()

    def end(self, worker: Worker, code: int) -> None:
        self.supervisor.exited(worker, code, f"ended with exit code {code}", time.monotonic())


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Processes] = []

    def processes(
        hosts: Sequence[Host], size: int, plan: Plan, timeout_s: float = 600.0, are_late: bool = False
    ) -> Processes:
        made.append(Processes(Elastic(Fixed(hosts), size, plan, Cooldown(None), timeout_s), are_late))
        return made[-1]

    yield processes
    for one in made:
        one.supervisor.close()
        one.server.close()


def formed(one: Processes) -> list[Worker]:
    """The workers of its first generation."""
    one.step()
    workers = list(one.started)
    one.come(*workers)
    return workers


def test_who_has_the_state_alone_says_why_it_was_to_leave_where_no_host_has_gone(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make([Host("a", 2)], 2, Plan(1, 2))
    formed(one)
    holders: list[SimpleNamespace] = []
    coordinator = one.supervisor._coordinator
    monkeypatch.setattr(coordinator, "last_holders", lambda: holders)
    reason = SimpleNamespace(leave_reason="it was asked to leave")
    monkeypatch.setattr(coordinator, "displace", lambda reasons, now: holders.append(reason))
    one.supervisor._take_hosts([Host("a", 2)], time.monotonic())
    assert one.said[-1].startswith("it was asked to leave, and nobody else has the state of the training")


def test_a_slot_whose_worker_fails_gets_another_one(make: Any) -> None:
    one = make([Host("a", 2), Host("b", 1)], 3, Plan(1, 3))
    workers = formed(one)
    assert one.generations == [([0, 1, 2], True)]
    numbers = [(one.variables[w]["HOROVOD_RANK"], one.variables[w]["HOROVOD_HOSTNAME"]) for w in workers]
    assert numbers == [("0", "a"), ("1", "a"), ("2", "b")]
    one.end(workers[1], 9)
    assert one.said == ["the worker in slot 1 ended with exit code 9; 2 of the job's ranks are left"]
    one.step()
    again = one.started[-1]
    assert (again.number, again.place) == (3, workers[1].place) and not one.has_failed
    one.come(workers[0], workers[2], seen=1)
    one.come(again)
    assert one.supervisor.ranks()[:2] == [workers[0], workers[2]]


def test_when_the_last_one_fails_the_job_ends_with_its_generation(make: Any) -> None:
    one = make([Host("a", 2)], 2, Plan(1, 2))
    first, second = formed(one)
    one.end(first, 1)
    one.end(second, 2)
    assert (
        one.has_failed and one.supervisor.last == [first, second] and one.supervisor.is_over(time.monotonic())
    )


def test_when_one_has_finished_nobody_new_begins_and_the_failure_of_another_is_the_jobs(make: Any) -> None:
    one = make([Host("a", 3)], 2, Plan(1, 2, spares=1))
    one.step()
    first, second, spare = one.started
    one.come(first, second)
    one.supervisor._service.coordinator.step(time.monotonic() + 60)  # they do not wait for the spare for ever
    one.step()
    assert one.generations == [([0, 1], True)]
    one.end(first, 0)
    assert first.has_finished and one.dismissed == [spare]
    one.end(spare, 143)
    one.end(second, 3)
    one.step()
    assert len(one.started) == 3 and one.supervisor.last == [second] and not one.has_failed
    assert one.supervisor.is_over(time.monotonic())


def test_a_failure_that_no_generation_has_made_up_for_is_the_jobs_when_another_finishes(make: Any) -> None:
    """As when it comes a moment later. Where the others have gone on without it, they have done its work."""
    for goes_on in (False, True):
        one = make([Host("a", 2)], 2, Plan(1, 2))
        first, second = formed(one)
        one.end(second, -9)
        if goes_on:
            one.come(first, seen=1)
        one.end(first, 0)
        one.step()
        assert one.supervisor.last == ([] if goes_on else [second]) and not one.has_failed
        assert one.supervisor.is_over(time.monotonic())


def test_all_have_said_that_they_fail_before_the_first_has_ended(make: Any) -> None:
    """The job ends as where each ends at once."""
    one = make([Host("a", 2)], 2, Plan(1, 2))
    first, second = formed(one)
    for rank in (0, 1):
        one.supervisor._service.coordinator.suspect(1, rank, time.monotonic(), Loss.ENDED)
    one.end(first, 1)
    assert one.has_failed and one.supervisor.last == [first, second]


def test_a_process_that_never_calls_init_keeps_nobody_waiting(make: Any) -> None:
    one = make([Host("a", 2)], 2, Plan(2, 2))
    one.step()
    first, second = one.started
    one.end(first, 0)
    one.come(second)
    assert one.has_failed and "had not called init()" in one.supervisor.reason
    assert one.supervisor.ranks() == [first, second]


def test_who_is_announced_late_is_nobodys_business_before(make: Any) -> None:
    """As of Ray's actors, which wait for a CPU: the job begins with those that there is room for."""
    one = make([Host("a", 2), Host("b", 2)], 0, Plan(1, 3), are_late=True)
    one.free = {"b": 2}
    one.step()
    first, second = one.started
    assert [worker.place.host for worker in one.started] == ["b", "b"]
    one.supervisor.announce(first)
    one.supervisor.withdrawn(second, "did not come up", time.monotonic())
    one.supervisor.expect_announced()
    one.come(first)
    assert one.generations == [([0], True)]
    one.free = {"a": 1, "b": 1}
    one.step()
    assert [worker.place.host for worker in one.started[2:]] == ["a"], (
        "where one did not come up it is not tried"
    )
    one.free = {"b": 1}
    one.step(time.monotonic() + LEFT_S + 1)
    assert [worker.place.host for worker in one.started[3:]] == ["b"]
    one.supervisor.announce(one.started[2])
    one.end(first, 0)
    assert one.dismissed == one.started[2:], "whoever has not begun need not, announced or not"


def test_when_all_have_left_and_no_node_has_room_the_job_is_over(make: Any) -> None:
    """Free slots on full nodes start nobody: nothing is waited for."""
    one = make([Host("a", 1), Host("b", 1)], 0, Plan(1, 1), are_late=True)
    one.free = {"a": 1}
    one.step()
    (worker,) = one.started
    one.supervisor.announce(worker)
    one.supervisor.expect_announced()
    one.come(worker)
    one.free = {}
    one.supervisor.host_goes("a", 30.0, time.monotonic())
    one.end(worker, 0)
    one.step()
    now = time.monotonic()
    assert not one.supervisor.is_over(now), "what is free is not known at once"
    assert not one.has_failed and one.supervisor.is_over(now + ROOM_IS_KNOWN_S)
    assert one.supervisor.reason == "every worker has left"


def test_without_a_process_for_too_long_the_job_ends(make: Any) -> None:
    one = make([Host("a", 1)], 0, Plan(1, 1), timeout_s=50.0, are_late=True)
    one.free = {}
    now = time.monotonic()
    one.step(now)
    assert not one.has_failed and one.supervisor.next_s(now) == now + 50
    one.step(now + 50)
    assert one.has_failed and one.supervisor.reason == "no room for 50 s"


def test_a_worker_whose_host_goes_is_ended_when_it_comes_to_no_commit(make: Any) -> None:
    one = make([Host("a", 1), Host("b", 1)], 2, Plan(1, 2))
    first, second = formed(one)
    now = time.monotonic()
    one.supervisor.host_goes("b", 10.0, now)
    one.step(now + 7)
    assert one.killed == []
    one.step(now + 8)
    assert one.killed == [second] and second.dismissed
    one.end(second, -9)
    one.step()
    assert len(one.started) == 2 and not one.has_failed, "the host is about to go: nobody new there"
    assert not first.ended


def test_what_the_coordinator_fences_is_killed_and_what_it_stops_has_failed(make: Any) -> None:
    one = make([Host("a", 2)], 2, Plan(1, 2))
    first, second = formed(one)
    coordinator = one.supervisor._service.coordinator
    coordinator.fenced.append(second.id)
    one.step()
    one.step()
    assert one.killed == [second]
    coordinator.dead(second.id, "its connections ended", time.monotonic(), is_certain=False)
    assert one.supervisor.lost() == {second: "its connections ended"} and one.supervisor.reachable() == {0}
    coordinator.stop(1, "too many resets")
    one.step()
    assert one.has_failed and one.supervisor.reason == "too many resets" and one.supervisor.last == []
    assert not first.ended


@pytest.mark.parametrize("more", [False, None, True])
def test_too_few_slots_end_a_job_to_which_no_host_can_come(more: bool | None, make: Any) -> None:
    one = make([Host("a", 1), Host("b", 1)], 2, Plan(2, 2, whole_host=True))
    one.more = more
    _, second = formed(one)
    one.end(second, 1)
    assert one.has_failed is (more is False)
    assert one.supervisor.reason == ("too few slots are left for --min-np" if more is False else "")


@pytest.mark.parametrize("more", [None, True])
def test_before_the_first_generation_a_closed_slot_is_not_waited_for(more: bool | None, make: Any) -> None:
    one = make([Host("a", 1), Host("b", 1), Host("c", 1)], 3, Plan(1, 3, whole_host=True))
    one.more = more
    one.step()
    first, second, third = one.started
    one.come(first, second)
    one.end(third, 1)
    one.step()
    assert one.generations == ([] if more else [([0, 1], True)])


def test_a_job_that_begins_with_what_there_is_room_for_waits_for_all_of_that(make: Any) -> None:
    one = make([Host("a", 3)], 0, Plan(1, 3))
    one.free = {"a": 2}
    one.step()
    one.free = {}
    first, second = one.started
    one.come(first)
    one.supervisor._service.coordinator.step(time.monotonic() + 60)
    one.step()
    assert one.generations == []
    one.come(second)
    assert one.generations == [([0, 1], True)]
