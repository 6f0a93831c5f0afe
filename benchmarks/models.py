"""The gradients of two models, or many small tensors, in every way: `python benchmarks/models.py [--sets ...]`.

horoclone one by one, grouped, and in declared buckets that lie in shared memory (what its optimizer does); gloo one by
one and in DDP's buckets; MPI one by one, blocking, and packed. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from gradients import MODELS, SMALL
from report import analyse, print_rows, ratio_text, time_text
from session import options, run
from start import run_ranks
from statistics_of import ratio_of

SETS = {**{name: make() for name, make in MODELS.items()}, **SMALL}


def main(argv: list[str] | None = None) -> int:
    """Runs the sets and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--np", 2, "ranks"), ("--sets", list(MODELS), "what is reduced", SETS),
        ("--rounds", 7, "below 7 the intervals say little"), ("--mpi", "openmpi", "mpich, impi, or an mpirun's path"),
        ("--bind", "none", "mpirun's --bind-to", ("none", "core")), ("--seed", 1, "of the order"),
        ("--limit", 600.0, "seconds after which the ranks are killed"),
    )  # fmt: skip
    return run(arguments, lambda: measured(arguments), show)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    sets = {name: SETS[name] for name in arguments.sets}
    plan = {"sizes": [], "rounds": arguments.rounds, "contestants": ("async", "gloo", "mpi"), "memory": "private",
            "seed": arguments.seed, "extras": False, "sets": sets}  # fmt: skip
    raw = run_ranks(plan, arguments.np, arguments.limit, arguments.bind, arguments.mpi)
    kept = {name: getattr(arguments, name) for name in ("rounds", "bind", "mpi")}
    result = analyse(raw, {"ranks": arguments.np, **kept})
    ways = result["sets"]
    result["benchmark"] = f"Sets of tensors; float32, sum, {arguments.np} ranks, {arguments.rounds} rounds"
    result["sets"] = {
        name: {
            "tensors": len(counts),
            "bytes": 4 * sum(counts),
            "ways": ways[name],
            "best": best_of(ways[name]),
        }
        for name, counts in sets.items()
    }
    return result


def best_of(ways: dict[str, Any]) -> dict[str, Any]:
    """Of the peers' ways the fastest, and ratios of each of our ways to it."""
    peers = [label for label in ways if not label.startswith("horoclone")]
    best = min(peers, key=lambda label: ways[label]["median_us"])
    rounds = {label: one["rounds_us"] for label, one in ways.items()}
    own = [label for label in ways if label.startswith("horoclone")]
    return {"peer": best, "ratios": {n: dataclasses.asdict(ratio_of(rounds[n], rounds[best])) for n in own}}


def show(result: dict[str, Any]) -> None:
    """Of each set the times of every way; ours beside the fastest peer's."""
    for name, one in result["sets"].items():
        best, rows = one["best"], []
        for label, way in sorted(
            one["ways"].items(), key=lambda item: (not item[0].startswith("horoclone"), item)
        ):
            ratio = best["ratios"].get(label)
            rows.append([
                label.replace("horoclone async", "horoclone"), time_text(way["median_us"]),
                f"{time_text(way['low_us'])} - {time_text(way['high_us'])}",
                f"{one['tensors'] / way['median_us'] * 1000:.1f} k/s", ratio_text(ratio) if ratio else "",
            ])  # fmt: skip
        title = f"{name}: {one['tensors']} tensors, {one['bytes'] / 1e6:.1f} MB"
        print_rows([title, "time", "rounds", "tensors", f"vs best peer ({best['peer']})"], rows)


if __name__ == "__main__":
    sys.exit(main())
