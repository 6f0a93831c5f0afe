"""The same training run twice gives the same bits, however the ranks' timing differs between the runs."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
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


def train(topology: str, cpus: list[int]) -> list[float]:
    """The parameters after some steps of ranks of which two run on each CPU."""
    import torch

    import horoclone.torch as hvd

    before = os.sched_getaffinity(0)
    os.environ["HOROCLONE_TOPOLOGY"] = topology
    try:
        os.sched_setaffinity(0, {cpus[int(os.environ["HOROCLONE_RANK"]) // 2 % 2]})
        hvd.init()
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Tanh(), torch.nn.Linear(500, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        mine = torch.Generator().manual_seed(hvd.rank())
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(16, 300, generator=mine)).square().mean().backward()
            optimizer.step()
        return [float(number) for p in model.parameters() for number in p.detach().flatten()[:2000]]
    finally:
        os.sched_setaffinity(0, before)


def test_four_ranks_on_two_sockets_train_one_model(worlds, tmp_path):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    for number, cpu in enumerate(cpus):
        for name, text in (
            (f"cpu/cpu{cpu}/topology/physical_package_id", number),
            (f"cpu/cpu{cpu}/topology/package_cpus_list", cpu),
            (f"node/node{number}/cpulist", cpu),
        ):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    by_levels = worlds.run(4, train, init=False, topology=str(tmp_path), cpus=cpus)
    flat = worlds.run(4, train, init=False, topology="off", cpus=cpus)
    assert all(one == by_levels[0] for one in by_levels)
    assert all(one == flat[0] for one in flat)
    assert by_levels[0] != flat[0]  # the order of sums differs
    np.testing.assert_allclose(by_levels[0], flat[0], rtol=1e-3, atol=1e-5)
