"""Allreduce of 16-bit floats beside float32, the same number of bytes: `python benchmarks/dtypes.py`.

Private torch tensors, summed in place; dtypes take turns in random order within each round, inputs are written anew
before each call and results are checked. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from report import print_rows, ratio_text, size_text, time_text
from session import few, on_ranks, options, run
from statistics_of import ratio_of, slowest_rank, summarise

DTYPES = ("float32", "float16", "bfloat16")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--np", 2, "ranks"), ("--rounds", 9, "rounds"),
        ("--sizes", [1 << 20, 16 << 20, 64 << 20], "bytes, multiples of 4"),
    )  # fmt: skip
    return run(arguments, lambda: measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    ranks = on_ranks(take_turns, DTYPES, arguments.sizes, arguments.rounds, np=arguments.np)
    sizes: dict[str, dict[str, Any]] = {}
    for size in arguments.sizes:
        rounds = {dtype: zip(*(rank[f"{size}.{dtype}"] for rank in ranks), strict=True) for dtype in DTYPES}
        found = {
            dtype: summarise([slowest_rank(per_rank) for per_rank in of]) for dtype, of in rounds.items()
        }
        sizes[str(size)] = {
            dtype: dataclasses.asdict(one)
            | {
                "of float32's bytes/s": dataclasses.asdict(
                    ratio_of(one.rounds_us, found["float32"].rounds_us)
                )
            }
            for dtype, one in found.items()
        }
    return {
        "benchmark": f"allreduce of {', '.join(DTYPES)}, sum in place; {arguments.np} ranks, {arguments.rounds} rounds",
        "dtypes": sizes,
        "noise": {"reasons": few(arguments.rounds)},
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


def take_turns(dtypes: tuple[str, ...], sizes: list[int], rounds: int) -> dict[str, list[list[float]]]:
    """On a rank: microseconds of each of its calls, by size and dtype, in rounds."""
    import random
    import time

    import torch

    import horoclone.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    order = random.Random(1)  # the same on every rank
    total = hvd.size() * (hvd.size() + 1) // 2
    found: dict[str, list[list[float]]] = {f"{size}.{dtype}": [] for size in sizes for dtype in dtypes}
    for size in sizes:
        kinds = {dtype: getattr(torch, dtype) for dtype in dtypes}
        tensors = {dtype: torch.empty(size // kind.itemsize, dtype=kind) for dtype, kind in kinds.items()}
        for turn in range(rounds + 1):  # the first one warms up
            for dtype in order.sample(dtypes, len(dtypes)):
                tensor, times = tensors[dtype], []
                for _ in range(max(3, min(30, (64 << 20) // size))):
                    tensor.fill_(hvd.rank() + 1)
                    hvd.barrier()
                    began = time.perf_counter()
                    hvd.allreduce_(tensor, name=f"{dtype}.{size}", op=hvd.Sum)
                    times.append(1e6 * (time.perf_counter() - began))
                if not bool((tensor == total).all()):
                    raise RuntimeError(f"a wrong sum of {dtype}, {size} bytes")
                if turn:
                    found[f"{size}.{dtype}"].append(times)
    return found


if __name__ == "__main__":
    sys.exit(main())
