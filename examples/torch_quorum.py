"""A rank that is five times slower than the others, and does not hold them up: DistributedOptimizer(quorum=0.5)."""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--late", choices=("drop", "carry"), default="carry")
    wish = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = (torch.tensor(digits.data, dtype=torch.float32) / 16)[order], torch.tensor(digits.target)[order]
    mine = slice(hvd.rank(), 1500, hvd.size())

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        quorum=0.5,
        late=wish.late,
        max_lag=8,
    )
    chance = torch.Generator().manual_seed(hvd.rank())
    batches = 0
    while optimizer.rounds < wish.rounds:
        time.sleep(0.005 if hvd.rank() == hvd.size() - 1 else 0.001)
        batch = torch.randint(0, len(x[mine]), (32,), generator=chance)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine][batch]), y[mine][batch]).backward()
        optimizer.step()
        batches += 1
    optimizer.join()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    print(f"rank {hvd.rank()}: {batches} batches, {optimizer.rounds} rounds, test accuracy {accuracy:.2%}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
