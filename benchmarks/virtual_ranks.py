"""What virtual ranks cost: a step of hvd.VirtualRanks beside one of a DistributedOptimizer that accumulates as much.

OMP_NUM_THREADS=1 horoclonerun -np 2 python benchmarks/virtual_ranks.py
"""

from __future__ import annotations

import statistics
import time

import torch
from machine import Load

import horoclone.torch as hvd

VIRTUAL, ROUNDS, STEPS = 8, 7, 3


class Contestant:
    def __init__(self, width: int, is_virtual: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(10)])
        self.passes = VIRTUAL // hvd.size()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4)
        self.virtual = hvd.VirtualRanks(self.model, VIRTUAL) if is_virtual else None
        if not is_virtual:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, self.model.named_parameters(), backward_passes_per_step=self.passes
            )

    def step(self, number: int, x: torch.Tensor) -> None:
        if self.virtual is None:
            self.optimizer.zero_grad()
        for _ in range(self.passes) if self.virtual is None else self.virtual.ranks(number):
            self.model(x).square().mean().backward()
        self.optimizer.step()

    def round_ms(self, x: torch.Tensor) -> float:
        self.step(0, x)
        hvd.barrier()
        began = time.perf_counter()
        for number in range(STEPS):
            self.step(number, x)
        return 1000 * (time.perf_counter() - began) / STEPS


def compare(width: int, batch: int) -> None:
    load = Load()
    plain, virtual = Contestant(width, False), Contestant(width, True)
    x = torch.randn(batch, width)
    rounds = [(plain.round_ms(x), virtual.round_ms(x)) for _ in range(ROUNDS)]
    times = list(zip(*rounds, strict=True))
    medians = [statistics.median(one) for one in times]
    said = [f"{m:.1f} ms ({min(all):.1f} to {max(all):.1f})" for m, all in zip(medians, times, strict=True)]
    megabytes = sum(one.nbytes for one in plain.model.parameters()) / 1e6
    if hvd.rank() == 0:
        print(
            f"{hvd.size()} ranks, {megabytes:.1f} MB, {VIRTUAL} batches of {batch}: plain {said[0]}, "
            f"virtual {said[1]}, {medians[1] / medians[0]:.2f} times; others used {load.others() or 0:.2f} cores"
        )


hvd.init()
torch.set_num_threads(1)
for width, batch in ((1600, 32), (1600, 256), (64, 32)):
    compare(width, batch)
