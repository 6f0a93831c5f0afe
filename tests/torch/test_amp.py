"""Gradient scaling as people write it: plain `scaler.step(optimizer)`, and synchronize / skip_synchronize."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from world import alike, ranks, wrapped_sgd

import horoclone.torch as hvd


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)


def pair(unused: bool = False, **options: Any) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    if unused:
        model.unused = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, **options)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for part in list(model.children())[:3]:
            x = part(x)
    return x.float().square().mean()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allgather(tensor.detach().flatten().unsqueeze(0).contiguous())


@ranks(1, 3)
def test_plain_scaler_step_reduces_before_it_unscales() -> None:
    for unused in (False, True):
        for options in ({}, {"fused": True}):
            model, optimizer = pair(unused, **options)
            reference, other = pair(unused, **options)
            scale = scaler()
            for step in range(5):
                optimizer.zero_grad()
                scale.scale(loss_of(model, step)).backward()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    scale.step(optimizer)
                scale.update()
                other.zero_grad()
                loss_of(reference, step).backward()
                other.step()
            assert alike(model.parameters())
            for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), (unused, options)


@ranks(3)
def test_infinity_on_one_rank_makes_every_rank_skip_the_step() -> None:
    for style in ("plain", "explicit"):
        model, optimizer = pair()
        scale = scaler()
        for step in range(5):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step in (0, 3) and hvd.rank() == hvd.size() - 1:
                loss = loss * float("inf")
            scale.scale(loss).backward()
            if style == "plain":
                scale.step(optimizer)
            else:
                optimizer.synchronize()
                if step not in (0, 3):
                    scale.unscale_(optimizer)
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    assert len(set(gathered(norm).flatten().tolist())) == 1, "of the averages"
                with warnings.catch_warnings(), optimizer.skip_synchronize():
                    warnings.simplefilter("error")
                    scale.step(optimizer)
            scale.update()
            assert torch.equal(model[0].weight, before) == (step in (0, 3)), (style, step)
        assert len(set(gathered(torch.tensor(scale.get_scale()).view(1)).flatten().tolist())) == 1
        assert scale.get_scale() == 256.0 and alike(model.parameters())


@ranks(2)
def test_reading_param_groups_reduces_only_when_every_gradient_has_come() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = wrapped_sgd(model, backward_passes_per_step=2)
    x = torch.full((2, 4), 1.0 + hvd.rank())
    for step in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        if hvd.rank() == 0:
            assert (
                optimizer.param_groups[0]["lr"] == 0.1
            )  # one rank only, half way: must not wait for the others
        model(x).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if hvd.rank() == 0 or step == 2:
                assert optimizer.param_groups[0]["lr"] == 0.1  # everything has come: reduced now or in step()
            optimizer.step()
        rows = gathered(model[0].weight.grad)
        assert torch.equal(rows[0], rows[1])
    assert alike(model.parameters())
