"""What an asynchronous save in ten steps costs training: blocks of ten steps with one save and without, in turn.

OMP_NUM_THREADS=1 horoclonerun -np 2 python benchmarks/checkpoint_stall.py DIRECTORY [--rounds 12] [--batch 16]

The model has 102 MB. A block with a save ends when its ten steps are done; what the save still had to write then is
waited for outside of the clock, and printed as `rest`: a save that is slower than ten steps would hide its cost there.
The time of processors is that of all threads of a rank, in user space and in the kernel, and is less noisy than the
time on the wall. Rank 0 prints medians, the lower and upper quartile, and the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import torch

import horoclone.torch as hvd

STEPS = 10


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:7.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="rows of each rank: how long a step computes")
    args = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(1600, 1600) for _ in range(10)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
    )
    x = torch.randn(args.batch, 1600)
    calls: list[float] = []

    def block(saves: bool) -> tuple[float, float, float]:
        """Milliseconds of ten steps: on the wall, of processors, and what the save still took after them."""
        hvd.barrier()
        began, used = time.monotonic(), time.process_time()
        for number in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if saves and number == 0:
                called = time.monotonic()
                hvd.checkpoint.save(args.directory, {"model": model.state_dict(), "step": number})
                calls.append(1000 * (time.monotonic() - called))
        ended = time.monotonic()
        hvd.checkpoint.wait()
        rest = time.monotonic() - ended
        return 1000 * (ended - began), 1000 * (time.process_time() - used), 1000 * rest

    for _ in range(3):
        block(False)
    plain, saving = [], []
    for _ in range(args.rounds):
        plain.append(block(False))
        saving.append(block(True))
    everybody = hvd.allgather_object((plain, saving, calls))
    if hvd.rank() == 0:
        print(
            f"{args.rounds} rounds, {hvd.size()} ranks, {os.cpu_count()} cores, batches of {args.batch}, "
            f"load {os.getloadavg()[0]:.1f}"
        )
        for rank, (without, with_one, called) in enumerate(everybody):
            print(f"rank {rank}   ms: median (quartiles)")
            for place, what in ((0, "wall"), (1, "processors")):
                ours, theirs = [one[place] for one in without], [one[place] for one in with_one]
                more = 100 * (statistics.median(theirs) / statistics.median(ours) - 1)
                print(f"  {what:10} without {quartiles(ours)}   with {quartiles(theirs)}   {more:+.1f} %")
            print(
                f"  save()     {quartiles(called)}   rest {quartiles([one[2] for one in with_one])}",
                flush=True,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
