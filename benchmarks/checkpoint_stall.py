"""What one asynchronous save in ten steps costs training: a model of 102 MB, 20 steps without saves and 20 with two.

OMP_NUM_THREADS=1 horoclonerun -np 2 python benchmarks/checkpoint_stall.py DIRECTORY
"""

from __future__ import annotations

import sys
import time

import torch

import horoclone.torch as hvd

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(1600, 1600) for _ in range(10)])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
x = torch.randn(16, 1600)


def step() -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def steps_ms(saves: bool) -> tuple[list[float], list[float]]:
    """Milliseconds of 20 steps, and of the calls of save() in them."""
    steps, calls = [], []
    for number in range(20):
        began = time.monotonic()
        step()
        if saves and number % 10 == 5:
            called = time.monotonic()
            hvd.checkpoint.save(sys.argv[1], {"model": model.state_dict(), "step": number})
            calls.append(1000 * (time.monotonic() - called))
        steps.append(1000 * (time.monotonic() - began))
    hvd.checkpoint.wait()
    return steps, calls


for _ in range(3):
    step()
plain, _ = steps_ms(saves=False)
saving, calls = steps_ms(saves=True)
if hvd.rank() == 0:
    for name, values in (("without", plain), ("with", saving), ("save()", calls)):
        print(f"{name:8}", *(f"{value:.0f}" for value in values), "ms")
    print(f"20 steps: {sum(plain):.0f} ms without saves, {sum(saving):.0f} ms with two")
