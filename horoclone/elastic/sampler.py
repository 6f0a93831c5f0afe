"""A sampler that shares out what is left of an epoch: over the ranks there are now, after the samples already done.

Pure bookkeeping, no communication: every rank computes the same order from seed and epoch, whatever the size is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

from horoclone.runtime import topology


class ElasticSampler:
    """Yields the indices of this rank's share of `dataset`, in an order that all ranks agree on.

    dataset: anything with a length. shuffle: a new order in each epoch, from `seed` (the same on every rank) and the
    epoch. Call record_batch after every batch and keep the sampler in the elastic state, or state_dict() in a
    checkpoint: a job that goes on, also with another number of ranks, takes the samples that are left. All ranks take
    equally many: where the rest cannot be divided, the last round is filled up from the beginning of the rest. Those
    are the only samples that an epoch has twice. Needs hvd.init() first.

    Its iterator has a state of its own, so that torchdata's StatefulDataLoader goes on behind the batches that it has
    given out, without record_batch and whatever its workers have fetched ahead.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with all samples. Call it at the end of the epoch before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has trained on one more batch of batch_size samples. batch_idx is not needed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """{"epoch", "processed_num"}, for a checkpoint. It is the same on every rank."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on behind the samples that a checkpoint says are done."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Shares out what is left over the ranks that there are now."""
        self.num_replicas, self.rank = topology.size(), topology.rank()
        self._begun_at = self.processed_num
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return _Pass(self)

    def _mine(self) -> list[int]:
        left = self.remaining_indices
        return [left[i % len(left)] for i in range(self.rank, self.total_size, self.num_replicas)]

    def __len__(self) -> int:
        return self.num_samples


class _Pass(Iterator[int]):
    """One pass over a sampler's share, whose state says where in the epoch it stands."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._begin()

    def _begin(self) -> None:
        sampler = self._sampler
        self._indices = sampler._mine()
        self._epoch, self._begun_at, self._replicas = sampler.epoch, sampler._begun_at, sampler.num_replicas
        self._given = 0

    def __next__(self) -> int:
        if self._given == len(self._indices):
            raise StopIteration
        self._given += 1
        return self._indices[self._given - 1]

    def state_dict(self) -> dict[str, int]:
        """Which epoch, and the samples that all ranks have been given; the same on each after equally many."""
        return {"epoch": self._epoch, "processed_num": self._begun_at + self._given * self._replicas}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on behind those samples, with the ranks that there are now; not where the sampler, whose state came
        first, has begun a later epoch since."""
        if state_dict["epoch"] == self._sampler.epoch:
            self._sampler.processed_num = state_dict["processed_num"]
            self._sampler.reset()
        self._begin()
