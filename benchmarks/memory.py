"""Memory of a rank: `python benchmarks/memory.py`. After import, after init(), and after reductions of growing size.

Private bytes (what this process alone pays for), shared ones, and their proportional sum (each shared page divided by
the number of its users), per rank the largest. Beside it torch.distributed with gloo. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from report import print_rows
from session import on_ranks, options, run

SIZES = (1 << 20, 16 << 20, 64 << 20)
WAYS = {"horoclone": {}, "horoclone, TCP": {"HOROCLONE_SHARED_MEMORY": "0"}, "gloo": {}}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(__doc__, argv, ("--np", [2, 4], "ranks"))
    return run(arguments, lambda: measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for size in arguments.np:
        for way, environment in WAYS.items():
            ranks = on_ranks(grow, way, SIZES, np=size, **environment)
            found[f"{way}, {size} ranks"] = {
                stage: {kind: max(rank[stage][kind] for rank in ranks) for kind in ranks[0][stage]}
                for stage in ranks[0]
            }
    return {
        "benchmark": "memory of a rank above that of its imports, the largest over the ranks",
        "ways": found,
    }


def show(result: dict[str, Any]) -> None:
    stages = list(next(iter(result["ways"].values())))
    rows = [
        [way, *(f"{of[stage]['private'] / 1e6:.1f} + {of[stage]['shared'] / 1e6:.1f}" for stage in stages)]
        for way, of in result["ways"].items()
    ]
    print_rows(["private + shared, MB", *stages], rows)
    print("An allreduce's own tensor is part of it: 1, 17 and 67 MB.")


def grow(way: str, sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """On a rank: bytes above those after the imports, at each stage."""
    import torch
    import torch.distributed as dist
    from machine import memory_now

    import horoclone.torch as hvd

    torch.set_num_threads(1)
    base = memory_now()
    found: dict[str, dict[str, float]] = {}

    def note(stage: str) -> None:
        now = memory_now()
        found[stage] = {kind: now[kind] - base[kind] for kind in now}

    hvd.init()
    if way == "gloo":
        rank, size = hvd.rank(), hvd.size()
        store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False) if rank == 0 else None
        port = int(hvd.broadcast(torch.tensor(store.port if store else 0), 0))
        hvd.shutdown()
        store = store or dist.TCPStore("127.0.0.1", port, size, False)
        base = memory_now()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        dist.barrier()
    note("connected")
    for nbytes in sizes:
        tensor = torch.ones(nbytes // 4)
        for _ in range(3):
            if way == "gloo":
                dist.all_reduce(tensor)
            else:
                hvd.allreduce_(tensor, name=f"memory.{nbytes}", op=hvd.Sum)
        note(f"{nbytes >> 20} MiB")
        del tensor
    note("afterwards")
    if way == "gloo":
        dist.barrier()
        dist.destroy_process_group()
    else:
        hvd.barrier()
    return found


if __name__ == "__main__":
    sys.exit(main())
