"""Who keeps whose shard, and what becomes of it when ranks are lost: simulated ranks, thousands of random jobs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horoclone import arrays
from horoclone.elastic.peers import Held, Kept, Peers, Plan, buddies, plan
from horoclone.errors import HorovodInternalError, StateLost
from horoclone.objects import opened, packed
from horoclone.runtime import current


def test_buddies_are_on_other_hosts_and_equally_loaded() -> None:
    assert buddies(["a", "a", "b", "b"]) == [(2,), (3,), (0,), (1,)]  # rank + local size
    assert buddies(["a", "b", "b", "a"]) == [(1,), (0,), (3,), (2,)]  # after a loss and a new worker
    assert buddies(["a"] * 3) == [(1,), (2,), (0,)] and buddies(["a"]) == [()]
    chance = random.Random(1)
    for _ in range(3000):
        hosts = [chance.randrange(chance.randint(1, 6)) for _ in range(chance.randint(1, 24))]
        copies = chance.randint(1, 3)
        found = buddies(hosts, copies)
        load = [sum(rank in keepers for keepers in found) for rank in range(len(hosts))]
        assert sum(load) == len(hosts) * min(copies, len(hosts) - 1)
        for rank, keepers in enumerate(found):
            assert rank not in keepers and len(set(keepers)) == len(keepers)
            others = len(set(hosts)) - 1
            assert len({hosts[one] for one in keepers} - {hosts[rank]}) == min(len(keepers), others)
        if copies == 1 and 2 * max(map(hosts.count, hosts)) <= len(hosts):
            assert load == [1] * len(hosts)


def told_by(hosts: list[int], commit: int, copies: int = 1, generation: int = 1) -> list[Held]:
    ring = buddies(hosts, copies)
    size = len(hosts)
    return [
        Held(commit, generation, size, rank, tuple(one for one in range(size) if one == rank or rank in ring[one]))
        for rank in range(size)
    ]  # fmt: skip


def test_any_one_host_may_be_lost_and_every_shard_is_found_once() -> None:
    chance = random.Random(2)
    for _ in range(3000):
        hosts = [chance.randrange(chance.randint(2, 6)) for _ in range(chance.randint(2, 16))]
        if len(set(hosts)) == 1:
            hosts[0] += 1
        before, newest = told_by(hosts, 4), told_by(hosts, 5)
        down = chance.choice(hosts)
        alive = [rank for rank, host in enumerate(hosts) if host != down]
        told = [[before[rank], newest[rank]] for rank in alive]
        told += [[Held(0, 0, 1, 0, (0,))] for _ in range(chance.randint(0, 4))]  # newcomers
        found = plan(told, 5)
        assert (found.commit, found.root) == (5, 0)
        for number, rank in enumerate(alive):
            assert found.takes[number] == rank and found.holders[rank] == found.sources[rank] == number
        taken = [origin for origin in found.takes if origin is not None]
        assert len(taken) == len(set(taken)) == min(len(told), len(hosts))
        for origin, (source, holder) in enumerate(zip(found.sources, found.holders, strict=True)):
            assert origin in told[source][1].origins
            assert holder == (found.takes.index(origin) if origin in taken else source)


def test_a_commit_counts_only_where_each_of_its_shards_is_somewhere() -> None:
    hosts = [0, 1, 2, 3]
    newest, before = told_by(hosts, 5), told_by(hosts, 4)
    # Rank 1 is lost while its shard of commit 5 was on its way to rank 2.
    partly = newest[2]._replace(origins=(2,))
    told = [[before[0], newest[0]], [before[2], partly], [before[3], newest[3]]]
    found = plan(told)
    assert found == Plan(4, 1, 0, (0, 2, 3), (0, 1, 1, 2), (0, 1, 1, 2))
    assert plan([[before[0], newest[0]], [before[2], newest[2]], [before[3], newest[3]]], 4).commit == 4


def test_survivors_of_a_generation_that_was_just_formed_go_back_to_the_one_before() -> None:
    """A newcomer has only the commit of its sync, whose shards were on their way; the others have an older one, too."""
    old = told_by([0, 0, 0, 0], 7)
    # Rank 2 was lost; the new ranks are 0, 1, 3 and a newcomer. Rank 0 is lost before its shard of 8 has arrived.
    new = [one._replace(origins=(one.rank,)) for one in told_by([0, 0, 0, 0], 8, generation=2)]
    found = plan([[old[1], new[1]], [old[3], new[2]], [new[3]]])
    assert found == Plan(7, 1, 0, (1, 3, 0), (0, 0, 1, 1), (2, 0, 1, 1))


def test_before_the_first_commit_counts_everybody_begins_again() -> None:
    start = Held(0, 0, 1, 0, (0,))
    alone = [one._replace(origins=(one.rank,)) for one in told_by([0, 0, 0], 1)]
    assert plan([[start], [start]]).commit == 0
    assert plan([[start, alone[0]], [start, alone[2]]]).commit == 0


def test_what_is_gone_is_named() -> None:
    hosts = [0, 0, 0, 0]
    told = told_by(hosts, 6)
    with pytest.raises(
        StateLost,
        match=r"(?s)of commit 6 what only ranks \[1\] of 4 had: a rank and its buddy.*hvd\.checkpoint\.load",
    ):
        plan([[told[0]], [told[3]]])
    kept_twice = told_by(hosts, 6, copies=2)
    assert plan([[kept_twice[0]], [kept_twice[3]]]).commit == 6


def test_what_is_left_of_an_earlier_life_is_not_taken_for_a_commit_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(current, "lasting_secret", lambda: b"secret")

    def kept(generation: int, rank: int) -> Kept:
        return Kept(5, generation, rank, 2, packed({"of": generation}))

    parts = kept(1, 0).bytes_of(0)
    now = kept(2, 1)
    now.others[0] = parts
    with pytest.raises(HorovodInternalError, match="commit 5 in generation 2"):
        now.shard(0)
    now.others[0] = kept(2, 0).bytes_of(0)
    assert now.shard(0) == {"of": 2}


def test_a_shard_that_everybody_gets_is_sealed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it had not been sent to a buddy before."""
    mine, other = (Kept(4, 1, rank, 2, packed({"rank": rank})) for rank in (0, 1))
    answers = [np.array([mine.own.size, other.own.size]), np.concatenate([mine.own, *other.bytes_of(1)])]
    given = []

    def allgather(one: np.ndarray, name: str) -> np.ndarray:
        given.append(one)
        return answers.pop(0)

    monkeypatch.setattr(arrays, "allgather", allgather)
    peers = Peers()
    peers.kept[4] = mine
    peers.spread(4)
    opened(given[1], "the shard of rank 0 of commit 4 in generation 1")
    assert mine.shard(1) == {"rank": 1} and mine.shard(0) == {"rank": 0}
