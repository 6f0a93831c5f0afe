"""Which workers an elastic job starts and lets go: the rules without processes, with a clock of numbers."""

from __future__ import annotations

import math

import pytest

from horoclone.launch.elastic_policy import LEFT_S, STRIKES, Cooldown, Place, Plan, Policy
from horoclone.launch.hosts import Host


def policy(*hosts: tuple[str, int], bounds: tuple[int, int] | None = None, **plan: object) -> Policy:
    one = Policy(Plan(**{"smallest": 1, "largest": None, **plan}), Cooldown(bounds, lambda: 0.5))
    one.found([Host(*host) for host in hosts])
    return one


def begin(one: Policy, worker: int = 0, now: float = 0.0) -> list[Place]:
    places = one.to_start(now)
    for number, place in enumerate(places, worker):
        one.started(number, place)
    return places


def test_every_slot_gets_a_worker_in_the_order_of_hosts() -> None:
    one = policy(("b", 2), ("a", 1))
    assert begin(one) == [Place("b", 0, 0), Place("b", 1, 1), Place("a", 0, 2)]
    assert one.to_start(0) == []


def test_no_more_than_the_largest_size_and_the_spares() -> None:
    assert len(begin(policy(("a", 8), largest=3))) == 3
    assert len(begin(policy(("a", 8), largest=3, spares=2))) == 5


def test_where_a_scheduler_has_no_room_other_places_are_taken() -> None:
    one = policy(("a", 2), ("b", 2), largest=3)
    assert one.to_start(0, {"a": 1, "b": 1}) == [Place("a", 0, 0), Place("b", 0, 2)]
    assert one.to_start(0, {"a": -1, "b": 9}) == [Place("b", 0, 2), Place("b", 1, 3)]
    assert one.to_start(0, {}) == [] and len(one.to_start(0, {"a": 9, "b": 9})) == 3


def test_a_failed_slot_is_used_again_until_it_has_failed_too_often_without_progress() -> None:
    one = policy(("a", 2))
    begin(one)
    for worker in range(10, 10 + STRIKES - 1):
        assert one.failed(0 if worker == 10 else worker - 1, False, 1.0) == ("", [])
        one.started(worker, Place("a", 0, 0))
    text, others = one.failed(10 + STRIKES - 2, False, 2.0)
    assert "slot 0 of host a" in text and others == []
    assert one.to_start(1e9) == [] and one.can_reach_smallest()


def test_a_failure_that_is_judged_later_strikes_the_slot_that_it_was_in() -> None:
    one = policy(("a", 2))
    begin(one)
    for worker in range(10, 10 + STRIKES):
        assert one.failed(0 if worker == 10 else worker - 1, None, 1.0) == ("", [])
        one.started(worker, Place("a", 0, 0))
    for worker in range(10, 10 + STRIKES - 2):
        assert one.judged(worker, False, 2.0) == ("", [])
    assert one.judged(0, False, 2.0) == ("", [])
    text, others = one.judged(10 + STRIKES - 2, False, 2.0)
    assert "slot 0 of host a" in text and others == [10 + STRIKES - 1], "who has come meanwhile goes as well"


def test_progress_forgives() -> None:
    one = policy(("a", 1))
    begin(one)
    for worker in range(50):
        assert one.failed(worker, True, 1.0)[0] == ""
        one.started(worker + 1, Place("a", 0, 0))


def test_a_slot_that_fails_again_and_again_rests_longer_each_time_and_that_is_said_once() -> None:
    one, now, starts, said = policy(("a", 2)), 0.0, 0, []
    begin(one)
    for worker in range(10, 200):
        text, others = one.failed(0 if worker == 10 else worker - 1, None, now)
        assert one.judged(0 if worker == 10 else worker - 1, True, now) == ("", []) and others == []
        said += [text] if text else []
        if not one.to_start(now):
            assert one.closed_hosts(now) == [] and one.can_reach_smallest()
            now = one.next_s(now)
        if now > 300:
            break
        one.started(worker, *one.to_start(now), now)
        starts += 1
        now += 0.5
    assert starts == 11  # after 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60 s
    assert len(said) == 1 and "slot 0 of host a has failed 3 times" in said[0]
    one.started(999, Place("a", 0, 0), now)
    assert one.failed(999, True, now + 11)[0] == "" and one.to_start(now + 11) != [], (
        "it was there for a while"
    )


def test_horovods_rule_closes_the_host_with_the_first_failure() -> None:
    one = policy(("a", 2), ("b", 1), whole_host=True)
    begin(one)
    text, others = one.failed(0, True, 1.0)
    assert text == "host a is not used any more: a worker on it has failed" and others == [1]
    one.done(1)
    assert one.to_start(1e9) == []


def test_a_cooldown_grows_as_horovods_and_is_not_made_longer_while_it_lasts() -> None:
    delays = [Cooldown((2, 100), lambda: 0.5).delay_s(count) for count in (1, 2, 3, 9)]
    assert delays == [5.0, 9.0, 17.0, 100.0] and Cooldown(None).delay_s(1) == math.inf
    one = policy(("a", 2), bounds=(2, 100), whole_host=True)
    begin(one)
    assert one.failed(0, True, 10.0)[1] == [1]
    assert one.failed(1, True, 12.0) == ("", [])
    assert one.next_s(12.0) == 15.0 and one.to_start(14.9) == []
    assert len(begin(one, 2, 15.0)) == 2
    one.failed(2, True, 20.0)
    assert one.next_s(20.0) == 29.0


@pytest.mark.parametrize("bounds", [(0, 5), (1, 3601), (5, 4)])
def test_limits_of_a_cooldown_are_horovods(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="cooldown"):
        Cooldown(bounds)


def test_a_host_that_shrinks_loses_its_highest_slots_and_old_hosts_stay_first() -> None:
    one = policy(("a", 3), ("b", 1))
    begin(one)
    assert one.found([Host("b", 2), Host("a", 1)]) == dict.fromkeys((1, 2), "host a has 1 slot now")
    assert one.to_start(0) == [Place("b", 1, 4)]
    lost = one.found([Host("c", 1), Host("b", 2)])
    assert "host a is not there any more" in lost[0]
    assert [place.host for place in one.to_start(0)] == ["b", "c"]


def test_a_slot_whose_worker_left_rests() -> None:
    one = policy(("a", 2))
    begin(one)
    one.left(1, 5.0)
    assert one.to_start(5 + LEFT_S - 1) == [] and len(one.to_start(5 + LEFT_S)) == 1


def test_whether_enough_slots_are_left() -> None:
    one = policy(("a", 2), smallest=2, whole_host=True)
    begin(one)
    assert one.can_reach_smallest() and not one.all_have_failed()
    one.failed(0, False, 1.0)
    one.done(1)
    assert not one.can_reach_smallest() and one.all_have_failed()


def test_numbers_of_a_place_on_its_host_and_across() -> None:
    one = policy(("a", 2), ("b", 1))
    places = begin(one)
    assert [one.sharing(place) for place in places] == [(2, 0, 2), (2, 0, 1), (1, 1, 2)]


def test_a_host_that_is_about_to_go_gives_its_workers_and_gets_no_other() -> None:
    one = policy(("a", 2), ("b", 1))
    begin(one)
    assert one.going("a", 5.0) == [0, 1]
    one.left(0, 6.0)
    assert one.to_start(6.0) == [] and one.going("a", 30.0) == [1]
    assert one.to_start(30 + LEFT_S - 1) == [] and one.to_start(30 + LEFT_S) == [Place("a", 0, 0)]
    one.left(1, 31.0)
    assert one.can_reach_smallest() and not one.all_have_failed(), "no strike"
    assert one.going("nobody", 0.0) == []


def test_another_machine_of_the_same_name_starts_with_nothing_against_it() -> None:
    one = policy(("a", 1), ("b", 1), whole_host=True)
    begin(one)
    for kind, mark in (("address", "10.0.0.1"), ("machine", "boot 1"), ("address", "10.0.0.1")):
        assert not one.seen_as("a", kind, mark)
    assert not one.seen_as("b", "address", "10.0.0.2")
    one.failed(0, False, 1.0)
    one.found([Host("b", 1)])
    one.found([Host("b", 1), Host("a", 1)])
    assert one.to_start(1e9) == [] and one.closed_hosts(1e9) == ["a"], "the same one stays closed for ever"
    assert not one.seen_as("a", "machine", "boot 1") and one.to_start(1e9) == []
    assert one.seen_as("a", "machine", "boot 2") and one.closed_hosts(2.0) == []
    assert begin(one, 10, 2.0) == [Place("a", 0, 0)]
    one.failed(10, False, 3.0)
    assert not one.seen_as("a", "address", "10.0.0.9"), "the first address of this incarnation"
    assert one.to_start(1e9) == [] and one.seen_as("a", "address", "10.0.0.10")
    assert one.to_start(4.0) == [Place("a", 0, 0)]
