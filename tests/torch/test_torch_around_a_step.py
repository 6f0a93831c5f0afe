"""What torch itself offers around a training step: averaged models, compilers, parametrizations, hooks, closures.

Two ranks, each with its half of the batch, in float64 beside one process with the whole batch, after every step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from world import alike, ranks

import horoclone.torch as hvd

Model = nn.Module
Loss = Callable[[Model, torch.Tensor], torch.Tensor]


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def network() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def sgd(model: Model) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def square(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Both:
    """A model on two ranks, and the same one alone."""

    def __init__(self, make: Callable[[], Any] = network, optimizer: Any = sgd, **options: Any) -> None:
        self.model, self.alone = make(), make()
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(optimizer(self.model), named, **options)
        self.optimizer_alone = optimizer(self.alone)

    def each(self) -> list[tuple[Any, Any]]:
        return [(self.model, self.optimizer), (self.alone, self.optimizer_alone)]

    def losses(self, step: int, loss: Loss = square) -> tuple[torch.Tensor, torch.Tensor]:
        of_all = [loss(self.alone, batch(step, rank)) for rank in range(hvd.size())]
        return loss(self.model, batch(step, hvd.rank())), sum(of_all) / hvd.size()  # type: ignore[return-value]

    def step(self, step: int, loss: Loss = square, to_none: bool = True, clip: float | None = None) -> None:
        for one, (model, optimizer) in zip(self.losses(step, loss), self.each(), strict=True):
            optimizer.zero_grad(set_to_none=to_none)
            one.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        self.check()

    def check(self, tolerance: float = 1e-9) -> None:
        assert alike([*self.model.parameters(), *self.model.buffers()])
        for (name, mine), wanted in zip(self.model.named_parameters(), self.alone.parameters(), strict=True):
            assert torch.allclose(mine, wanted, atol=tolerance), (name, (mine - wanted).abs().max())


@ranks(2)
def test_averaged_models() -> None:
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}
    both = Both()
    averages = [AveragedModel(model, **options) for model, _ in both.each()]
    rates = [SWALR(optimizer, 0.05, anneal_epochs=2) for _, optimizer in both.each()]
    for step in range(5):
        both.step(step)
        for (model, _), average, rate in zip(both.each(), averages, rates, strict=True):
            average.update_parameters(model)
            rate.step()
        assert alike([*averages[0].parameters(), *averages[0].buffers()])
        for mine, wanted in zip(*(average.parameters() for average in averages), strict=True):
            assert torch.allclose(mine, wanted, atol=1e-9)


@pytest.mark.parametrize(
    "what", ["model", "whole step", "step()", pytest.param("backward", marks=pytest.mark.long(20))]
)
@ranks(2, limit_s=150)
def test_compiled(what: str) -> None:
    """Dynamo follows the calls of hooks and of step(), whose operations are not to become programs of their own."""
    compiled = {"backend": "aot_eager"}
    both = Both(optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01))
    model, optimizer = both.model, both.optimizer
    forward = torch.compile(model, **compiled) if what == "model" else model
    step = torch.compile(optimizer.step, **compiled) if what == "step()" else optimizer.step

    def one(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = square(forward, x)
        if what == "backward":
            with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, **compiled)):
                loss.backward()
        else:
            loss.backward()
        step()

    run = torch.compile(one, **compiled) if what == "whole step" else one
    for number in range(4):
        run(batch(number, hvd.rank()))
        both.optimizer_alone.zero_grad()
        both.losses(number)[1].backward()
        both.optimizer_alone.step()
        both.check()


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("when", ["before the optimizer", "in training"])
@ranks(2)
def test_parametrizations(kind: str, when: str) -> None:
    """unused_as_none: in training weight_norm replaces a parameter, whose gradient is None from then on."""

    def make() -> Any:
        model = network()
        if when == "before the optimizer":
            getattr(parametrizations, kind)(model[0])
        return model

    both = Both(make, unused_as_none=True)
    for step in range(4):
        if step == 2 and when == "in training":
            for model, _ in both.each():
                getattr(parametrizations, kind)(model[0])
        if kind != "spectral_norm":
            both.step(step)
            continue
        both.optimizer.zero_grad()  # each forward moves its buffers: the process alone has other ones
        both.losses(step)[0].backward()
        both.optimizer.step()
        assert alike([*both.model.parameters(), *both.model.buffers()])


def functional(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean()


def penalised(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return square(model, x) + (gradient.square().sum(1) - 1).square().mean()


LOSSES: dict[str, Loss] = {
    "functional_call": functional,
    "gradient penalty": penalised,
}


@pytest.mark.parametrize("loss", sorted(LOSSES))
@ranks(2)
def test_losses(loss: str) -> None:
    both = Both()
    for step in range(4):
        both.step(step, LOSSES[loss])


@ranks(2)
def test_one_scaler_for_several_optimizers() -> None:
    """Clipped after unscale_(); an overflow of one rank in one model leaves out that optimizer's step everywhere."""
    both, scaler = [Both(), Both()], torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(6):
        losses = [one.losses(step + i) for i, one in enumerate(both)]
        for one in both:
            one.optimizer.zero_grad()
            one.optimizer_alone.zero_grad()
        factor = float("inf") if step == 3 and hvd.rank() == 1 else 1.0
        scaler.scale(losses[0][0] + losses[1][0] * factor).backward()
        for one in both:
            scaler.unscale_(one.optimizer)
            nn.utils.clip_grad_norm_(one.model.parameters(), 0.5)
            scaler.step(one.optimizer)
        scaler.update()
        for i, one in enumerate(both):
            losses[i][1].backward()
            nn.utils.clip_grad_norm_(one.alone.parameters(), 0.5)
            if (step, i) != (3, 1):
                one.optimizer_alone.step()
            one.check()


@pytest.mark.parametrize("what", ["clip", "scale", "after", "of all optimizers"])
@ranks(2)
def test_hooks_of_the_step(what: str) -> None:
    def before(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if what == "scale":
                parameter.grad.data.mul_(0.5)
        if what in ("clip", "of all optimizers"):
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    def after(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.mul_(0.99 if what == "after" else 1.0)

    def squared_once(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.data.square_()

    def with_a_hook_already(model: Any) -> Any:
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(squared_once)
        return optimizer

    both = Both(optimizer=with_a_hook_already)
    handle = register_optimizer_step_pre_hook(before) if what == "of all optimizers" else None
    for _, optimizer in both.each():
        optimizer.register_step_post_hook(after)
        if handle is None:
            optimizer.register_step_pre_hook(before)
    try:
        for step in range(4):
            both.step(step)
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@ranks(2)
def test_lbfgs(search: str | None) -> None:
    both = Both(optimizer=lambda m: torch.optim.LBFGS(m.parameters(), 0.5, max_iter=4, line_search_fn=search))
    for step in range(3):
        for i, (_, optimizer) in enumerate(both.each()):

            def closure(optimizer: Any = optimizer, step: int = step, i: int = i) -> torch.Tensor:
                optimizer.zero_grad()
                loss = both.losses(step)[i]
                loss.backward()
                return loss

            optimizer.step(closure)
        both.check(1e-6)


def tied() -> Any:
    model = network()
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize("make", [tied, network], ids=lambda make: make.__name__)
@ranks(2)
def test_layers_tied_frozen_and_unfrozen(make: Callable[[], Any], layer: int) -> None:
    """Frozen from the beginning, too, and clipped in the first step after that."""

    def partly_frozen() -> Any:
        model = make()
        model[layer].requires_grad_(False)
        return model

    both = Both(partly_frozen)
    for step in range(8):
        for model, _ in both.each():
            model[layer].requires_grad_(step in (2, 3, 6, 7))
        both.step(step, clip=0.1)


@pytest.mark.parametrize("moment", ["after the step", "after backward"])
@ranks(2)
def test_a_group_added_in_training(moment: str) -> None:
    both = Both(optimizer=lambda model: torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9))
    for step in range(6):
        for loss, (model, optimizer) in zip(both.losses(step), both.each(), strict=True):
            model.zero_grad()
            loss.backward()
            more = {"params": list(model[2].parameters()), "lr": 0.05}
            if step == 2 and moment == "after backward":
                optimizer.add_param_group(copy.copy(more))
            optimizer.step()
            if step == 2 and moment == "after the step":
                optimizer.add_param_group(copy.copy(more))
        both.check()


@ranks(2)
def test_a_graph_that_is_kept_for_a_second_backward() -> None:
    both = Both(backward_passes_per_step=2)
    for step in range(4):
        for loss, (_, optimizer) in zip(both.losses(step), both.each(), strict=True):
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        both.check()
    other = Both()
    loss = other.losses(0)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match=r"more than backward_passes_per_step times.*'4\.bias'"):
        loss.backward()
