"""Batches shared out by speed: a rank of half the speed takes half as many samples of each.

Each rank measures its own time, all but what it waits for others in operations, in cycles of three times `every`
batches: in the first third the new shares begin, and batches that a DataLoader fetched ahead still have the old ones;
in the second the rank measures; in the last its speed is under way in a small asynchronous allreduce, for which nobody
waits. So shares change at the same batch everywhere, and a measured time never belongs to other shares than its
samples.
Thread: the one that draws batches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from horoclone.ops import Sum
from horoclone.runtime import topology
from horoclone.runtime.observe import metrics
from horoclone.torch import operations

__all__ = ["LoadBalancedBatchSampler"]

# Less is no measurement: all batches were fetched ahead at once, or another thread has waited meanwhile. Speeds stay.
MEASURED_S = 1e-3


class LoadBalancedBatchSampler(torch.utils.data.Sampler[list[int]]):
    """The indices of this rank's part of each batch, for a DataLoader's `batch_sampler`; fast ranks have larger parts.

    dataset: anything with a length. batch_size: samples of all ranks together, at least one for each. every: a third of
    the batches from one set of shares to the next; at least as many as DataLoader workers fetch ahead. shuffle: a new
    order in each epoch (set_epoch), from `seed`. Each sample is on one rank, once in an epoch; of the last batch those
    are left out that are fewer than ranks. Parts differ in size, so give it as the weight of each step:
    `optimizer.set_weight(len(part))`. What a rank does outside of horoclone's operations counts as its time, from one
    batch to the next; what it does between two epochs does not. On GPUs where NCCL reduces, a rank waits for others on
    the device, which counts as its own time: there shares stay as they are. All ranks have equally many batches, and
    need equal arguments and as many workers. Needs hvd.init() first; in an elastic job make a new one, and its
    DataLoader, in the reset callback. ValueError for a batch_size below the number of ranks, or every below 1;
    RuntimeError from iteration where the ranks are others than when it was made.
    """

    def __init__(
        self, dataset: Sized, batch_size: int, every: int = 20, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._size, self._rank = topology.size(), topology.rank()
        if batch_size < self._size:
            raise ValueError(
                f"LoadBalancedBatchSampler: batch_size={batch_size} is of all ranks together, at least {self._size}"
            )
        if every < 1:
            raise ValueError(f"LoadBalancedBatchSampler: every={every} must be at least 1")
        self.dataset, self.batch_size, self.every = dataset, batch_size, every
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._speeds = [1.0] * self._size
        self._drawn = 0  # batches
        self._samples, self._own_s = 0, 0.0  # of this rank while it measures
        self._since = 0.0
        self._told: Any = None  # the handle of what all have said

    @property
    def shares(self) -> list[int]:
        """How many samples of a whole batch each rank has now."""
        return shared(self.batch_size, self._speeds)

    def set_epoch(self, epoch: int) -> None:
        """The number of the epoch, from which its order follows."""
        self.epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest >= self._size)

    def __iter__(self) -> Iterator[list[int]]:
        if (now := (topology.size(), topology.rank())) != (self._size, self._rank):
            raise RuntimeError(
                f"LoadBalancedBatchSampler: made for rank {self._rank} of {self._size}, and this is rank {now[1]} of "
                f"{now[0]} now: make a new one, and a new DataLoader for it, in the reset callback"
            )
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self._since = _own_time()
        for number in range(len(self)):
            if self._drawn % self.every == 0:
                self._begin_third(self._drawn // self.every % 3)
            self._drawn += 1
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            parts = shared(len(batch), self._speeds)
            begin = sum(parts[: self._rank])
            self._samples += parts[self._rank]
            yield batch[begin : begin + parts[self._rank]]
        self._measure()

    def _measure(self) -> None:
        now = _own_time()
        self._own_s, self._since = self._own_s + now - self._since, now

    def _begin_third(self, third: int) -> None:
        self._measure()
        if third == 0 and self._told is not None:
            speeds = operations.synchronize(self._told).tolist()
            self._told = None
            if min(speeds) > 0:
                self._speeds = speeds
        elif third == 1:
            self._samples, self._own_s = 0, 0.0
        elif third == 2:
            speed = self._samples / self._own_s if self._own_s > MEASURED_S else 0.0
            mine = torch.zeros(self._size, dtype=torch.float64, device="cpu")
            mine[self._rank] = speed
            # Without a name: scripts may have several samplers
            self._told = operations.allreduce_async_(mine, op=Sum)


def shared(count: int, speeds: Sequence[float]) -> list[int]:
    """`count` samples in parts that are as proportional to the speeds as they can be, with one sample at least."""
    exact = [count * speed / sum(speeds) for speed in speeds]
    parts = [max(1, int(one)) for one in exact]
    while (left := count - sum(parts)) != 0:
        # One sample more to the part that lacks most, or one less of the part that has most too many.
        off = [(part - one) * (1 if left > 0 else -1) for part, one in zip(parts, exact, strict=True)]
        able = [i for i, part in enumerate(parts) if left > 0 or part > 1]
        parts[min(able, key=lambda i: (off[i], i))] += 1 if left > 0 else -1
    return parts


def _own_time() -> float:
    """Seconds, without those in which this process waited for others."""
    waiting = metrics()["waiting"]
    return time.perf_counter() - waiting["for_peers_seconds"] - waiting["for_transfer_seconds"]
