"""Spares that are given commits while they wait: where one holds the newest, nothing is sent when it is promoted."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horoclone import errors
from horoclone.elastic import member, replicas
from horoclone.elastic.generation import Generation
from horoclone.elastic.state import ObjectState
from horoclone.runtime import topology
from horoclone.runtime.lifecycle import member as process
from horoclone.runtime.replica import Replica

WORKER = Path(__file__).with_name("promoted.py")
RUN = [sys.executable, "-m", "horoclone.launch"]
FLAGS = ["-np", "2", "--min-np", "2", "--max-np", "2", "--spares", "1"]
IN = re.compile(r"in (\d+) rank (\d+) of (\d+) pid (\d+) step (\d+) how (\w+)")


@pytest.mark.in_turn
@pytest.mark.parametrize("interval", ["0", "1000"])
@pytest.mark.parametrize("victim", [0, 1])  # rank 0 is the one that feeds
def test_a_promoted_spare_goes_on_from_what_it_was_given(
    launch: Any, tmp_path: Path, interval: str, victim: int
) -> None:
    """Commit 3 is that of step 2, 1 that of the first sync."""
    environment = {"HOROCLONE_REPLICA_INTERVAL": interval, "PROMOTED_HOLD": str(tmp_path / "go")}
    started = launch.start([*RUN, *FLAGS, "--verbose", sys.executable, WORKER, "4", "0"], env=environment)
    started.until(lambda: started.stdout.count("committed 2") == 2)
    started.until(lambda: ("fed 3" if interval == "0" else "fed ") in started.stdout)
    first = {int(one[1]): int(one[3]) for one in IN.findall(started.stdout)}
    all_pids = {int(pid) for pid in re.findall(r"rank \d started on localhost, pid (\d+)", started.stderr)}
    had_newest = "fed 3" in started.stdout
    os.kill(first[victim], signal.SIGKILL)
    (tmp_path / "go").touch()
    done = started.finish(60)
    assert done.returncode == 0, done.output
    second = [one for one in IN.findall(done.stdout) if one[0] == "2"]
    # Where rank 0 was killed before it had sent the newest: perhaps the one after it has begun to, and nobody waits for that.
    how = second[0][5]
    assert [one[5] for one in second] == [how, how], done.output
    assert how == "replica" or not (victim == 1 or had_newest), done.output
    assert {int(one[3]) for one in second} == all_pids - {first[victim]}, (
        "the spare, and nobody who was started"
    )
    assert {int(one[4]) for one in second} == {2}
    assert done.stdout.count("done 4 8.0 True [2]") == 2 or how == "sync", done.output
    assert done.stdout.count("done 4 8.0 True") == 2, done.output


class Ranks:
    """Two ranks as synchronise() sees them, one after the other; what each says is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.commit, self.said = 0, 5, {}
        self.others: dict[int, list[int]] = {}
        self.replica: Replica | None = None
        self.before: Replica | None = None  # what has come when the ranks agree
        self.feeder = 0
        self.has_spares = True
        self.offered: list[int] = []
        patch = monkeypatch.setattr
        patch(process, "has_spares", lambda: self.has_spares)
        patch(process, "is_elastic", lambda: True)
        patch(process, "feeds", lambda: self.rank == 0)
        patch(replicas, "is_ours", lambda _: True)
        patch(process, "offer_replica", lambda commit, pack: self.offered.append(commit))
        patch(process, "take_replica", lambda waits=True: self.replica)
        patch(process, "promised_replica", lambda: (self.before or self.replica, self.feeder))
        patch(process, "feeder", lambda: self.feeder if self.rank == 0 else 0)
        patch(process, "digest_of_replica", lambda commit: 99 if commit == 5 else 0)
        patch(topology, "rank", lambda: self.rank)
        patch(topology, "size", lambda: 2)
        patch(replicas, "generation", self.generation)
        patch(member, "told_by_all", self.tell)

    def generation(self) -> Generation:
        return Generation(2, self.rank, 2, (1,), 0, self.commit, False, ())

    def tell(self, words: tuple[int, ...], name: str) -> list[list[int]]:
        assert name == "hvd.elastic.replica"
        self.said[self.rank] = list(words)
        return [list(words) if rank == self.rank else self.others[rank] for rank in (0, 1)]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    yield Ranks(monkeypatch)


def state_of(number: int, monkeypatch: pytest.MonkeyPatch, **values: Any) -> tuple[ObjectState, list[int]]:
    one, calls = ObjectState(lambda value: value, lambda: 0, **values), []
    one._commit_number = number

    def sync(self: ObjectState) -> None:
        calls.append(1)

    sync.__module__ = "horoclone.told"
    monkeypatch.setattr(ObjectState, "sync", sync)
    return one, calls


def given(commit: int, **values: Any) -> Replica:
    return Replica(commit, [bytes(part) for part in replicas.packed((values, {}))], 99)


def test_who_is_new_takes_the_commit_and_acts_as_the_others_have(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, calls = state_of(0, monkeypatch, step=0, model=np.zeros(3))
    state.register_reset_callbacks([lambda: setattr(state, "step", state.step + 100)])
    two.rank, two.replica, two.others = 1, given(5, step=7, model=np.arange(3.0)), {0: [5, 99, 0]}
    replicas.synchronise(state)
    assert two.said[1] == [5, 99, 0] and not calls
    assert state.step == 107 and state.model.tolist() == [0, 1, 2] and state._held() == (5,)
    state.model += 1
    state.restore()
    assert state.step == 7 and state.model.tolist() == [0, 1, 2], "the commit is its own copy"


@pytest.mark.parametrize(
    "replica, others",
    [
        (None, [5, 99, 0]),
        (given(4, step=7), [5, 99, 0]),  # an older commit
        (given(5, epoch=7), [5, 99, 0]),  # of another state
        (given(5, step=7), [5, 77, 0]),  # somebody else's commit of that number
        (given(5, step=7), [0, 0, 0]),  # another rank has none
        (Replica(5, [b"no pickle"], 99), [5, 99, 0]),
    ],
)
def test_where_anything_differs_everything_is_sent(
    two: Ranks, monkeypatch: pytest.MonkeyPatch, replica: Replica | None, others: list[int]
) -> None:
    state, calls = state_of(0, monkeypatch, step=0)
    two.rank, two.replica, two.others = 1, replica, {0: others}
    replicas.synchronise(state)
    assert calls == [1]


def test_who_was_there_says_what_it_has(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    state, calls = state_of(5, monkeypatch, step=3)
    two.others, two.feeder = {1: [5, 99, 0]}, 1
    replicas.synchronise(state)
    assert two.said[0] == [5, 99, 1] and not calls and state.step == 3
    state._commit_number = 6
    replicas.synchronise(state)
    assert two.said[0] == [0, 0, 0] and calls == [1]


@pytest.mark.parametrize("digest", [0, 99])
def test_who_is_new_waits_for_its_commit_while_the_others_train_on(
    two: Ranks, monkeypatch: pytest.MonkeyPatch, digest: int
) -> None:
    state, calls = state_of(0, monkeypatch, step=0)
    two.rank, two.others, two.feeder = 1, {0: [5, digest, 3]}, 3
    two.before, two.replica = given(4, step=6), given(5, step=7)
    replicas.synchronise(state)
    assert two.said[1] == [5, 0, 3] and not calls and state.step == 7 and state._held() == (5,)


@pytest.mark.parametrize("has_it", [True, False])
def test_who_is_new_keeps_the_commit_that_it_has_where_the_others_are_lost(
    two: Ranks, monkeypatch: pytest.MonkeyPatch, has_it: bool
) -> None:
    def tell(*_: object) -> None:
        raise errors.PeerLost("rank 0 is gone", 0)

    state, _ = state_of(0, monkeypatch, step=0)
    two.rank, two.feeder, two.replica = 1, 3, given(5 if has_it else 4, step=7)
    monkeypatch.setattr(member, "told_by_all", tell)
    with pytest.raises(errors.PeerLost, match="rank 0"):
        replicas.synchronise(state)
    assert (state.step, state._held()) == ((7, (5,)) if has_it else (0, ()))


def test_who_is_fed_by_another_than_rank_0_is_sent_everything(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, calls = state_of(0, monkeypatch, step=0)
    two.rank, two.others, two.feeder, two.before = 1, {0: [5, 0, 3]}, 2, given(4, step=6)
    replicas.synchronise(state)
    assert two.said[1] == [5, 0, 2] and calls == [1] and state.step == 0


@pytest.mark.parametrize("comes", [None, given(4, step=6), given(5, step=7)._replace(digest=98)])
def test_a_commit_that_does_not_arrive_ends_the_generation(
    two: Ranks, monkeypatch: pytest.MonkeyPatch, comes: Replica | None
) -> None:
    state, calls = state_of(0, monkeypatch, step=0)
    two.rank, two.others, two.feeder = 1, {0: [5, 99, 3]}, 3
    two.before, two.replica = given(4, step=6), comes
    with pytest.raises(errors.PeerLost, match="commit 5"):
        replicas.synchronise(state)
    assert not calls and state.step == 0 and state._held() == ()


def test_a_commit_of_another_form_than_those_before_leaves_the_state_as_it_was(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = state_of(0, monkeypatch, step=0)
    two.rank, two.others, two.feeder = 1, {0: [5, 99, 3]}, 3
    two.before, two.replica = given(4, step=6), given(5, epoch=6)
    with pytest.raises(ValueError, match="commit 5 .* does not fit"):
        replicas.synchronise(state)
    state.restore()
    assert state.step == 0 and state._held() == ()
    two.replica = given(5, step=7)._replace(parts=[])  # rank 0 could not pack it
    with pytest.raises(errors.PeerLost, match="commit 5"):
        replicas.synchronise(state)


@pytest.mark.parametrize("method", ["save", "on_reset"])
def test_a_state_that_does_more_than_is_known_here_is_always_sent(
    two: Ranks, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    Mine = type("Mine", (ObjectState,), {method: lambda self: getattr(ObjectState, method)(self)})

    mine = Mine(lambda value: value, lambda: 0, step=1)
    mine._commit_number, two.others = 5, {1: [5, 99, 0]}
    offered: list[Any] = []

    def offer(commit: int, pack: Any) -> None:
        offered.extend(pack())

    monkeypatch.setattr(process, "offer_replica", offer)
    calls = []
    mine.sync = lambda: calls.append(1)  # type: ignore[method-assign]
    replicas.offer(mine)
    replicas.synchronise(mine)
    assert two.said[0] == [0, 0, 0] and calls == [1] and not offered


@pytest.mark.parametrize("has_spares", [True, False])
def test_callbacks_of_a_newcomer_may_know_less_than_those_of_the_others(
    two: Ranks, monkeypatch: pytest.MonkeyPatch, has_spares: bool
) -> None:
    state, calls = state_of(0, monkeypatch, step=0)
    state.register_reset_callbacks([lambda: None])
    two.has_spares, two.rank, two.replica, two.others = has_spares, 1, given(5, step=7), {0: [5, 99, 0]}
    replicas.synchronise(state)
    assert calls == ([] if has_spares else [1])


def test_a_commit_that_was_not_offered_before_the_loss_is_offered_now(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = state_of(6, monkeypatch, step=3)
    two.commit, two.others = 6, {1: [6, 99, 0]}
    replicas.synchronise(state)
    assert two.offered == [6]


def test_who_is_new_gets_its_commit_also_where_training_ends_at_once(
    two: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, finished = state_of(5, monkeypatch, step=3)[0], []
    monkeypatch.setattr(process, "finish_feeding", lambda: finished.append(two.rank))
    for two.rank in (0, 1):
        replicas.finish(state)
    state._commit_number = 6  # who is new was there when it was made
    replicas.finish(state)
    assert finished == [0]


def test_arrays_travel_as_their_own_memory() -> None:
    values = {"a": np.arange(6.0).reshape(2, 3), "b": [np.ones(4, np.int8)], "c": "text"}
    parts = replicas.packed(values)
    assert len(parts) == 3 and np.shares_memory(np.frombuffer(parts[1]), values["a"])
    back = replicas.unpacked([bytearray(part) for part in parts])
    assert back["a"].tolist() == values["a"].tolist() and back["c"] == "text"
    back["a"] += 1
