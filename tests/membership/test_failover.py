"""Who may go on when a network is cut or the launcher is gone: votes, what a record tells, and standbys over sockets."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from horoclone.bootstrap.failure_detector import HEARTBEAT_TIMEOUT_S
from horoclone.bootstrap.rendezvous import Server
from horoclone.membership import snapshot, timeouts
from horoclone.membership.client import Identity, MembershipClient, NotCoordinator
from horoclone.membership.coordinator import Coordinator
from horoclone.membership.failover import Failover, StandbyService
from horoclone.membership.records import ID_BYTES, LOW_BITS, Assignment, Evicted, Limits, Record, Stop, packed
from horoclone.membership.service import MembershipService

SECRET = b"0123456789abcdef"


def name(number: int) -> bytes:
    return number.to_bytes(ID_BYTES, "little")


def job(count: int, **limits: object) -> Coordinator:
    """A coordinator whose first generation, of `count` members on as many hosts, is whole."""
    one = Coordinator(Limits(**{"size": count, "majority": True, **limits}), lambda size: bytes(size))
    for number in range(count):
        one.start(name(number), f"host{number}", 0, 0)
        one.join(name(number), b"i%d" % number, f"host{number}", 0, 0)
        one.form(name(number), 0, (), 0)
    assert one.record is not None
    one.established(one.record.number)
    return one


def told(one: Coordinator, number: int) -> Assignment:
    assert one.record is not None
    return Assignment(packed(one.record, name(number), snapshot.packed(one)))


def come(one: Coordinator, numbers: list[int], seen: int, now: float) -> None:
    for number in numbers:
        one.form(name(number), seen, (), now)


@pytest.mark.parametrize(
    ("count", "here", "goes_on"),
    [
        (3, [1, 2], True), (3, [0], False), (4, [0, 1], True), (4, [2, 3], False), (2, [0], True),
        (2, [1], False)
    ],
)  # fmt: skip
def test_of_silent_members_the_majority_goes_on_or_half_with_the_lowest(
    count: int, here: list[int], goes_on: bool
) -> None:
    one = job(count, timeout_s=100.0)
    come(one, here, 1, 1)
    now = one.next_s()
    assert now <= 1 + HEARTBEAT_TIMEOUT_S
    one.step(now)
    answers = [one.answer(name(number)) for number in here]
    if goes_on:
        assert all(isinstance(answer, Record) and len(answer.members) == len(here) for answer in answers)
        return
    assert answers == [None] * len(here) and one.next_s() == 101, "it waits for the others, and does not spin"
    one.step(101)
    (answer, *_) = [one.answer(name(number)) for number in here]
    assert isinstance(answer, Stop) and answer.code == 75 and f"{len(here)} of {count} ranks" in answer.text


def test_the_minority_goes_on_when_the_network_is_whole_again() -> None:
    one = job(3)
    come(one, [0], 1, 1)
    one.step(60)
    come(one, [1, 2], 1, 70)
    answer = one.answer(name(0))
    assert isinstance(answer, Record) and len(answer.members) == 3


def test_who_has_certainly_ended_does_not_vote() -> None:
    one = job(4)
    one.dead(name(0), "it was killed", 1)
    one.leave(name(1), "SIGTERM", 1)
    come(one, [2], 1, 1)
    one.step(1 + HEARTBEAT_TIMEOUT_S)
    assert isinstance(one.answer(name(2)), Record)
    other = job(4)
    other.dead(name(0), "its host was lost", 1, is_certain=False)
    come(other, [2, 3], 1, 1)
    other.step(1 + HEARTBEAT_TIMEOUT_S)
    assert other.answer(name(2)) is None


def test_a_generation_that_was_never_whole_does_not_change_who_votes() -> None:
    one = job(3)
    come(one, [0, 1], 1, 1)
    one.step(1 + HEARTBEAT_TIMEOUT_S)
    assert one.record is not None and one.record.number == 2
    come(one, [0], 2, 50)  # member 1 did not come to connect: it may be with member 2
    one.step(50 + HEARTBEAT_TIMEOUT_S)
    assert one.answer(name(0)) is None


def test_a_record_tells_a_candidate_all_that_it_needs() -> None:
    one = job(3, smallest=2, largest=8, resets=5)
    for number in (0, 2):
        one.members[name(number)].addresses = f"10.0.0.{number}:1,10.1.0.{number}:1"
    one.members[name(0)].near = True
    one.dead(name(1), "it was killed", 1)
    known = snapshot.unpacked(told(one, 2).rest)
    assert known.failover_candidates() == [2, 0], "of another host than the coordinator's first"
    assert known.limits == one.limits and known.voters == one.voters and known.gone == (name(1),)
    assert known.members[2].addresses == ("10.0.0.2:1", "10.1.0.2:1")
    again = snapshot.resumed(told(one, 2), known, True, lambda size: bytes(size), 5.0)
    assert again.record is not None and again.record._replace(nonce=b"") == one.record._replace(nonce=b"")  # type: ignore[union-attr]
    come(again, [0, 2], 1, 6)
    again.step(5 + timeouts.FIND_S + HEARTBEAT_TIMEOUT_S)
    answer = again.answer(name(2))
    assert isinstance(answer, Record) and answer.members == (name(0), name(2))
    assert answer.number == (1 << 16 | 2) << LOW_BITS | 2, (
        "a takeover, the rank of the candidate, and the count goes on"
    )
    assert again.resets() == 1


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'[[1],[],["zz"],[]]', b"\xff" * 9])
def test_a_record_that_makes_no_sense_is_refused(body: bytes) -> None:
    with pytest.raises(ConnectionError, match="makes no sense"):
        snapshot.unpacked(body)


def test_of_any_cut_at_most_one_side_goes_on() -> None:
    """Random deaths, known to both sides or to one of them, and random sides: two coordinators never both form."""
    chance, both = random.Random(7), 0
    for _ in range(600):
        count = chance.randint(2, 7)
        first = job(count)
        sides: list[list[int]] = [[], [], []]
        for number in range(count):
            chance.choice(sides).append(number)  # the third: the dead
        second = snapshot.resumed(
            told(first, 0), snapshot.unpacked(told(first, 0).rest), True, lambda size: bytes(size), 0.0
        )
        formed = 0
        for one, side in ((first, sides[0]), (second, sides[1])):
            for number in sides[2]:
                if chance.random() < 0.6:
                    one.dead(name(number), "it was killed", 1)
            come(one, side, 1, 1)
            one.step(1 + timeouts.FIND_S + HEARTBEAT_TIMEOUT_S)
            formed += bool(side) and isinstance(one.answer(name(side[0])), Record)
        assert formed < 2, sides
        both += formed
    assert both > 300, "often enough one does"


class Job:
    """A launcher's coordinator and members with standbys, over sockets of this host."""

    def __init__(self, count: int) -> None:
        self.service = MembershipService(Limits(count, majority=True), secrets.token_bytes)
        self.service.snapshot = snapshot.packed
        self.launcher = Server(SECRET, "job", 100, ["127.0.0.1"], self.service)
        self.said: list[str] = []
        self.members: list[Failover] = []
        self.links: list[MembershipClient] = []
        for slot in range(count):
            id_ = secrets.token_bytes(16)
            self.service.coordinator.start(id_, "here", slot, time.monotonic())
            who = Identity(
                id_, secrets.token_bytes(8), "here", slot, tuple(self.launcher.addresses), SECRET, "job"
            )
            self.members.append(Failover(who, ["127.0.0.1"], 100, self.said.append))
        self.links = [MembershipClient(one.who, 5, shows=False) for one in self.members]

    def form(self, ranks: list[int], seen: int) -> list[Any]:
        for rank in ranks:
            self.links[rank].form(seen, (), 0.0)
        return [self.links[rank].form(seen, (), 5.0) for rank in ranks]

    def lose_launcher(self) -> None:
        """All have noticed it, and member 0 is the coordinator."""
        self.launcher.close()
        for rank in (1, 2):
            assert not self.members[rank].find(0, 0.0), "the lowest comes before them"
        assert self.members[0].find(0, 5.0)

    def follow(self, rank: int) -> None:
        self.links[rank].close()
        self.links[rank] = MembershipClient(self.members[rank].who, 5, shows=False)

    def close(self) -> None:
        for link in self.links:
            link.close()
        for member in self.members:
            if member._anchor is not None:
                member._anchor.close()
            member._server.close()
        self.launcher.close()


@pytest.fixture
def three() -> Iterator[Job]:
    one = Job(3)
    answers = one.form([0, 1, 2], 0)
    for answer in answers:  # in the order of ranks
        assert isinstance(answer, Assignment)
        one.members[answer.rank].learn(answer)
        one.members[answer.rank].connected()
    yield one
    one.close()


def test_the_lowest_takes_over_and_the_others_find_it(three: Job) -> None:
    assert not three.members[1].find(0, 0.0), "the others hear the launcher"
    three.lose_launcher()
    assert three.members[2].find(0, 5.0) and three.members[1].find(0, 5.0)
    assert three.members[1].who.addresses == three.members[2].who.addresses == three.members[0].who.own
    assert (
        sum("this process is the membership coordinator now (generation 1)" in line for line in three.said)
        == 1
    )
    for rank in range(3):
        three.follow(rank)
    second = three.form([0, 1, 2], 1)
    assert {(one.number, one.size) for one in second} == {(1 << 48 | 2, 3)}


def test_who_is_no_coordinator_says_so_and_who_knows_less_gives_its_place_up(three: Job) -> None:
    idle = MembershipClient(three.members[1].who._replace(addresses=three.members[0].who.own), 5, shows=False)
    with pytest.raises(NotCoordinator):
        idle.form(1, (), 0.0)
    three.lose_launcher()
    assert three.members[1].find(0, 5.0)
    three.follow(1)
    with pytest.raises(NotCoordinator):
        # It was told generation 2 by the launcher, the coordinator of now was not
        three.links[1].form(2, (), 1.0)
    idle.close()


def test_an_evicted_member_and_a_stranger_are_refused_by_a_standby_as_well(three: Job) -> None:
    three.lose_launcher()
    standby: StandbyService = three.members[0]._standby
    for rank in (0, 1, 2):
        assert rank == 0 or three.members[rank].find(0, 5.0)
        three.follow(rank)
    evicted = three.members[2].who.id
    with standby.mutex:
        standby.coordinator.dead(evicted, "nobody has heard of it any more", time.monotonic())
    assert all(isinstance(one, Assignment) and one.size == 2 for one in three.form([0, 1], 1))
    answer = three.links[2].form(1, (), 5.0)
    assert isinstance(answer, Evicted) and answer.code == 75 and "nobody has heard" in answer.text
    stranger = three.members[1].who._replace(secret=b"another secret!!")
    other = three.members[1].who._replace(id=secrets.token_bytes(16))
    for who in (stranger, other):
        link = MembershipClient(who, 1, shows=False)
        assert link.probe() is not None
        link.close()
