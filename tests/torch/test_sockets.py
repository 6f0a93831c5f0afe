"""Training on ranks of two sockets: gradient buckets that lie in shared memory are summed by levels."""

from __future__ import annotations

import os

import numpy as np
import pytest


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
