"""A worker of test_faults.py: who takes the place of a lost one has a model with one more layer.

python odd_torch.py FOLDER: who finds `first-RANK` in the folder takes the place of a lost one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import horoclone.torch as hvd

print("what an optimizer needs of torch is there:", "torch._dynamo" in sys.modules, flush=True)
mark = Path(sys.argv[1]) / f"first-{os.environ['HOROVOD_RANK']}"
is_odd = mark.exists()
mark.touch()

hvd.init()
layers = [torch.nn.Linear(3, 3), *([torch.nn.Linear(3, 3)] if is_odd else [])]
model = torch.nn.Sequential(*layers, torch.nn.Linear(3, 2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


@hvd.elastic.run
def train(state: Any) -> None:
    now = hvd.elastic.generation()
    print("generation", now.number, "rank", now.rank, "of", now.size, "pid", os.getpid(), "step", state.step,
          "new", list(now.newcomers), "commit", now.commit, "skip", now.skip_sync, flush=True)  # fmt: skip
    while state.step < 2000:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if state.step % 10 == 5:
            print("step", state.step, "of", now.number, "", flush=True)
        time.sleep(0.02)


train(state)
