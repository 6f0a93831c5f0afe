"""torchdata's StatefulDataLoader over an ElasticSampler goes on exactly where it stood, with any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from world import ranks

import horoclone.torch as hvd
from horoclone.runtime import topology

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")


def loader(workers: int = 0, length: int = 300, **options: Any) -> Any:
    sampler = hvd.elastic.ElasticSampler(range(length), seed=1)
    return stateful.StatefulDataLoader(range(length), 2, sampler=sampler, num_workers=workers, **options)


@pytest.mark.parametrize(("workers", "records"), [(0, True), (2, False)])
def test_a_checkpoint_goes_on_behind_the_batches_given_out_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch, workers: int, records: bool
) -> None:
    """Its workers have fetched further, and whoever calls record_batch all the same changes nothing."""
    place = {"size": 3, "rank": 0}
    monkeypatch.setattr(topology, "size", lambda: place["size"])
    monkeypatch.setattr(topology, "rank", lambda: place["rank"])
    seen, states = [], []
    for place["rank"] in range(3):
        before = loader(workers)
        batches = iter(before)
        for index in range(7):
            seen += next(batches).tolist()
            if records:
                before.sampler.record_batch(index, 2)
        states.append(copy.deepcopy(before.state_dict()))
    place["size"] = 2
    for place["rank"] in range(2):
        again = loader(workers)
        again.load_state_dict(copy.deepcopy(states[0]))
        seen += [sample for batch in again for sample in batch.tolist()]
    assert sorted(seen) == list(range(300))


@ranks(2)
def test_a_state_goes_back_and_on_within_an_epoch_and_over_its_end() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader(), epoch=0)
    assert state.loader._iterator is None, "it has not begun: set_epoch may still come"
    order = [batch.tolist() for batch in loader()]
    batches = iter(state.loader)
    assert [next(batches).tolist() for _ in range(3)] == order[:3]
    state.commit()
    next(batches)
    state.restore()
    assert [batch.tolist() for batch in state.loader] == order[3:]
    state.restore()
    state.restore()  # twice, and not begun in between
    state.reset()
    assert [batch.tolist() for batch in state.loader] == order[3:]
    state.loader.sampler.set_epoch(1)
    state.commit()  # between the epochs: the pass is over, and its end is not the next one's
    state.restore()
    second = [batch.tolist() for batch in state.loader]
    assert len(second) == len(order) and second != order
    state.sync()
    assert [batch.tolist() for batch in state.loader] == []


@ranks(1)
def test_a_loader_whose_order_cannot_be_shared_out_anew_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    plain = stateful.StatefulDataLoader(range(10), 2, shuffle=True)
    with pytest.raises(ValueError, match="RandomSampler, which cannot be shared out anew"):
        hvd.elastic.TorchState(model=model, loader=plain)
