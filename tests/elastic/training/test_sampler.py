"""Which samples a rank takes, over random histories of ranks that are lost and come: each sample once in every epoch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from horoclone.elastic.sampler import ElasticSampler
from horoclone.runtime import topology


class Worlds:
    """What size() and rank() say to the sampler that is being asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.size, self.rank = 1, 0
        patch.setattr(topology, "size", lambda: self.size)
        patch.setattr(topology, "rank", lambda: self.rank)


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Worlds:
    return Worlds(monkeypatch)


def samplers(worlds: Worlds, size: int, length: int, **options: object) -> list[ElasticSampler]:
    made = []
    worlds.size = size
    for worlds.rank in range(size):
        made.append(ElasticSampler(range(length), **options))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("length", [0, 1, 7, 24])
def test_the_global_order_is_the_same_at_any_size(worlds: Worlds, length: int) -> None:
    """What changes with the size is only how many consecutive samples make a step."""
    orders = []
    for size in (1, 2, 3, 4, 8):
        shares = [list(sampler) for sampler in samplers(worlds, size, length, seed=5)]
        assert len({len(share) for share in shares}) == 1
        orders.append([sample for step in zip(*shares, strict=True) for sample in step][:length])
    assert all(order == orders[0] for order in orders) and sorted(orders[0]) == list(range(length))


def test_more_ranks_than_samples_take_some_twice(worlds: Worlds) -> None:
    taken = [list(sampler) for sampler in samplers(worlds, 4, 1)]
    assert taken == [[0]] * 4
    counts = Counter(sample for sampler in samplers(worlds, 5, 2) for sample in sampler)
    assert sum(counts.values()) == 5 and set(counts) == {0, 1}


@dataclass
class Simulated:
    """An epoch of a job on a clock of its own. Trained samples that no commit holds are taken back by a loss."""

    worlds: Worlds
    chance: random.Random
    length: int
    batch: int
    seed: int
    clock: float = 0.0
    trained: list[int] = field(default_factory=list)  # what is in the weights
    committed: tuple[int, dict[str, int]] = (
        0,
        {},
    )  # how many of them the commit holds, and the sampler's state
    padding: int = 0

    def begin(self, size: int, state: dict[str, int]) -> None:
        self.members = samplers(self.worlds, size, self.length, seed=self.seed)
        for rank, sampler in enumerate(self.members):
            self.worlds.rank = rank
            sampler.load_state_dict(state)
        self.left = [list(sampler) for sampler in self.members]
        self.place = 0

    def step(self) -> None:
        shares = [left[self.place : self.place + self.batch] for left in self.left]
        self.place += self.batch
        taken = [sample for turn in zip(*shares, strict=True) for sample in turn]
        self.trained += taken
        for sampler in self.members:
            sampler.record_batch(0, len(shares[0]))

    def commit(self) -> None:
        states = [sampler.state_dict() for sampler in self.members]
        assert all(state == states[0] for state in states)
        self.committed = (len(self.trained), states[0])

    def epoch(self) -> None:
        """Until all is done: steps, commits, losses (back to the commit) and growth (only at a commit)."""
        self.begin(self.chance.randint(1, 6), {"epoch": self.seed % 7, "processed_num": 0})
        self.commit()
        next_change = self.chance.expovariate(0.2)
        while self.place < len(self.left[0]):
            self.clock += self.chance.uniform(0.5, 1.5)
            self.step()
            if self.clock < next_change:
                if self.chance.random() < 0.5:
                    self.commit()
                continue
            next_change = self.clock + self.chance.expovariate(0.2)
            size = len(self.members)
            if size > 1 and self.chance.random() < 0.6:
                size -= self.chance.randint(1, size - 1)
                del self.trained[self.committed[0] :]
            else:
                size += self.chance.randint(1, 3)
                self.commit()
            self.begin(size, self.committed[1])


@pytest.mark.in_turn
@pytest.mark.parametrize("part", range(4))
def test_every_sample_is_trained_once_in_an_epoch_whatever_happens(worlds: Worlds, part: int) -> None:
    """4 x 1500 histories. Only the last round may hold some twice: fewer than there are ranks at its end."""
    for seed in range(part * 1500, part * 1500 + 1500):
        chance = random.Random(seed)
        job = Simulated(worlds, chance, chance.randint(0, 60), chance.randint(1, 4), seed)
        job.epoch()
        counts = Counter(job.trained)
        assert set(counts) == set(range(job.length)), seed
        twice = len(job.trained) - job.length
        assert 0 <= twice < len(job.members), seed
        worlds.size, worlds.rank = 1, 0
        order = ElasticSampler(range(job.length), seed=seed)
        order.load_state_dict({"epoch": seed % 7, "processed_num": 0})
        assert job.trained[: job.length] == list(order), seed
