"""Batches shared out by speed: as many samples as a rank is fast, each once, and the mean of one process."""

from __future__ import annotations

import random
import time
from collections import deque
from unittest import mock

import pytest
import torch
from world import ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone.torch import load_balance
from horoclone.torch.load_balance import shared


def test_parts_are_proportional_and_never_empty() -> None:
    assert (
        shared(30, [1, 1]) == [15, 15] and shared(30, [2, 1]) == [20, 10] and shared(31, [1, 1, 1])[0] == 11
    )
    assert shared(3, [100, 1, 1]) == [1, 1, 1] and shared(10, [1e-9, 1.0]) == [1, 9]
    choice = random.Random(0)
    for _ in range(500):
        size = choice.randint(1, 8)
        count, speeds = choice.randint(size, 99), [choice.random() ** 8 + 1e-9 for _ in range(size)]
        parts = shared(count, speeds)
        assert sum(parts) == count and min(parts) >= 1
        for part, speed in zip(parts, speeds, strict=True):
            assert part <= max(1, 1 + count * speed / sum(speeds)), (count, speeds, parts)


@ranks(2, limit_s=120)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_of_half_the_speed_takes_half_and_training_is_that_of_one_process(workers: int) -> None:
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(203, 6, generator=chance, dtype=torch.float64)
    y = torch.randn(203, 1, generator=chance, dtype=torch.float64)
    torch.manual_seed(0)
    model, alone = (torch.nn.Linear(6, 1).double() for _ in range(2))
    alone.load_state_dict(model.state_dict())
    hvd.broadcast_parameters(model.state_dict(), 0)
    alone.load_state_dict(model.state_dict())
    optimizer = wrapped_sgd(model)
    single = torch.optim.SGD(alone.parameters(), lr=0.1)
    sampler = hvd.LoadBalancedBatchSampler(range(203), batch_size=30, every=4)
    data = torch.utils.data.DataLoader(range(203), batch_sampler=sampler, num_workers=workers)
    loss, seen = torch.nn.MSELoss(), []
    assert sampler.shares == [15, 15] and len(data) == 7
    for epoch in range(2):
        sampler.set_epoch(epoch)
        mine = []
        for part in data:
            mine.append(part)
            time.sleep(0.004 * len(part) * (1 + hvd.rank()))  # this rank's speed
            optimizer.zero_grad()
            optimizer.set_weight(len(part))
            loss(model(x[part]), y[part]).backward()
            optimizer.step()
        parts = hvd.allgather_object([part.tolist() for part in mine], name="parts")
        whole = [[i for part in batch for i in part] for batch in zip(*parts, strict=True)]
        assert sorted(i for batch in whole for i in batch) == list(range(203))
        seen += whole
    for batch in seen:
        single.zero_grad()
        loss(alone(x[batch]), y[batch]).backward()
        single.step()
    assert torch.allclose(model.weight, alone.weight, rtol=1e-12, atol=1e-13)
    assert sampler.shares[0] > sampler.shares[1] and sum(sampler.shares) == 30, sampler.shares
    assert len(set(map(str, hvd.allgather_object(sampler.shares)))) == 1


@ranks(2)
@pytest.mark.parametrize("ahead", [0, 1, 12, 20])
def test_shares_are_those_of_the_speeds_whatever_was_fetched_ahead(ahead: int) -> None:
    """Two samplers at once, rank 1 of half the speed; the clock is one that only computing moves."""
    clock = [0.0]
    with mock.patch.object(load_balance, "_own_time", lambda: clock[0]):
        two = [hvd.LoadBalancedBatchSampler(range(60 * 400), batch_size=60, every=20) for _ in range(2)]
        fetched: deque[int] = deque()
        found = []
        for parts in zip(*two, strict=True):
            fetched.append(sum(map(len, parts)))
            found.append(two[0].shares)
            assert two[1].shares == found[-1]
            if len(fetched) > ahead:
                clock[0] += fetched.popleft() * (1 + hvd.rank())
    assert found[0] == [30, 30] and all(one == [40, 20] for one in found[61:]), found


@ranks(2)
def test_a_time_that_was_not_measured_changes_nothing() -> None:
    clock = [0.0]
    with mock.patch.object(load_balance, "_own_time", lambda: clock[0]):
        sampler = hvd.LoadBalancedBatchSampler(range(60), batch_size=4, every=2)
        for _ in sampler:
            clock[0] += hvd.rank()  # none on rank 0
        assert sampler.shares == [2, 2]


@ranks(2)
def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=1 is of all ranks together, at least 2"):
        hvd.LoadBalancedBatchSampler(range(5), batch_size=1)
    with pytest.raises(ValueError, match="every=0"):
        hvd.LoadBalancedBatchSampler(range(5), batch_size=2, every=0)
    assert len(hvd.LoadBalancedBatchSampler(range(5), batch_size=4)) == 1  # one is left over for two ranks
    assert [len(part) for part in hvd.LoadBalancedBatchSampler(range(6), batch_size=4)] == [2, 1]
    other = hvd.LoadBalancedBatchSampler(range(6), batch_size=4)
    other._size = 3  # as after a reset
    with pytest.raises(
        RuntimeError, match="made for rank . of 3, and this is rank . of 2 now: make a new one"
    ):
        next(iter(other))
