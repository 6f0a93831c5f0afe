"""What commits of an elastic state cost: a model of 102 MB with sharded Adam, time of commits and steps, and memory.

OMP_NUM_THREADS=1 horoclonerun -np 4 --min-np 4 python benchmarks/elastic_commit.py # buddies keep the pieces
OMP_NUM_THREADS=1 horoclonerun -np 4 python benchmarks/elastic_commit.py # every commit gathers them
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from machine import Load

import horoclone.torch as hvd
from horoclone.elastic.member import is_elastic

COMMITS, STEPS_BETWEEN = int(sys.argv[1]) if len(sys.argv) > 1 else 8, 5

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1600, 1600) for _ in range(10)])
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=1e-4), model.named_parameters(), shard_optimizer_state=True
)
x = torch.randn(8, 1600)


def step_ms() -> float:
    began = time.monotonic()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return 1000 * (time.monotonic() - began)


def private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Private_")}
    return (found["Private_Clean"] + found["Private_Dirty"]) / 1024


def rows(name: str, values: list[float], unit: str) -> None:
    """The median of every rank, and the largest value of all."""
    everybody = hvd.allgather_object(values)
    if hvd.rank() == 0:
        medians = [f"{statistics.median(one):.0f}" for one in everybody]
        print(f"{name:44} median by rank {' '.join(medians)}, largest {max(map(max, everybody)):.0f} {unit}")


state = hvd.elastic.TorchState(model, optimizer, step=0)


@hvd.elastic.run
def measure(state: hvd.elastic.TorchState) -> None:
    load = Load()
    for _ in range(3):
        step_ms()
    plain = [step_ms() for _ in range(COMMITS * STEPS_BETWEEN)]
    before = private_mb()
    commits, first_steps, steps = [], [], []
    for _ in range(COMMITS):
        began = time.monotonic()
        state.commit()
        commits.append(1000 * (time.monotonic() - began))
        first_steps.append(step_ms())
        steps += [step_ms() for _ in range(STEPS_BETWEEN - 1)]
    after = private_mb()
    exchanges = []
    for _ in range(COMMITS):
        hvd.barrier()
        state.commit()
        began = time.monotonic()
        state._peers.finish()
        exchanges.append(1000 * (time.monotonic() - began))
    hvd.barrier()
    if hvd.rank() == 0:
        way = "shards stay, buddies keep them" if is_elastic() else "every commit gathers the state"
        weights = sum(p.nbytes for p in model.parameters()) / 1e6
        print(
            f"{hvd.size()} ranks, {weights:.0f} MB of weights; {way}; others used {load.others() or 0:.2f} cores"
        )
    rows("commit()", commits, "ms")
    rows("a step without commits", plain, "ms")
    rows("the first step behind a commit", first_steps, "ms")
    rows("the other steps between commits", steps, "ms")
    rows("exchange of shards, waited for", exchanges, "ms")
    rows("private memory that commits have added", [after - before], "MiB")
    rows("of that shards, own and others', two commits", [state._peers.nbytes / 1e6], "MB")


measure(state)
