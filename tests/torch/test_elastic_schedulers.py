"""What goes along with a model and its optimizer in a TorchState: schedulers, scalers, averages. One object, one rate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as rates
from world import ranks

import horoclone.torch as hvd


def parts(**options: Any) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, **options)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


# Whose state is more than a count of epochs, and functions that no state holds.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: rates.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CyclicLR": lambda o: rates.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 1.0, total_steps=20),
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, total_iters=2), rates.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: rates.ChainedScheduler(
        [rates.ConstantLR(o, 0.5, 2), rates.ExponentialLR(o, 0.5)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 4),
}


def rates_of(make: Callable[[Any], Any], form: Callable[[Any], Any], goes_back: bool) -> list[float]:
    """After each of six epochs; with goes_back the epochs after the second are done twice."""
    model, optimizer = parts()
    scheduler = make(optimizer)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, value=form(scheduler), epoch=0)
    seen = []

    def epoch() -> None:
        step(model, optimizer)
        scheduler.step(*([1.0] if isinstance(scheduler, rates.ReduceLROnPlateau) else []))
        state.epoch += 1

    state.sync()
    while state.epoch < 6:
        epoch()
        seen.append(optimizer.param_groups[0]["lr"])
        state.commit()
        if goes_back and state.epoch in (2, 4):
            epoch()
            epoch()
            state.restore()
            state.on_reset()
            state.sync()
            assert scheduler.optimizer is optimizer or isinstance(scheduler, rates.ChainedScheduler)
    return seen


@pytest.mark.parametrize("name", SCHEDULERS)
@ranks(2)
def test_rates_after_a_recovery_are_those_without_one(name: str) -> None:
    make = SCHEDULERS[name]
    right = rates_of(make, lambda scheduler: scheduler, False)
    assert len(set(right)) > 1
    assert rates_of(make, lambda scheduler: scheduler, True) == right
    assert rates_of(make, lambda scheduler: {"all": [scheduler]}, True) == right


@ranks(2)
def test_a_scheduler_that_was_made_before_the_optimizer_was_wrapped_still_sets_its_rate() -> None:
    model = torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = rates.ExponentialLR(plain, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    group = optimizer.param_groups[0]
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    state.sync()
    step(model, optimizer)
    scheduler.step()
    state.commit()
    scheduler.step()
    state.restore()
    assert optimizer.param_groups[0] is group and group["lr"] == 0.5
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


@ranks(2)
def test_a_scaler_an_average_and_a_schedule_of_your_own_go_along() -> None:
    class Average:
        def __init__(self, model: torch.nn.Module) -> None:
            self.model, self.parameters = model, list(model.parameters())
            self.shadow = [p.detach().clone() for p in self.parameters]

        def update(self) -> None:
            for mine, p in zip(self.shadow, self.parameters, strict=True):
                mine.lerp_(p.detach(), 0.5)

    class Warmup:
        def __init__(self, optimizer: Any) -> None:
            self.groups, self.steps = optimizer.param_groups, 0

        def step(self) -> None:
            self.steps += 1
            self.groups[0]["lr"] = 1 / self.steps

    model, optimizer = parts()
    scaler, average, warmup = torch.amp.GradScaler("cpu", init_scale=8.0), Average(model), Warmup(optimizer)
    swa = torch.optim.swa_utils.AveragedModel(model)
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, scaler=scaler, average=average, warmup=warmup, swa=swa
    )

    def train() -> None:
        step(model, optimizer)
        warmup.step()
        average.update()
        swa.update_parameters(model)
        scaler.update(scaler.get_scale() * 2)

    def now() -> Any:
        tensors = [*average.shadow, *swa.state_dict().values(), *model.parameters()]
        rate = optimizer.param_groups[0]["lr"]
        return [t.detach().tolist() for t in tensors], rate, warmup.steps, scaler.get_scale()

    scaler.scale(torch.ones(1))
    state.sync()
    train()
    state.commit()
    kept = copy.deepcopy(now())
    train()
    state.restore()
    assert now() == kept and now()[1:] == (1.0, 1, 16.0)
    state.sync()
    assert now() == kept
    assert state.average is average and average.parameters[0] is model.weight and state.scaler is scaler
    train()
    assert now()[1:] == (0.5, 2, 32.0)
    assert swa.n_averaged == 2 and state.swa is swa


@ranks(2)
def test_optimizers_and_modules_in_a_dict_stay_the_same_and_become_alike() -> None:
    generator, critic = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    with torch.no_grad():
        critic.weight += hvd.rank()
    optimizers = {
        name: hvd.DistributedOptimizer(
            torch.optim.Adam(one.parameters(), lr=0.1),
            [(f"{name}.{key}", p) for key, p in one.named_parameters()],
        )
        for name, one in (("generator", generator), ("critic", critic))
    }
    schedulers = [rates.ExponentialLR(one, 0.5) for one in optimizers.values()]
    state = hvd.elastic.TorchState(
        nets=[generator, critic], optimizers=optimizers, schedulers=schedulers, epoch=0
    )
    state.sync()
    assert len(set(map(str, hvd.allgather_object(critic.weight.tolist())))) == 1
    step(critic, optimizers["critic"])
    schedulers[1].step()
    state.commit()
    weight, moments = critic.weight.detach().clone(), copy.deepcopy(optimizers["critic"].state_dict())
    step(critic, optimizers["critic"])
    schedulers[1].step()
    state.restore()
    assert state.optimizers["critic"] is optimizers["critic"] and state.nets[1] is critic
    assert torch.equal(critic.weight, weight) and optimizers["critic"].param_groups[0]["lr"] == 0.05
    assert str(optimizers["critic"].state_dict()) == str(moments)
    assert optimizers["generator"].param_groups[0]["lr"] == 0.1


@ranks(2)
def test_a_sampler_inside_of_a_batch_sampler_shares_out_anew() -> None:
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    batches = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
    state = hvd.elastic.TorchState(batches=batches)
    sampler.record_batch(0, 2)
    state.commit()
    sampler.record_batch(1, 1)
    state.restore()
    state.on_reset()
    state.sync()
    assert state.batches is batches and batches.sampler is sampler and sampler.processed_num == 4
    assert list(batches) == [[4 + hvd.rank(), 6 + hvd.rank()]]


@ranks(2)
def test_a_scheduler_goes_to_the_disk_and_comes_back(tmp_path: Any) -> None:
    path = str(hvd.broadcast_object(tmp_path))
    right = []
    for again in (False, True):
        model, optimizer = parts()
        scheduler = rates.ExponentialLR(optimizer, 0.5)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, epoch=0)
        state.checkpoint(path, every=1)
        if again:
            assert state._disk is not None and state._disk.begin(state, 0)
        state.sync()
        if not again:
            step(model, optimizer)
            scheduler.step()
            state.commit()
            hvd.checkpoint.wait()
        right.append((scheduler.last_epoch, optimizer.param_groups[0]["lr"]))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.25
    assert right == [(1, 0.5), (1, 0.5)]
