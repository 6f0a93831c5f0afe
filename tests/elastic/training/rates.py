"""Worker: trains with a learning-rate scheduler, and a schedule of its own; one rank is killed once.

Arguments: a file that says that it has happened.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import horoclone.torch as hvd

EPOCHS = 40


class Momentum:
    """A schedule without a state_dict()."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["momentum"] = 1 - 0.9**self.steps


model = torch.nn.Linear(2, 2)
plain = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
hvd.init()
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
momentum = Momentum(optimizer)
state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, schedules=[scheduler, momentum], epoch=0, back=0
)
died = Path(sys.argv[1])


@hvd.elastic.run
def train(state: Any) -> None:
    while state.epoch < EPOCHS or not state.back:
        optimizer.zero_grad()
        (0 * model(torch.ones(1, 2)).sum()).backward()
        optimizer.step()
        scheduler.step()
        momentum.step()
        state.epoch += 1
        if state.epoch == 4 and hvd.rank() == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        group = optimizer.param_groups[0]
        right = 0.9**state.epoch
        assert abs(group["lr"] - right) < 1e-9, (state.epoch, group["lr"], right)
        assert abs(group["momentum"] - (1 - right)) < 1e-9, (state.epoch, group["momentum"], 1 - right)
        assert scheduler.last_epoch == momentum.steps == state.epoch
        state.back = int(died.exists() and hvd.size() == 2 and hvd.elastic.generation().number > 2)
        state.commit()
    print(f"done {state.epoch >= EPOCHS} of {hvd.size()} in {hvd.elastic.generation().number}", flush=True)


train(state)
