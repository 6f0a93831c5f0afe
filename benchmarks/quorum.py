"""Training with one slow rank, for equal time: averaging all gradients, DistributedOptimizer(quorum=0.75), DDP on gloo.

`horoclonerun -np 4 python benchmarks/quorum.py [--seconds 8] [--slower 5]`: digits of scikit-learn, batches of 32.
Computing is a sleep of 20 ms, on the last rank so many times as long. Prints rounds and the test accuracy on rank 0.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from typing import Any

import torch
from sklearn.datasets import load_digits

import horoclone.torch as hvd

COMPUTING_S = 0.02


def data() -> tuple[torch.Tensor, ...]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(digits.data, dtype=torch.float32) / 16)[order]
    y = torch.tensor(digits.target)[order]
    return x[:1500], y[:1500], x[1500:], y[1500:]


def train(way: str, seconds: float, slower: float) -> tuple[int, float]:
    x, y, test_x, test_y = data()
    x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if way == "DDP, gloo":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif way == "everybody":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), quorum=0.75, late=way, max_lag=1000
        )
    chance = torch.Generator().manual_seed(hvd.rank())
    wait = COMPUTING_S * (slower if hvd.rank() == hvd.size() - 1 else 1)
    hvd.barrier()
    end, rounds = time.monotonic() + seconds, 0
    while True:
        goes_on = time.monotonic() < end
        if way in ("everybody", "DDP, gloo"):  # the ranks end together
            goes_on = bool(hvd.allreduce(torch.tensor(float(goes_on)), name="on", op=hvd.Min))
        if not goes_on:
            break
        time.sleep(wait)
        batch = torch.randint(0, len(x), (32,), generator=chance)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        rounds += 1
    if way in ("drop", "carry"):
        optimizer.join()
        rounds = optimizer.rounds
    with torch.no_grad():
        return rounds, (model(test_x).argmax(1) == test_y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--slower", type=float, default=5.0)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hvd.init()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo")
    for way in ("everybody", "DDP, gloo", "drop", "carry"):
        rounds, accuracy = train(way, wish.seconds, wish.slower)
        if hvd.rank() == 0:
            print(f"{way:10} {rounds:5} rounds in {wish.seconds:g} s, accuracy {accuracy:.4f}", flush=True)
    torch.distributed.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
