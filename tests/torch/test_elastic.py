"""hvd.elastic.TorchState and hvd.elastic.run on real ranks: what is saved, restored, synchronised and trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from world import ranks

import horoclone.torch as hvd
from horoclone.elastic import replicas
from horoclone.elastic import state as elastic_state
from horoclone.elastic.generation import Generation
from horoclone.elastic.run import run_fn
from horoclone.torch.elastic import state as torch_state
from horoclone.torch.elastic.state import (
    ModelStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)


def parts(seed: int = 0, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return model, torch.optim.Adam(model.parameters(), lr=0.1, **options)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(4, 3) + hvd.rank()).square().sum().backward()
    optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for one in optimizer.state.values() for value in one.values()]
    return [t.detach().clone().float() for t in (*model.state_dict().values(), *moments)]


def alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@ranks(1)
def test_a_restore_gives_weights_buffers_moments_and_attributes_back() -> None:
    model, optimizer = parts()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, log=[])
    assert state.model is model and state.optimizer is optimizer
    fresh = everything(model, optimizer)
    step(model, optimizer)
    state.restore()
    assert alike(everything(model, optimizer), fresh) and not optimizer.state
    step(model, optimizer)
    state.epoch, kept = 1, everything(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    state.commit()
    for _ in range(2):
        step(model, optimizer)
        state.log.append("x")
        optimizer.param_groups[0]["lr"] = 9.0
        state.restore()
        assert alike(everything(model, optimizer), kept) and state.log == []
        assert optimizer.param_groups[0]["lr"] == 0.05


class Counting(torch.nn.Module):
    """Has extra state, which torch gives a module as it is."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(2)), seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@ranks(2)
def test_extra_state_is_restored_as_often_as_wanted_and_synchronised() -> None:
    listed, counted = Counting([hvd.rank()]), Counting(torch.tensor([hvd.rank()]))
    state = hvd.elastic.TorchState(listed=listed, counted=counted)
    state.sync()
    for _ in range(3):
        assert listed.seen == [0] and counted.seen.tolist() == [0]
        listed.seen.append(1)
        counted.seen += 1
        state.restore()


@ranks(1)
def test_the_commit_before_is_kept_whole() -> None:
    model, optimizer = parts()
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    state.sync()
    copies = {}
    for state.epoch in (2, 3):
        step(model, optimizer)
        state.commit()
        copies[state._commit_number] = everything(model, optimizer)
    step(model, optimizer)
    state._step_back(2)
    assert state.epoch == 2 and alike(everything(model, optimizer), copies[2])
    step(model, optimizer)
    state.restore()
    assert alike(everything(model, optimizer), copies[2])


@ranks(1)
def test_moments_in_float32_stay_so_beside_16_bit_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((2,), 1.0001)
    state = hvd.elastic.TorchState(optimizer=optimizer)
    state.restore()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((2,), 1.0001))


@ranks(1)
def test_another_object_takes_the_place_of_the_old_one() -> None:
    model, optimizer = parts()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    other, _ = parts(7)
    state.model = other
    kept = [p.detach().clone() for p in other.parameters()]
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    state.restore()
    assert state.model is other and alike([p.detach() for p in other.parameters()], kept)


@ranks(1)
def test_values_of_other_kinds_are_handled_by_handlers_of_your_own() -> None:
    class Counter:
        count = 0

    class CounterHandler(StateHandler):
        def __init__(self, value: Counter) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self._saved = self.value.count

        def restore(self) -> None:
            self.value.count = self._saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    before = get_handler_registry()
    assert (torch.nn.Module, ModelStateHandler) in before
    try:
        set_handler_registry([(Counter, CounterHandler), *before])
        counter = Counter()
        state = hvd.elastic.TorchState(model=parts()[0], counter=counter)
        state.sync()
        for counter.count in (2, 3):
            state.commit()
        counter.count = 4
        state._step_back(2)
        assert counter.count == 2 and state.counter is counter
    finally:
        set_handler_registry(before)


@ranks(2)
def test_sync_gives_what_the_root_has_now_and_ends_in_a_commit() -> None:
    for root in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            for module in (elastic_state, torch_state):
                patch.setattr(module, "root_of_sync", lambda root=root: root)
            model, optimizer = parts(hvd.rank())
            sampler = hvd.elastic.ElasticSampler(range(20))
            state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, log=[])
            if hvd.rank() == root:
                step(model, optimizer)
                state.epoch, state.log = 3, ["live"]
                sampler.record_batch(0, 4)
            state.sync()
            assert (state.epoch, state.log, sampler.processed_num) == (3, ["live"], 8)
            mine = everything(model, optimizer)
            for theirs in hvd.allgather_object(mine):
                assert alike(mine, theirs)
            if hvd.rank() != root:  # a newcomer that fails before its first commit
                with torch.no_grad():
                    next(model.parameters()).zero_()
                state.epoch = 9
            state.restore()
            assert (
                alike(everything(model, optimizer), mine) and state.epoch == 3 and state._commit_number == 1
            )


@ranks(2)
def test_a_notice_that_one_rank_has_heard_interrupts_all_at_the_same_commit() -> None:
    state = hvd.elastic.TorchState(epoch=0)
    state.sync()
    if hvd.rank() == 1:
        state.on_hosts_updated(5, 1)
    with pytest.raises(hvd.HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync and state._last_updated_timestamp == 5
    state.commit()


@ranks(2)
def test_training_goes_on_in_the_same_process_after_a_failure_in_the_middle_of_a_step() -> None:
    """Both ranks fail between backward and step, with gradients on their way; the optimizer begins anew."""
    model, plain = parts(hvd.rank())
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(16), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
    failures = [hvd.HorovodInternalError("a double of a loss"), hvd.HostsUpdatedInterrupt(False)]
    seen: list[int] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: Any) -> int:
        for sample in list(sampler)[state.batch :] if not seen else list(sampler):
            optimizer.zero_grad()
            model(
                torch.full((4, 3), float(sample)) + torch.arange(12.0).reshape(4, 3)
            ).square().sum().backward()
            if state.batch == 3 and failures:
                raise failures.pop(0)
            optimizer.step()
            seen.append(sample)
            state.batch += 1
            sampler.record_batch(0, 1)
            state.commit()
        return state.batch

    assert train(state) == 8 and sorted(seen) == list(range(hvd.rank(), 16, 2))
    assert resets == [2, 2] and not failures
    mine = [p.detach() for p in model.parameters()]
    assert all(alike(mine, theirs) for theirs in hvd.allgather_object(mine))
    assert hvd.elastic.generation() == Generation(1, hvd.rank(), 2, (0, 1), 0, 0, False, ())


@ranks(2)
def test_sharded_state_is_committed_whole_and_restored() -> None:
    model, plain = parts()
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), shard_optimizer_state=True)
    state = hvd.elastic.TorchState(model, optimizer)
    state.sync()
    for _ in range(3):
        step(model, optimizer)
    state.commit()
    kept = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer)
    after = [p.detach().clone() for p in model.parameters()]
    state.restore()
    assert alike([p.detach() for p in model.parameters()], kept)
    step(model, optimizer)
    assert all(
        torch.allclose(a, p.detach(), atol=1e-6) for a, p in zip(after, model.parameters(), strict=True)
    )
    state.sync()


@ranks(2)
def test_states_that_differ_are_named_on_every_rank_and_nothing_hangs() -> None:
    """Their broadcasts would find no partner."""

    def refused(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **attributes: Any) -> str:
        with pytest.raises(
            ValueError, match=r"ranks \[1\] differ from those of rank 0 .*Build the same"
        ) as caught:
            hvd.elastic.TorchState(model, optimizer, **attributes).sync()
        return str(caught.value)

    odd = hvd.rank() == 1
    layers = [torch.nn.Linear(3, 2), *([torch.nn.Linear(2, 2)] if odd else [])]
    model = torch.nn.Sequential(*layers)
    said = refused(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "('model.1.weight', 'torch.float32', (2, 2))" in said
    model, _ = parts()
    groups: Any = [{"params": [p]} for p in model.parameters()] if odd else model.parameters()
    assert "('optimizer', 'SGD', 'groups of', [1, 1, 1, 1])" in refused(
        model, torch.optim.SGD(groups, lr=0.1)
    )
    assert "('optimizer', 'Adam', " in refused(
        model, (torch.optim.Adam if odd else torch.optim.SGD)(model.parameters())
    )
    more = {"seen": 0} if odd else {}
    assert "('attribute', 'seen')" in refused(*parts(), epoch=0, **more)
    state = hvd.elastic.TorchState(*parts(), epoch=hvd.rank())
    state.sync()
    assert state.epoch == 0


@ranks(2)
def test_a_sync_copies_the_model_and_the_optimizer_once() -> None:
    """A second copy of 100 MB makes the pause of growing longer for nothing."""
    saves: list[str] = []

    class Counted(ModelStateHandler):
        def save(self) -> None:
            saves.append("save")
            super().save()

    model, optimizer = parts(hvd.rank())
    step(model, optimizer)
    state = hvd.elastic.TorchState(model, optimizer, epoch=hvd.rank())
    state._handlers = {**state._handlers, "model": Counted(model)}
    saves.clear()
    state.sync()
    assert saves == ["save"] and state._commit_number == 1
    kept = everything(model, optimizer)
    step(model, optimizer)
    state.restore()
    assert alike(everything(model, optimizer), kept) and state.epoch == 0
    step(model, optimizer)
    state.commit()
    assert saves == ["save"] * 2


def survives() -> str:
    """Rank 1 ends in the middle of a step; rank 0 restores, begins a world of its own, and trains on."""
    import os

    model, plain = parts(hvd.rank())
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, steps=0)
    ended = []

    def alone() -> None:
        ended.append(hvd.rank())
        hvd.shutdown()
        hvd.init(comm=[0])

    def train(state: Any) -> list[int]:
        while state.steps < 8:
            optimizer.zero_grad()
            model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
            if hvd.rank() == 1 and state.steps == 5:
                os._exit(3)
            optimizer.step()
            state.steps += 1
            state.commit()
        return [state.steps, hvd.size()]

    assert run_fn(train, alone)(state) == [8, 1] and ended == [0]
    return "done"


def test_a_survivor_trains_on_in_the_same_process_with_the_same_optimizer(worlds: Any) -> None:
    assert worlds.run(2, survives, dies=[1])[0] == "done"


@ranks(1)
def test_a_commit_that_was_sent_to_a_spare_is_the_same_there() -> None:
    """Weights of all kinds, moments, options and attributes; the tensors are the spare's own."""
    from horoclone.elastic.replicas import packed, unpacked

    model, optimizer = parts()
    state = hvd.elastic.TorchState(
        model, optimizer, half=torch.ones(3).bfloat16(), none=torch.empty(0), log=[1]
    )
    for _ in range(2):
        step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    state.commit()
    content = unpacked([bytearray(part) for part in packed(state._slots[1])])
    others = parts(seed=1)
    other = hvd.elastic.TorchState(*others, half=None, none=None, log=None)
    assert other._accepts(content) and not hvd.elastic.TorchState(model)._accepts(content)
    other._set_content(content)
    other.restore()
    assert alike(everything(*others), everything(model, optimizer)) and other.log == [1]
    assert others[1].param_groups[0]["lr"] == 0.05
    assert (
        other.half.dtype == torch.bfloat16 and other.half.tolist() == [1, 1, 1] and other.none.shape == (0,)
    )
    for one in ((model, optimizer), others):
        step(*one)
    assert alike(everything(*others), everything(model, optimizer))
    other.restore()
    assert other.half.tolist() == [1, 1, 1]


def test_a_newcomer_that_has_a_commit_copies_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stand still while it makes its state."""
    model = torch.nn.Linear(3, 2)

    def is_copied() -> bool:
        return ModelStateHandler(model)._saved_model_state["weight"].data_ptr() != model.weight.data_ptr()

    assert is_copied()
    monkeypatch.setattr(replicas.process, "holds_replica", lambda: True)
    assert not is_copied()
    handler = ModelStateHandler(model)
    handler.restore()
    handler.save()
    torch.nn.init.zeros_(model.weight)
    handler.restore()
    assert model.weight.any()
