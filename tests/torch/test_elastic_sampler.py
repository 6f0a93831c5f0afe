"""hvd.elastic.ElasticSampler as a sampler of an ordinary job: shares, epochs, and going on from a checkpoint."""

from __future__ import annotations

import torch
from world import ranks

import horoclone.torch as hvd


@ranks(1, 3)
def test_the_ranks_share_an_epoch_and_every_epoch_has_its_own_order() -> None:
    data = list(range(20))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=3)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        mine = list(sampler)
        assert len(mine) == len(sampler) == -(-20 // hvd.size())
        everybody = hvd.allgather(torch.tensor(mine)).tolist()
        assert set(everybody) == set(data)
        orders.append(everybody)
    assert orders[0] != orders[1]
    plain = hvd.elastic.ElasticSampler(data, shuffle=False)
    assert next(iter(plain)) == hvd.rank() and isinstance(plain, torch.utils.data.Sampler)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=plain)
    assert sum(len(batch) for batch in loader) == len(plain)


@ranks(2)
def test_a_checkpoint_goes_on_with_the_samples_that_are_left_also_with_more_ranks() -> None:
    data = list(range(21))
    sampler = hvd.elastic.ElasticSampler(data, seed=1)
    sampler.set_epoch(5)
    done = list(sampler)[:4]
    for batch in range(2):
        sampler.record_batch(batch, 2)
    state = sampler.state_dict()
    assert state == {"epoch": 5, "processed_num": 8}
    again = hvd.elastic.ElasticSampler(data, seed=1)
    again.load_state_dict(state)
    left = hvd.allgather(torch.tensor(list(again))).tolist()
    seen = hvd.allgather(torch.tensor(done)).tolist()
    assert set(seen) | set(left) == set(data) and not set(seen) & set(left)
    again.processed_num = 20
    again.reset()
    assert len(again) == 1 and len(list(again)) == 1  # one sample left, and both ranks take it
    again.processed_num = 21
    again.reset()
    assert len(again) == 0 and list(again) == []
    for world in (2, 3):  # the same bookkeeping in worlds of other sizes, without starting them
        again.processed_num, again.remaining_indices = 0, data[:2]
        again.num_replicas, again.num_samples, again.total_size = world, 1, world
        again.rank = world - 1
        assert list(again) == [data[(world - 1) % 2]]
