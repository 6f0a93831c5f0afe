"""One rank reads its data slowly: the job says which one, by how much, and at which line.

Run:  horoclonerun --why -np 2 python examples/torch_late_rank.py

Without --why (HOROCLONE_WHY=1) nothing is measured, and hvd.metrics()["why"] is None.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

import horoclone.torch as hvd


class Samples(IterableDataset[torch.Tensor]):
    """Endless rows; `pause_s` is what the disk of this rank costs for each."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(self.pause_s)
            yield torch.randn(64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=8, help="for how long to train (default: 8)")
    seconds = parser.parse_args().seconds
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    is_slow = hvd.size() > 1 and hvd.rank() == hvd.size() - 1
    began = time.monotonic()
    for batch in DataLoader(Samples(0.005 if is_slow else 0.0), batch_size=4):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        is_over = torch.tensor(float(time.monotonic() - began > seconds))
        if hvd.allreduce(is_over, name="is_over", op=hvd.Sum) > 0:  # all ranks end after the same step
            break

    if hvd.rank() == 0:
        for one in hvd.metrics()["why"] or ():
            print(f"rank {one['rank']} is late: {one['text']}")
            print(f"  {one['advice']}")
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
