"""cross_barrier: updates made when the next forward needs them, against the ordinary step: the same bits throughout."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from world import ranks, wrapped_sgd

import horoclone.torch as hvd

Model = torch.nn.Module
BETWEEN_MACHINES = {"HOROCLONE_SHARED_MEMORY": "0", "HOROCLONE_PARTITION_BYTES": "4096"}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
}


class Attention(torch.nn.Module):
    """Reads the parameters of a child whose forward is never called (out_proj), one twice, and one by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(8, 32)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.scale = torch.nn.Parameter(torch.ones(32))
        self.head = torch.nn.Linear(32, 5)
        self.unused = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tied = self.layer(self.embed(x)) @ self.embed.weight
        return self.head(self.layer(self.embed(tied)).mean(1) * self.scale)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(7919 * step + hvd.rank())
    return torch.randn(6, 3, 8, generator=chance), torch.randint(5, (6,), generator=chance)


def train(
    make: Any, across: bool, steps: int = 7, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, of training and of looks in between, and the parameters and state at the end."""
    torch.manual_seed(0)
    model = Attention()
    groups = [{"params": [*model.embed.parameters(), model.scale], "lr": 0.01}]
    groups += [{"params": [*model.layer.parameters(), *model.head.parameters(), *model.unused.parameters()]}]
    inner = make(groups)
    named = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(inner, named, cross_barrier=model if across else None, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    losses = []
    for step in range(steps):
        optimizer.zero_grad() if step % 2 else model.zero_grad(set_to_none=False)
        images, labels = batch(step)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == 4:
            model.eval()
            with torch.no_grad():
                losses.append(F.cross_entropy(model(images), labels).item())
            model.train()
        if step == 5:
            losses.append(sum(p.abs().sum().item() for p in model.state_dict().values()))
    state = optimizer.state_dict()["state"]
    optimizer.synchronize() if across else None
    return losses, {
        **{name: p.detach().clone() for name, p in named},
        **{
            f"{i} {k}": torch.as_tensor(v)
            for i, one in state.items()
            for k, v in one.items()
            if v is not None
        },
    }


def compare(make: Any, **options: Any) -> None:
    with mock.patch.multiple("horoclone.torch.optimizer.buckets", FIRST_BUCKET_BYTES=2048, BUCKET_BYTES=9000):
        losses, end = train(make, False, **options)
        found, found_end = train(make, True, **options)
    assert found == losses
    assert end.keys() == found_end.keys()
    assert not [name for name in end if not torch.equal(end[name], found_end[name])]


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2, env=BETWEEN_MACHINES)
def test_losses_parameters_and_state_are_those_of_the_ordinary_step(name: str) -> None:
    compare(OPTIMIZERS[name])


@ranks(2)
def test_the_same_where_ranks_share_memory_and_with_fp16_on_the_wire() -> None:
    compare(OPTIMIZERS["sgd"], compression=hvd.Compression.fp16)


@ranks(3, env={**BETWEEN_MACHINES, "HOROCLONE_FUSION_THRESHOLD": "0"})
def test_the_same_in_a_ring_of_three() -> None:
    compare(OPTIMIZERS["adamw"])


@ranks(2)
def test_what_needs_all_gradients_at_once_is_refused_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    optimizer: Any = wrapped_sgd(model, cross_barrier=model)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="synchronized, clipped or read"):
            optimizer.synchronize()
        with pytest.raises(RuntimeError, match="closure"):
            optimizer.step(lambda: torch.zeros(()))
        with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="taken as they are"):
            optimizer.step()
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    hook = optimizer.register_step_post_hook(lambda *_: None)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="hooks of a step"):
        optimizer.step()
    hook.remove()
    optimizer.step()
    optimizer.synchronize()
    total = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(hvd.allgather(total[None]), total.expand(hvd.size(), -1))
    model(torch.ones(2, 4)).sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="unscaled"):
        scaler.step(optimizer)


@ranks(2)
def test_wrong_arguments_are_named() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def wrap(optimizer: Any, **options: Any) -> None:
        hvd.DistributedOptimizer(optimizer, **{"cross_barrier": model, **options})

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="LBFGS"):
        wrap(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="the model, or a list"):
        wrap(sgd, cross_barrier=[])
    with pytest.raises(ValueError, match="none of these modules"):
        wrap(sgd, cross_barrier=other)
    for name, value in (("shard_optimizer_state", True), ("unused_as_none", True), ("op", hvd.Adasum)):
        with pytest.raises(ValueError, match=f"together with {name}"):
            wrap(sgd, **{name: value})


@ranks(2, env=BETWEEN_MACHINES)
def test_a_parameter_read_past_its_module_is_told_and_not_silently_stale() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    optimizer = wrapped_sgd(model, cross_barrier=model)
    for _ in range(2):
        model["b"](model["a"](torch.ones(1, 4))).sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="cross_barrier: or a parameter is read by no module's forward"):
        F.linear(F.linear(torch.ones(1, 4), model["a"].weight), model["b"].weight).sum().backward()


@ranks(2, env=BETWEEN_MACHINES, dies=[1], limit_s=90)
def test_a_peer_that_dies_while_updates_are_owed_is_named_by_the_forward_that_waits() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 512))
    optimizer = wrapped_sgd(model, cross_barrier=model)
    for step in range(4):
        loss = model(torch.ones(2, 64)).sum()
        if step == 3 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
    with pytest.raises(hvd.PeerLost) as caught:
        model(torch.ones(2, 64))
    assert caught.value.rank == 1
