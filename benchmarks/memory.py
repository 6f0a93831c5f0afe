"""Memory of a rank: `python benchmarks/memory.py`. After import, after init(), and after reductions of growing size.

Private bytes (what this process alone pays for), shared ones, and their proportional sum (each shared page divided by
the number of its users), per rank the largest. Beside it torch.distributed with gloo. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from report import print_rows  # noqa: E402
from session import Failed, add_options, run  # noqa: E402

SIZES = (1 << 20, 16 << 20, 64 << 20)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument(
        "--np", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4], help="ranks"
    )
    arguments = parser.parse_args(argv)
    return run(arguments, lambda: measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import horoclone
    from horoclone.launch.api import RunError

    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    found = {}
    try:
        for size in arguments.np:
            for way, extra in (
                ("horoclone", {}),
                ("horoclone, TCP", {"HOROCLONE_SHARED_MEMORY": "0"}),
                ("gloo", {}),
            ):
                ranks = horoclone.run(grow, (way, SIZES), np=size, env={**environment, **extra})
                found[f"{way}, {size} ranks"] = {
                    stage: {kind: max(rank[stage][kind] for rank in ranks) for kind in ranks[0][stage]}
                    for stage in ranks[0]
                }
    except RunError as error:
        raise Failed(str(error)) from None
    return {
        "benchmark": "memory of a rank above that of its imports, the largest over the ranks",
        "ways": found,
    }


def show(result: dict[str, Any]) -> None:
    stages = list(next(iter(result["ways"].values())))
    header = ["private + shared, MB", *stages]
    rows = [
        [way, *(f"{of[stage]['private'] / 1e6:.1f} + {of[stage]['shared'] / 1e6:.1f}" for stage in stages)]
        for way, of in result["ways"].items()
    ]
    print_rows(header, rows)
    print("An allreduce's own tensor is part of it: 1, 17 and 67 MB.")


# --- on the ranks --------------------------------------------------------------------------------------------------


def grow(way: str, sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Bytes above those after the imports, at each stage."""
    import torch
    import torch.distributed as dist

    import horoclone.torch as hvd

    def bytes_now() -> dict[str, float]:
        names = {"Private_Clean": "private", "Private_Dirty": "private", "Shared_Clean": "shared",
                 "Shared_Dirty": "shared", "Pss": "proportional"}  # fmt: skip
        now = dict.fromkeys(names.values(), 0.0)
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            name = line.split(":")[0]
            if name in names:
                now[names[name]] += int(line.split()[1]) * 1024
        return now

    torch.set_num_threads(1)
    base = bytes_now()
    found: dict[str, dict[str, float]] = {}

    def note(stage: str) -> None:
        now = bytes_now()
        found[stage] = {kind: now[kind] - base[kind] for kind in now}

    hvd.init()
    if way == "gloo":
        store = (
            dist.TCPStore("127.0.0.1", 0, hvd.size(), True, wait_for_workers=False)
            if hvd.rank() == 0
            else None
        )
        port = int(hvd.broadcast(torch.tensor(store.port if store else 0), 0))
        rank, size = hvd.rank(), hvd.size()
        hvd.shutdown()
        store = store or dist.TCPStore("127.0.0.1", port, size, False)
        base = bytes_now()
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
        note(size_text_of(nbytes))
        del tensor
    note("afterwards")
    if way == "gloo":
        dist.barrier()
        dist.destroy_process_group()
    else:
        hvd.barrier()
    return found


def size_text_of(nbytes: int) -> str:
    """As report.size_text, which ranks do not import."""
    return f"{nbytes >> 20} MiB"


if __name__ == "__main__":
    sys.exit(main())
