"""Gradient scaling as people write it: plain `scaler.step(optimizer)`, and synchronize / skip_synchronize."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from world import alike, ranks

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
