"""The state machine of elastic membership: rules one by one, and thousands of random lives of a job."""

from __future__ import annotations

import random

import pytest

from horoclone.bootstrap import failure_detector
from horoclone.membership import records, states, timeouts
from horoclone.membership.coordinator import Coordinator, JoinRejected
from horoclone.membership.records import ADDED, REMOVED, Evicted, Limits, Loss, Record, Stop


def name(number: int) -> bytes:
    return number.to_bytes(records.ID_BYTES, "little")


def job(count: int, **limits: object) -> Coordinator:
    """A coordinator with `count` members that have joined."""
    one = Coordinator(Limits(**{"size": count, **limits}), lambda size: bytes(size))
    for number in range(count):
        come(one, number)
    return one


def come(one: Coordinator, number: int, now: float = 0.0) -> None:
    one.start(name(number), "host", number, now)
    one.join(name(number), b"i%d" % number, "host", number, now)


def formed(
    one: Coordinator, numbers: list[int], seen: int, now: float = 0.0, commits: tuple[int, ...] = ()
) -> Record:
    """They all call form(); the record that every one of them is told."""
    for number in numbers:
        one.form(name(number), seen, commits, now)
    answers = [one.answer(name(number)) for number in numbers]
    assert isinstance(answers[0], Record) and all(answer is answers[0] for answer in answers), answers
    return answers[0]


def test_a_member_has_progressed_once_a_commit_was_made_with_it() -> None:
    """Who is refused in each synchronisation has not, whatever the others did before and after."""
    one = job(2)
    formed(one, [0, 1], 0)
    one.holds(name(1), 7)
    assert one.has_progressed(name(1), 0.0, 1.0)
    come(one, 2)
    assert not one.has_progressed(name(2), 0.0, 1.0), "it waits at the door"
    one.form(name(2), 0, (), 2)
    formed(one, [0, 1], 1, 2, (8, 9))
    one.holds(name(2), 0)
    one.holds(name(0), 9)
    assert not one.has_progressed(name(2), 2.0, 3.0)
    one.dead(name(2), "it was refused", 3)
    formed(one, [0, 1], 2, 3, (8, 9))
    assert not one.has_progressed(name(2), 2.0, 3.0)
    come(one, 3, 4)
    one.form(name(3), 0, (), 4)
    formed(one, [0, 1], 3, 4, (9, 10))
    one.holds(name(0), 11)
    assert one.has_progressed(name(3), 4.0, 5.0) and one.has_progressed(
        name(2), 2.0, 2.0 + timeouts.PROGRESS_S
    )


def test_what_became_of_a_member_is_known_once_the_others_form_the_next_generation() -> None:
    """Commits of ranks that train are heard of once a second at most: a second too late for who is killed at once."""
    one = job(3)
    formed(one, [0, 1, 2], 0)
    one.dead(name(2), "it was killed", 1)
    assert not one.is_told(name(2)) and not one.has_progressed(name(2), 0.0, 1.0), (
        "nobody has said a word yet"
    )
    formed(one, [0, 1], 1, 2, (5,))
    assert one.is_told(name(2)) and one.has_progressed(name(2), 0.0, 1.0)
    one.dead(name(1), "it was killed as well", 3)
    assert not one.is_told(name(1))
    one.dead(name(0), "and so was the last one", 3)
    assert one.is_told(name(1)), "nobody is left who could say more"


def test_a_plan_says_which_rank_is_whose_whoever_starts_them_first() -> None:
    """Workers of one host have neighbouring ranks, in the order of their slots, as Horovod's driver plans them."""
    one = Coordinator(Limits(3), lambda size: bytes(size))
    for number, rank in ((0, 2), (1, 0), (2, 1)):
        one.start(name(number), "host", number, 0, planned=rank)
        one.join(name(number), b"i%d" % number, "host", number, 0)
    assert formed(one, [0, 1, 2], 0).members == (name(1), name(2), name(0))


def test_nobody_is_interrupted_for_a_worker_that_has_not_come_to_init() -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    one.start(name(2), "host", 2, 1)
    one.step(2)
    assert one.notice().seq == 0
    one.join(name(2), b"x", "host", 2, 2)
    one.step(3)
    assert one.notice().seq == 0
    one.form(name(2), 0, (), 4)
    assert one.notice() == (1, 2, ADDED) and one.answer(name(2)) is None
    record = formed(one, [1, 0], 1, 5)
    assert record.members == (name(0), name(1), name(2)) and record.newcomers == (2,) and not record.skip_sync


def test_a_process_that_joins_waits_for_those_that_start_with_it_but_not_long() -> None:
    one = job(1)
    formed(one, [0], 0)
    come(one, 1, 1)
    come(one, 2, 1)
    one.form(name(1), 0, (), 10)
    assert one.notice().seq == 0 and one.next_s() == 10 + timeouts.TOGETHER_S
    one.step(one.next_s())
    assert one.notice().update == ADDED


def test_nobody_is_interrupted_for_a_newcomer_that_is_still_being_given_the_state() -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    one.holds(name(0), 5)
    come(one, 2)
    one.form(name(2), 0, (), 3, is_ready=False)
    assert one.notice().seq == 0 and one.next_s() == float("inf")
    one.dead(name(1), "killed", 4)
    assert formed(one, [0], 1, 5, (5, 6)).members == (name(0),), "nor do survivors wait for it"
    one.form(name(2), 0, (), 6, is_ready=True)
    assert one.notice().update == ADDED
    assert formed(one, [0], 2, 7, (6, 7)).members == (name(0), name(2))


def test_a_newcomer_that_is_ready_waits_a_little_for_one_that_is_not() -> None:
    one = job(1)
    formed(one, [0], 0)
    one.holds(name(0), 5)
    for number in (1, 2):
        come(one, number, 1)
        one.form(name(number), 0, (), 1, is_ready=False)
    one.form(name(1), 0, (), 10, is_ready=True)
    assert one.notice().seq == 0 and one.next_s() == 10 + timeouts.TOGETHER_S
    one.form(name(2), 0, (), 11, is_ready=True)
    assert one.notice().update == ADDED


def test_where_there_are_too_few_a_newcomer_comes_in_as_it_is() -> None:
    one = job(2, smallest=2)
    formed(one, [0, 1], 0)
    one.holds(name(0), 5)
    one.dead(name(1), "killed", 1)
    come(one, 2, 2)
    one.form(name(2), 0, (), 2, is_ready=False)
    assert formed(one, [0], 1, 3, (5,)).members == (name(0), name(2))


def test_whoever_is_over_the_largest_size_waits_until_there_is_room() -> None:
    one = job(2, largest=2)
    formed(one, [0, 1], 0)
    come(one, 2)
    one.form(name(2), 0, (), 1)
    assert one.notice().seq == 0 and one.answer(name(2)) is None
    one.dead(name(0), "killed", 2)
    assert one.notice().update == ADDED
    record = formed(one, [1], 1, 3)
    assert one.answer(name(2)) is record and record.members == (name(1), name(2))


def test_the_first_generation_may_be_smaller_when_time_is_over() -> None:
    one = job(3, smallest=2, timeout_s=60.0)
    one.form(name(0), 0, (), 0)
    one.form(name(2), 0, (), 5)
    one.step(60)
    record = one.answer(name(0))
    assert isinstance(record, Record) and record.members == (name(0), name(2))


def test_sync_is_skipped_only_when_all_hold_the_same_newest_commit_and_nobody_is_new() -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    assert formed(one, [0, 1], 1, commits=(6, 7)).skip_sync
    one.form(name(0), 2, (7, 8), 0)
    one.form(name(1), 2, (7,), 0)
    record = one.answer(name(0))
    assert isinstance(record, Record) and record.commit == 7 and not record.skip_sync
    one.form(name(0), 3, (9,), 0)
    one.form(name(1), 3, (10,), 0)
    record = one.answer(name(1))
    assert isinstance(record, Record) and (record.commit, record.commit_root, record.skip_sync) == (
        0,
        1,
        False,
    )


def test_a_member_that_was_given_up_is_refused() -> None:
    one = job(3)
    formed(one, [0, 1, 2], 0)
    one.suspect(1, 2, 1.0)
    one.form(name(0), 1, (), 2)
    one.form(name(1), 1, (), 2)
    assert one.answer(name(0)) is None
    one.step(failure_detector.SUSPECT_TIMEOUT_S + 1)
    assert one.fenced == [name(2)]
    assert isinstance(one.answer(name(0)), Record)
    one.form(name(2), 1, (), 9)
    answer = one.answer(name(2))
    assert isinstance(answer, Evicted) and answer.code == states.NO_MEMBER


def two_hosts() -> Coordinator:
    """Members 0 and 1 on the first, 2 and 3 on the second, in generation 1; heard at second 10."""
    one = Coordinator(Limits(4), lambda size: bytes(size))
    for number in range(4):
        one.start(name(number), f"host-{number // 2}", number, 0)
        one.join(name(number), b"i", f"host-{number // 2}", number, 0)
    formed(one, [0, 1, 2, 3], 0)
    for number in range(4):
        one.heard(name(number), 10)
    return one


def lose(one: Coordinator, rank: int, now: float) -> None:
    """Members 0 and 1 do not hear this one any more."""
    one.detector.runs(now)
    one.suspect(1, rank, now, Loss.SILENT)
    one.form(name(0), 1, (), now)
    one.form(name(1), 1, (), now)


def test_a_process_whose_end_its_host_has_told_is_not_waited_for_though_its_connection_is_open() -> None:
    one = two_hosts()
    one.suspect(1, 3, 10.1, Loss.ENDED)
    for rank in range(3):
        one.form(name(rank), 1, (), 10.1)
    assert isinstance(one.answer(name(0)), Record)
    assert one.members[name(3)].state is states.State.DEAD and not one.fenced


def test_a_host_that_is_silent_to_others_and_to_the_coordinator_is_lost_at_once() -> None:
    one = two_hosts()
    lose(one, 2, 12.1)
    assert one.in_question() == {name(2), name(3)} and one.answer(name(0)) is None
    for tenth in range(122, 125):
        one.detector.runs(tenth / 10)
        one.step(tenth / 10)
        assert bool(one.fenced) == (tenth / 10 >= 12.1 + failure_detector.ANSWER_S)
    assert one.fenced == [name(2), name(3)] and isinstance(one.answer(name(0)), Record)


def test_a_host_whose_member_answers_the_coordinator_is_waited_for() -> None:
    one = two_hosts()
    lose(one, 2, 12.1)
    one.heard(name(2), 12.2)
    assert not one.in_question()
    one.detector.runs(14.9)
    one.step(14.9)
    assert not one.fenced and one.answer(name(0)) is None


def test_a_coordinator_that_was_stopped_itself_gives_time_to_answer() -> None:
    one = two_hosts()
    lose(one, 2, 12.1)
    one.detector.runs(12.2)
    one.detector.runs(20)  # stopped in between
    one.step(20)
    assert not one.fenced
    one.heard(name(2), 20.05)  # what had come meanwhile
    one.step(20.05)
    one.heard(name(3), 20.06)
    one.form(name(2), 1, (), 20.1)
    one.form(name(3), 1, (), 20.1)
    record = one.answer(name(0))
    assert isinstance(record, Record) and len(record.members) == 4


def test_one_that_others_have_lost_and_that_speaks_is_not_given_up() -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    one.suspect(1, 1, 1)
    one.form(name(0), 1, (), 2)
    one.heard(name(1), 4)
    one.step(6)
    assert one.answer(name(0)) is None
    assert formed(one, [1], 1, 7).members == (name(0), name(1))


def test_two_processes_of_one_name_and_unknown_ones_are_refused() -> None:
    one = job(1)
    with pytest.raises(JoinRejected, match="two processes"):
        one.join(name(0), b"another", "host", 0, 0)
    with pytest.raises(JoinRejected, match="another job"):
        one.join(name(9), b"x", "host", 0, 0)
    one.open_to_all = True
    assert one.join(name(9), b"x", "another", 0, 0) == 1


def test_whoever_comes_to_a_place_replaces_who_was_there_before_unless_that_one_lives() -> None:
    one = job(2, majority=True)
    one.open_to_all = True
    formed(one, [0, 1], 0)
    one.established(1)
    with pytest.raises(
        JoinRejected, match=r"another process is host \(number 0\) in this job, and it is alive"
    ):
        one.join(name(8), b"x", "host", 0, 1)
    one.disconnected(name(0), 2)
    one.join(name(8), b"x", "host", 0, 2)
    assert one.members[name(0)].gone and one.has_ended(name(0))
    one.form(name(8), 0, (), 2)
    assert one.answer(name(8)) is None
    one.form(name(1), 1, (), 2)
    record = one.answer(name(1))
    assert isinstance(record, Record) and record.members == (name(1), name(8)), (
        "half of two, and the other is dead"
    )


def test_the_limit_of_resets_is_horovods() -> None:
    one = job(2, resets=1)
    formed(one, [0, 1], 0)
    formed(one, [0, 1], 1)
    one.form(name(0), 2, (), 0)
    one.form(name(1), 2, (), 0)
    answer = one.answer(name(0))
    assert answer == Stop(
        1, "Horovod was shutdown because number of resets during elastic job exceeded limit: 1"
    )


def test_when_one_has_finished_the_others_go_on_however_few_and_nobody_new_begins() -> None:
    one = job(3, smallest=3)
    formed(one, [0, 1, 2], 0)
    come(one, 3)
    one.finish(1)
    one.dead(name(0), "exit code 0", 1)
    one.form(name(3), 0, (), 1)
    assert isinstance(one.answer(name(3)), Evicted)
    assert formed(one, [1, 2], 1, 2).members == (name(1), name(2))


@pytest.mark.parametrize("is_first", [False, True])
def test_who_is_lost_from_a_generation_in_which_others_have_finished_has_not_finished(is_first: bool) -> None:
    one = job(3)
    formed(one, [0, 1, 2], 0)
    if is_first:
        one.dead(name(2), "it failed: no space", 1)
        come(one, 3, 1)
        one.form(name(3), 0, (), 1)
    one.finished(name(0), 2)
    if not is_first:
        assert one.stopped is None
        come(one, 3, 2)
        one.form(name(3), 0, (), 2)
        assert one.answer(name(3)) == Evicted(0, "the job is done")
        one.dead(name(2), "it failed: no space", 3)
    text = "host, slot 2: rank 2 had not finished when others had: it failed: no space"
    assert one.stopped == one.answer(name(3)) == Stop(1, text)


def test_others_finish_without_those_who_were_lost_before_or_have_left_as_asked() -> None:
    one = job(4)
    formed(one, [0, 1, 2, 3], 0)
    one.dead(name(0), "killed", 1)
    come(one, 4, 1)
    formed(one, [1, 2, 3], 1, 1)
    one.leave(name(3), "SIGTERM", 2)
    assert not one.finishing
    one.finished(name(1), 3)
    one.form(name(4), 0, (), 3)
    assert one.answer(name(4)) == Evicted(0, "the job is done") and one.stopped is None
    assert formed(one, [2], 2, 4).members == (name(2),), "nobody waits for who has finished and stays"
    one.finished(name(2), 5)
    one.disconnected(name(1), 6)
    assert one.stopped is None and not one.live()


def test_a_process_of_another_build_is_refused_with_both_names() -> None:
    one = job(0, size=2)
    for number, build in enumerate(["0.1.0+aa", "0.1.0+bb", "", "0.1.0+aa"]):
        one.start(name(number), "host", number, 0)
        if build == "0.1.0+aa":
            one.join(name(number), b"x", "host", number, 0, build)
        else:
            with pytest.raises(
                JoinRejected, match=r"it is horoclone (0.1.0\+bb|of an unk.*n), and .* horoclone 0.1.0\+aa"
            ):
                one.join(name(number), b"x", "host", number, 0, build)
    assert [one.detector.is_connected(name(number)) for number in range(4)] == [True, False, False, True]


@pytest.mark.parametrize("end", ["dead", "leave", "silent"])
def test_newcomers_do_not_begin_anew_when_nobody_is_left_of_those_who_had_the_state(end: str) -> None:
    one = job(2, largest=2)
    formed(one, [0, 1], 0, commits=())
    come(one, 2)
    one.form(name(2), 0, (), 1)
    one.dead(name(0), "killed", 2)
    one.suspect(1, 1, 2)
    if end == "silent":
        one.form(name(1), 1, (3,), 2.0)  # it asks for the next one, which is formed, and is heard of no more
        assert isinstance(record := one.answer(name(1)), Record) and record.members == (name(1), name(2))
        one.dead(name(2), "killed", 3)
        come(one, 3, 3)
        one.form(name(3), 0, (), 3)
        one.dead(name(1), "killed", 4)
        asks = 3
    else:
        getattr(one, end)(name(1), "it goes", 3)
        asks = 2
    answer = one.answer(name(asks))
    assert (
        isinstance(answer, Stop) and answer.code == 1 and "who had the state of the training" in answer.text
    )


@pytest.mark.parametrize("finishing", [False, True])
def test_who_came_and_was_never_synchronised_does_not_begin_anew_alone(finishing: bool) -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    one.dead(name(1), "killed", 1)
    come(one, 2)
    one.form(name(2), 0, (), 1)
    one.form(name(0), 1, (17, 18), 1)
    assert isinstance(record := one.answer(name(2)), Record) and record.members == (name(0), name(2))
    if finishing:
        one.finish(2)
    one.dead(name(0), "exit code", 2)
    one.form(name(2), 2, (), 2)
    answer = one.answer(name(2))
    if finishing:
        assert answer == Evicted(0, "the job is done")
    else:
        assert isinstance(answer, Stop) and "who had the state of the training" in answer.text


def test_survivors_do_not_wait_for_a_newcomer_that_was_not_synchronised_and_it_comes_again() -> None:
    one = job(3)
    formed(one, [0, 1, 2], 0)
    one.dead(name(2), "killed", 1)
    come(one, 3)
    one.form(name(3), 0, (), 1)
    one.form(name(0), 1, (7, 8), 1)
    one.form(name(1), 1, (7, 8), 1)
    record = one.answer(name(3))
    assert isinstance(record, Record) and record.newcomers == (2,)
    one.dead(name(1), "killed in sync", 2)
    one.form(name(0), 2, (7, 8), 2)
    assert one.answer(name(0)) is None and one.next_s() == pytest.approx(2 + timeouts.UNSYNCHRONISED_S)
    one.step(one.next_s())
    third = one.answer(name(0))
    assert isinstance(third, Record) and third.members == (name(0),) and third.skip_sync and third.commit == 8
    one.form(name(3), 2, (), 5)  # it has built its model, and found its peers gone
    assert one.answer(name(3)) is None and one.notice().wanted == 4
    fourth = formed(one, [0], 3, 6, (9, 10))
    assert (
        fourth.members == (name(0), name(3)) and one.answer(name(3)) is fourth and fourth.previous == (0, -1)
    )


@pytest.mark.parametrize("commits", [(8, 9), ()])
def test_survivors_wait_for_a_newcomer_that_was_synchronised(commits: tuple[int, ...]) -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    one.dead(name(1), "killed", 1)
    come(one, 3)
    one.form(name(3), 0, (), 1)
    one.form(name(0), 1, (7, 8), 1)
    assert isinstance(one.answer(name(3)), Record)
    one.form(name(0), 2, commits, 2)
    one.step(4)
    assert one.answer(name(0)) is None
    one.form(name(3), 2, commits, 5)
    third = one.answer(name(0))
    assert isinstance(third, Record) == bool(commits)


def test_without_any_commit_whoever_is_left_goes_on() -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    come(one, 2)
    one.form(name(2), 0, (), 1)
    one.form(name(0), 1, (), 1)
    one.form(name(1), 1, (), 1)
    one.dead(name(0), "killed", 2)
    one.dead(name(1), "killed", 2)
    assert formed(one, [2], 2, 3).members == (name(2),)


def test_who_is_to_leave_keeps_its_generation_until_it_has_left() -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    one.drain_all(dict.fromkeys([name(0), name(1)], "host a is not there any more"), 1)
    come(one, 2)
    one.form(name(2), 0, (), 2)
    assert one.answer(name(2)) is None and one.record is not None and one.record.number == 1


def test_those_who_are_to_leave_stay_until_others_have_the_state() -> None:
    one = job(2)
    formed(one, [0, 1], 0)
    one.holds(name(0), 5)
    one.holds(name(1), 5)
    come(one, 2, 1)  # somebody is being started
    one.announce(name(0), "SIGTERM", 1)
    one.announce(name(1), "SIGTERM", 1)
    assert one.is_handing_over()
    formed(one, [0, 1], 1, 2, (5,))
    one.form(name(2), 0, (), 3)
    assert one.notice().update == ADDED | REMOVED and one.notice().wanted == 3
    record = formed(one, [0, 1], 2, 4, (6,))
    assert record.members == (name(0), name(1), name(2)) and record.commit == 6
    seq = one.notice().seq
    one.step(5)
    assert one.is_handing_over() and one.notice().seq == seq, "the newcomer has not got it yet"
    assert one.holds(name(2), 7) and not one.holds(name(2), 7)
    one.step(6)
    assert one.notice().update == REMOVED and one.notice().wanted == 4 and not one.is_handing_over()
    for number in (0, 1):
        one.form(name(number), 3, (7,), 7)
        assert one.answer(name(number)) == Evicted(0, "SIGTERM")
    assert formed(one, [2], 3, 8, (7,)).members == (name(2),)


def test_a_handover_needs_no_more_places_than_there_are() -> None:
    one = job(2, largest=2)
    formed(one, [0, 1], 0)
    one.holds(name(0), 5)
    for number in (2, 3):
        come(one, number, 1)
        one.form(name(number), 0, (), 1)
    one.displace({name(0): "host a is gone", name(1): "host a is gone"}, 1)
    one.form(name(0), 1, (5,), 2)
    one.form(name(1), 1, (5,), 2)
    assert one.record is not None and one.record.members == (name(0), name(2))
    assert one.answer(name(1)) == Evicted(0, "host a is gone")
    one.holds(name(2), 6)
    one.form(name(0), 2, (6,), 3)
    assert one.answer(name(0)) == Evicted(0, "host a is gone")
    assert formed(one, [2], 2, 3, (6,)).members == (name(2), name(3))


def test_where_nobody_comes_those_who_are_asked_leave_and_the_displaced_wait() -> None:
    one = job(2, timeout_s=60)
    formed(one, [0, 1], 0)
    one.holds(name(0), 5)
    one.announce(name(0), "SIGTERM", 1)
    one.announce(name(1), "SIGTERM", 1)
    assert not one.is_handing_over() and one.notice().update == REMOVED
    one = job(2, timeout_s=60)
    formed(one, [0, 1], 0)
    one.holds(name(0), 5)
    gone = {name(0): "host a is gone", name(1): "host a is gone"}
    one.displace(gone, 1)
    assert one.is_handing_over() and one.notice().update == 0 and one.next_s() == 61
    one.displace(dict.fromkeys(gone, ""), 30)
    one.step(70)
    assert one.stopped is None and not one.is_handing_over()
    one.displace(gone, 100)
    one.step(160)
    assert one.stopped is not None and "for 60 s nobody came" in one.stopped.text


def test_the_first_generation_waits_a_while_for_all_who_are_being_started() -> None:
    one = Coordinator(Limits(2, 1, 4), lambda size: bytes(size))
    for number in range(4):
        come(one, number)
    one.form(name(3), 0, (), 1)
    one.form(name(1), 0, (), 2)
    assert one.record is None and one.next_s() == 2 + timeouts.FIRST_GENERATION_S
    one.dead(name(0), "killed", 3)
    assert one.record is None
    one.form(name(2), 0, (), 4)
    assert one.record is not None and one.record.members == (name(1), name(2), name(3))
    one = Coordinator(Limits(2, 1, 4), lambda size: bytes(size))
    for number in range(4):
        come(one, number)
    for number in (3, 1):
        one.form(name(number), 0, (), 2)
    one.step(2 + timeouts.FIRST_GENERATION_S)
    assert one.record is not None and one.record.members == (name(1), name(3))


def test_who_is_to_leave_before_it_has_come_is_not_waited_for() -> None:
    one = Coordinator(Limits(1, 1, 2), lambda size: bytes(size))
    come(one, 0)
    come(one, 1)
    one.form(name(0), 0, (), 1)
    assert one.record is None and "others are being started" in one.reason
    one.drain_all({name(1): "its host is closed"}, 2)
    assert one.record is not None and one.record.members == (name(0),)


def test_no_more_can_come_to_the_first_generation_than_is_said() -> None:
    one = job(3, smallest=2)
    one.form(name(0), 0, (), 1)
    one.form(name(1), 0, (), 1)
    assert one.record is None
    one.dead(name(2), "exit code 3", 1)
    one.expect(2, "", 2)
    assert one.record is not None and one.record.members == (name(0), name(1))
    one = job(2)
    one.form(name(0), 0, (), 1)
    one.dead(name(1), "exit code 0", 1)
    one.limits = one.limits._replace(smallest=2)
    one.expect(1, "the others have returned", 2)
    assert one.answer(name(0)) == Stop(1, "1 of at least 2 processes are left: the others have returned")


def test_where_a_failure_closes_a_host_the_others_there_leave_in_the_same_generation() -> None:
    one = Coordinator(Limits(4), lambda size: bytes(size), whole_hosts=True)
    for number in range(4):
        one.start(name(number), f"host{number // 2}", number % 2, 0)
        one.join(name(number), b"i%d" % number, f"host{number // 2}", number % 2, 0)
    formed(one, [0, 1, 2, 3], 0)
    for number in (1, 2, 3):
        one.form(name(number), 1, (4,), 1)
    one.suspect(1, 0, 1)
    one.disconnected(name(0), 1)
    assert one.record is not None and one.record.members == (name(2), name(3)) and one.record.number == 2
    assert isinstance(one.answer(name(1)), Evicted)


class Life:
    """A random life: processes as the coordinator would meet them, each in one of the states out, running, waiting, ended."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        size = self.random.randint(1, 5)
        smallest = self.random.randint(1, size)
        largest = self.random.choice([None, size, size + 2])
        self.now = 0.0
        self.coordinator = Coordinator(
            Limits(size, smallest, largest, self.random.choice([20.0, 600.0])), self.random.randbytes
        )
        self.seen: dict[int, int] = {}  # process -> number of the newest generation that it knows
        self.waiting: set[int] = set()
        self.alive: set[int] = set()
        self.stuck: set[int] = set()
        self.asked_again: set[int] = set()
        self.records: dict[int, Record] = {}
        self.commits: dict[int, list[int]] = {}
        for _ in range(size):
            self.begin()

    def begin(self) -> None:
        number = len(self.seen)
        come(self.coordinator, number, self.now)
        self.seen[number], self.commits[number] = 0, []
        self.alive.add(number)

    def form(self, number: int) -> None:
        self.waiting.add(number)
        self.coordinator.form(name(number), self.seen[number], self.commits[number][-2:], self.now)

    def act(self) -> None:
        self.now += self.random.choice([0.0, 0.01, 0.5, 3.0])
        self.coordinator.step(self.now)
        running = sorted(self.alive - self.waiting - self.stuck)
        choice = self.random.random()
        if choice < 0.5 and running:
            self.form(self.random.choice(running))
        elif choice < 0.6 and self.alive:
            victim = self.random.choice(sorted(self.alive))
            self.end(victim)
            self.coordinator.dead(name(victim), "killed", self.now)
        elif choice < 0.64 and running:
            self.coordinator.leave(name(victim := self.random.choice(running)), "", self.now)
            self.end(victim)
        elif choice < 0.67 and self.alive:
            self.coordinator.announce(name(self.random.choice(sorted(self.alive))), "", self.now)
        elif choice < 0.70 and self.waiting:  # its connection broke; it asks again later
            self.coordinator.withdraw(name(again := self.random.choice(sorted(self.waiting))))
            self.waiting.discard(again)
            self.asked_again.add(again)
        elif choice < 0.73 and running:
            self.stuck.add(self.random.choice(running))
        elif choice < 0.78 and self.coordinator.record is not None:
            record = self.coordinator.record
            rank = self.random.randrange(len(record.members))
            self.coordinator.suspect(record.number, rank, self.now)
        elif choice < 0.84 and len(self.seen) < 40:
            self.begin()
        elif running:
            number = self.random.choice(running)
            self.coordinator.heard(name(number), self.now)
            if number in self.asked_again:
                return  # it is in init() still
            self.commits[number].append(self.coordinator.newest_commit + self.random.randint(0, 1))
        self.listen()

    def end(self, number: int) -> None:
        self.alive.discard(number)
        self.waiting.discard(number)

    def listen(self) -> None:
        """Some of those who wait hear their answer, in any order and late."""
        for number in sorted(self.waiting):
            if self.random.random() < 0.3:
                continue
            answer = self.coordinator.answer(name(number))
            if isinstance(answer, Record):
                self.check(number, answer)
                self.seen[number] = answer.number
                self.waiting.discard(number)
                self.asked_again.discard(number)
            elif answer is not None:  # the process ends, and who has started it sees that
                self.end(number)
                self.coordinator.dead(name(number), "exit code 0", self.now)
            elif self.coordinator.members[name(number)].waits_after is None:
                self.form(number)  # it asks again every second

    def check(self, number: int, record: Record) -> None:
        assert self.records.setdefault(record.number, record) == record
        assert record.number > self.seen[number], "a member of an old generation was let in again"
        assert name(number) in record.members and len(set(record.members)) == len(record.members)
        limits = self.coordinator.limits
        assert limits.smallest <= len(record.members) <= (limits.largest or 99)
        before = self.records.get(record.number - 1)
        old = [one for one in record.previous if one >= 0]
        assert old == sorted(old) and record.previous[: len(old)] == tuple(old), (
            "old members first, in their order"
        )
        if before is not None:
            for rank, previous in enumerate(record.previous):
                assert (before.members[previous] == record.members[rank]) if previous >= 0 else True
        if record.skip_sync:
            assert not record.newcomers and record.commit > 0
        if record.commit:
            for rank, id_ in enumerate(record.members):
                held = self.coordinator.members[id_].commits
                assert record.previous[rank] < 0 or record.commit in held or record.number < self.newest()
            assert record.previous[record.commit_root] >= 0

    def newest(self) -> int:
        return self.coordinator.record.number if self.coordinator.record is not None else 0

    def settle(self) -> None:
        """From now on nobody dies and everybody who can comes: nobody may wait for ever.

        Who hangs goes on hanging, but not all at once: if nobody reaches a commit, no coordinator can help.
        """
        if {one.index for one in self.coordinator.live() if not one.drain} <= self.stuck:
            self.stuck.clear()
        for _ in range(self.coordinator.limits.size):
            self.begin()
        for _ in range(200):
            for number in sorted(self.alive - self.waiting - self.stuck):
                if self.seen[number] < self.newest() or self.seen[number] == 0 or self.is_wanted():
                    self.form(number)
            self.listen()
            due = self.coordinator.next_s()
            if due < float("inf"):
                self.now = max(self.now, due)
                self.coordinator.step(self.now)
            if not self.waiting and not self.is_wanted():
                break
        may_enter = [
            number
            for number in self.waiting
            if self.seen[number] == 0 or self.coordinator.members[name(number)].released == self.seen[number]
        ]
        largest = self.coordinator.limits.largest
        full = largest is not None and len(self.coordinator.live()) >= largest
        assert self.coordinator.stopped or (self.waiting == set(may_enter) and (full or not may_enter)), (
            self.waiting
        )

    def is_wanted(self) -> bool:
        record = self.coordinator.record
        if record is None:
            return False
        if any(self.coordinator.members[id_].waits_after == record.number for id_ in record.members):
            return True
        return self.coordinator.notice().wanted == record.number + 1


@pytest.mark.in_turn
@pytest.mark.parametrize("part", range(10))
def test_random_lives_of_a_job(part: int) -> None:
    generations = 0
    for seed in range(part * 400, part * 400 + 400):
        life = Life(seed)
        try:
            for _ in range(life.random.randint(5, 80)):
                life.act()
            life.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        generations += len(life.records)
    assert generations > 400
