"""The same training run twice gives the same bits, however the ranks' timing differs between the runs."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

import horoclone.torch as hvd

STEPS = 6


def trained(delays: random.Random) -> list[torch.Tensor]:
    """Parameters after a few steps; `delays` says how long each hook, backward and step of this rank is held up."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96) for _ in range(5)]
    model = torch.nn.Sequential(
        *(m for layer in layers for m in (layer, torch.nn.Tanh())), torch.nn.Linear(96, 4)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def hold_up(*_: object) -> None:
        if delays.random() < 0.5:
            time.sleep(delays.random() * 0.002)

    for parameter in model.parameters():
        parameter.register_hook(hold_up)
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        x = torch.randn(8, 96, generator=data)
        optimizer.zero_grad()
        model(x).square().sum().backward()
        hold_up()
        optimizer.step()
        # Other operations of the user's, which must not be fused with the gradients in one run and not in the other.
        hvd.synchronize(hvd.allreduce_async(x.mean(), name="metric"))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared", "tcp"])
def test_the_same_bits(worlds: Any, shared: str) -> None:
    worlds.run(3, check_runs, env={"HOROCLONE_SHARED_MEMORY": shared})


def check_runs() -> None:
    first = trained(random.Random(hvd.rank()))
    for run in range(1, 4):
        again = trained(random.Random(1000 * run + hvd.rank()))
        different = [i for i, (a, b) in enumerate(zip(first, again, strict=True)) if not torch.equal(a, b)]
        assert not different, (run, different)
    everybody = hvd.allgather(torch.cat([p.flatten() for p in first]).unsqueeze(0))
    assert all(torch.equal(row, everybody[0]) for row in everybody)
    torch.manual_seed(0)
    assert not torch.equal(first[0], torch.nn.Linear(96, 96).weight)  # where it began
