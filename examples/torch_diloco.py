"""Training that communicates once in twenty steps: DiLoCo, two fragments, sent while training goes on."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

import horoclone.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sync-every", type=int, default=20)
    wish = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = (torch.tensor(digits.data, dtype=torch.float32) / 16)[order], torch.tensor(digits.target)[order]
    mine = slice(hvd.rank(), 1500, hvd.size())

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    chance = torch.Generator().manual_seed(hvd.rank())
    with hvd.DiLoCo(
        [model[0], model[2]], inner, outer, wish.sync_every, fragment_sync_delay=2, fragment_update_alpha=0.5
    ):
        for _ in range(wish.steps):
            batch = torch.randint(0, len(x[mine]), (32,), generator=chance)
            inner.zero_grad()
            torch.nn.functional.cross_entropy(model(x[mine][batch]), y[mine][batch]).backward()
            inner.step()
    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {wish.steps} steps, test accuracy {accuracy:.2%}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
