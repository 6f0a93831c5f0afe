"""Processor time of single calls of torch.distributed on one backend, threads of the backend included.

torchrun --nproc-per-node 2 benchmarks/torch_calls.py horoclone|gloo|fake [--calls 400] [--rounds 7]: us a call on rank
0, the smallest and the median of the rounds. Tensors have 8 KiB where no size is named. `fake` is torch's, moves
nothing and has no messages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

WARM_CALLS = 60


def calls(size: int, rank: int) -> dict[str, Callable[[], Any]]:
    group = dist.group.WORLD
    x, out, whole = torch.ones(2048), torch.ones(2048), torch.ones(2048 * size)
    one, many = torch.ones(1), torch.ones(32768)

    def messages() -> None:
        if rank % 2:
            dist.recv(out, rank - 1)
            dist.send(x, rank - 1)
        elif rank + 1 < size:
            dist.send(x, rank + 1)
            dist.recv(out, rank + 1)

    return {
        "all_reduce 4 B": lambda: dist.all_reduce(one),
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce 128 KiB": lambda: dist.all_reduce(many),
        "all_reduce async, wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, out),
        "all_gather_into_tensor async, wait": lambda: dist.all_gather_into_tensor(
            whole, out, async_op=True
        ).wait(),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(out, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "barrier": dist.barrier,
        "send and recv": messages,
        "functional all_reduce": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backend", choices=("horoclone", "gloo", "fake"))
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    wish = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if wish.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    else:
        import horoclone.torch  # noqa: F401 - registers the backend

        dist.init_process_group(wish.backend)
    for name, call in calls(size, rank).items():
        if wish.backend == "fake" and name == "send and recv":
            continue
        for _ in range(WARM_CALLS):
            call()
        rounds = []
        for _ in range(wish.rounds):
            began = time.process_time()
            for _ in range(wish.calls):
                call()
            rounds.append((time.process_time() - began) / wish.calls * 1e6)
        if rank == 0:
            print(f"{name:36} {min(rounds):8.1f} {statistics.median(rounds):8.1f} us", flush=True)
    if wish.backend != "fake":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
