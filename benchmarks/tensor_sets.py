"""The body of models.py and many_small.py: sets of tensors, reduced by everybody in every way, as a table."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from report import analyse, print_rows, ratio_text, time_text
from session import add_options, run
from start import run_ranks
from statistics_of import ratio_of

CONTESTANTS = ("async", "gloo", "mpi")
OWN = "horoclone async"


def main(argv: list[str] | None, doc: str, sets: dict[str, list[int]], title: str) -> int:
    """Runs the sets and returns the exit code. doc: the program's; title: of the table."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    add_options(parser)
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=list(sets), help=",".join(sets))
    parser.add_argument("--rounds", type=int, default=7, help="below 7 the intervals say little (7)")
    parser.add_argument("--mpi", default="openmpi", help="openmpi, mpich, impi, or the path of an mpirun")
    parser.add_argument("--bind", choices=("none", "core"), default="none", help="mpirun's --bind-to")
    parser.add_argument("--seed", type=int, default=1, help="of the order (1)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which the ranks are killed")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.sets if name not in sets]:
        parser.error(f"no set {unknown[0]!r}; there are {', '.join(sets)}")
    chosen = {name: sets[name] for name in arguments.sets}

    def show(result: dict[str, Any]) -> None:
        for name, one in result["sets"].items():
            print_rows(*rows_of(name, one))

    return run(arguments, lambda: measured(arguments, chosen, title), show)


def measured(arguments: argparse.Namespace, sets: dict[str, list[int]], title: str) -> dict[str, Any]:
    plan = {"sizes": [], "rounds": arguments.rounds, "contestants": CONTESTANTS, "memory": "private",
            "seed": arguments.seed, "extras": False, "sets": sets}  # fmt: skip
    raw = run_ranks(plan, arguments.np, arguments.limit, arguments.bind, arguments.mpi)
    settings = {
        "ranks": arguments.np,
        "rounds": arguments.rounds,
        "bind": arguments.bind,
        "mpi": arguments.mpi,
    }
    result = analyse(raw, settings)
    ways = result.pop("sets")
    result["benchmark"] = f"{title}; float32, sum, {arguments.np} ranks, {arguments.rounds} rounds"
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
    """Of our ways and of the peers': the fastest; and ratios of each of our ways to the best peer."""
    peers = [label for label in ways if not label.startswith("horoclone")]
    if not peers:
        return {}
    best = min(peers, key=lambda label: ways[label]["median_us"])
    ratios = {
        label: dataclasses.asdict(ratio_of(one["rounds_us"], ways[best]["rounds_us"]))
        for label, one in ways.items()
        if label.startswith("horoclone")
    }
    return {"peer": best, "ratios": ratios}


def rows_of(name: str, one: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Times of every way; ours beside the fastest peer's."""
    best, rows = one["best"], []
    for label, way in sorted(
        one["ways"].items(), key=lambda item: (not item[0].startswith("horoclone"), item)
    ):
        ratio = best.get("ratios", {}).get(label)
        rows.append([
            label.replace("horoclone async", "horoclone"), time_text(way["median_us"]),
            f"{time_text(way['low_us'])} - {time_text(way['high_us'])}",
            f"{one['tensors'] / way['median_us'] * 1000:.1f} k/s", ratio_text(ratio) if ratio else "",
        ])  # fmt: skip
    title = f"{name}: {one['tensors']} tensors, {one['bytes'] / 1e6:.1f} MB"
    return [title, "time", "rounds", "tensors", f"vs best peer ({best.get('peer', 'none')})"], rows
