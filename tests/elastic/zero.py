"""A worker of the elastic tests whose optimizer state is sharded: each rank trains on its rows of one batch.

Prints `step N of SIZE LOSS pid P`, and at the end the weights: `weights [..]`. The average over the ranks is the
gradient of the whole batch at any size, so that a model that was never in a job says what must come out.
`python zero.py STEPS SECONDS_A_STEP`.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import horoclone.torch as hvd

ROWS = 12


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def main() -> None:
    hvd.init()
    net = model()
    plain = torch.optim.Adam(net.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), shard_optimizer_state=True)
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0)
    inputs, targets = data()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < int(sys.argv[1]):
            mine = slice(hvd.rank(), None, hvd.size())
            optimizer.zero_grad()
            loss = (net(inputs[mine]) - targets[mine]).square().sum() / ROWS
            (loss * hvd.size()).backward()
            optimizer.step()
            state.step += 1
            whole = hvd.allreduce(loss.detach(), op=hvd.Sum, name="loss").item()
            print("step", state.step, "of", hvd.size(), f"{whole:.6f}", "pid", os.getpid(), flush=True)
            state.commit()
            time.sleep(float(sys.argv[2]))

    train(state)
    print("weights", json.dumps([value.tolist() for value in net.state_dict().values()]), flush=True)


if __name__ == "__main__":
    main()
