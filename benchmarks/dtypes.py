"""Allreduce of 16-bit floats beside float32, the same number of bytes: `python benchmarks/dtypes.py`.

Private torch tensors, summed in place; dtypes take turns in random order within each round, inputs are written anew
before each call and results are checked. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from report import print_rows, ratio_text, size_text, time_text  # noqa: E402
from session import Failed, add_options, run  # noqa: E402
from statistics_of import MIN_ROUNDS, ratio_of, slowest_rank, summarise  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16")
SIZES = [1 << 20, 16 << 20, 64 << 20]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=SIZES,
                        help="bytes, multiples of 4 (1, 16 and 64 MiB)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="rounds (9)")
    arguments = parser.parse_args(argv)
    return run(arguments, lambda: measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import horoclone
    from horoclone.launch.api import RunError

    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        ranks = horoclone.run(
            take_turns, (DTYPES, arguments.sizes, arguments.rounds), np=arguments.np, env=environment
        )
    except RunError as error:
        raise Failed(str(error)) from None
    sizes = {}
    for size in arguments.sizes:
        summaries = {}
        for dtype in DTYPES:
            rounds = zip(*(rank[f"{size}.{dtype}"] for rank in ranks), strict=True)
            summaries[dtype] = summarise([slowest_rank(per_rank) for per_rank in rounds])
        plain = summaries["float32"].rounds_us
        sizes[str(size)] = {
            dtype: dataclasses.asdict(one)
            | {"of float32's bytes/s": dataclasses.asdict(ratio_of(one.rounds_us, plain))}
            for dtype, one in summaries.items()
        }
    few = [] if arguments.rounds >= MIN_ROUNDS else [f"{arguments.rounds} rounds are too few for an interval"]
    return {
        "benchmark": f"allreduce of {', '.join(DTYPES)}, sum in place; {arguments.np} ranks, {arguments.rounds} rounds",
        "dtypes": sizes,
        "noise": {"reasons": few},
    }


def show(result: dict[str, Any]) -> None:
    rows = []
    for size, by_dtype in result["dtypes"].items():
        for dtype, one in by_dtype.items():
            gb_s = int(size) / one["median_us"] / 1e3
            ratio = ratio_text(one["of float32's bytes/s"]) if dtype != "float32" else ""
            rows.append(
                [f"{size_text(int(size))}, {dtype}", time_text(one["median_us"]), f"{gb_s:.2f}", ratio]
            )
    print_rows(["allreduce", "time", "GB/s", "of float32's bytes/s"], rows)


# --- on the ranks --------------------------------------------------------------------------------------------------


def take_turns(dtypes: tuple[str, ...], sizes: list[int], rounds: int) -> dict[str, list[list[float]]]:
    """Microseconds of each call of this rank, by size and dtype, in rounds."""
    import random
    import time

    import torch

    import horoclone.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    draw_lots = random.Random(1)  # the same on every rank
    total = hvd.size() * (hvd.size() + 1) // 2
    found: dict[str, list[list[float]]] = {f"{size}.{dtype}": [] for size in sizes for dtype in dtypes}
    for size in sizes:
        kinds = {dtype: getattr(torch, dtype) for dtype in dtypes}
        tensors = {dtype: torch.empty(size // kind.itemsize, dtype=kind) for dtype, kind in kinds.items()}
        calls = max(3, min(30, (64 << 20) // size))
        for _ in range(rounds + 1):  # the first one warms up
            for dtype in draw_lots.sample(dtypes, len(dtypes)):
                tensor, times = tensors[dtype], []
                for _ in range(calls):
                    tensor.fill_(hvd.rank() + 1)
                    hvd.barrier()
                    began = time.perf_counter()
                    hvd.allreduce_(tensor, name=f"{dtype}.{size}", op=hvd.Sum)
                    times.append(1e6 * (time.perf_counter() - began))
                if not bool((tensor == total).all()):
                    raise RuntimeError(f"a wrong sum of {dtype}, {size} bytes")
                found[f"{size}.{dtype}"].append(times)
        for dtype in dtypes:
            del found[f"{size}.{dtype}"][0]
    return found


if __name__ == "__main__":
    sys.exit(main())
