"""Priorities and cross_barrier between two hosts with a slow link: `python benchmarks/priority.py`. Needs root.

A stack of layers with the sizes of a known network, scaled so that one step's gradients take a given time on the link,
and with computing (matrix products of given lengths) for as long, or as given. The ordinary step (FIFO) against
cross_barrier, in fresh ranks that take turns, as once priorities are in use everything runs in parts.
hidden = 1 - (step - computing alone) / communication alone.
--local-sgd: instead, DiLoCo beside steps without communication and beside averaging in every step, on the first case;
one movement of all parameters is sent in each turn, and is under way for half of its steps. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from hosts import Hosts, needs_root
from report import print_rows, ratio_text, time_text
from session import Failed, few, options, run
from statistics_of import MIN_ROUNDS, ratio_of, slowest_rank, summarise

from horoclone.simulate import LAYERS

# Per layer, in the order of the forward pass: shares of the parameters and of the computing.
VGG, RESNET = LAYERS["vgg16"], LAYERS["resnet50"]


@dataclass(frozen=True)
class Shape:
    """What trains over which link: gradients of so many bytes, computing of so many ms in a step."""

    layers: tuple[tuple[float, float], ...]
    gbit: float
    mbytes: float
    computing_ms: float


CASES = {
    "vgg": Shape(VGG, 1, 36, 300),
    "resnet": Shape(RESNET, 1, 36, 300),
    "vgg, computing twice as long": Shape(VGG, 1, 18, 300),
    "vgg, fast link": Shape(VGG, 10, 18, 300),
}
CONTESTANTS = ("computing alone", "communication alone", "fifo", "priority")
RARELY = ("computing alone", "diloco", "fifo")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--cases", list(CASES), "layers and link, ; between them", CASES),
        ("--rounds", MIN_ROUNDS, "fresh ranks"), ("--steps", 8, "in a turn; 40 with --local-sgd in docs/local_sgd.md"),
        ("--limit", 300.0, "seconds for one turn"), ("--local-sgd", False, "DiLoCo"),
    )  # fmt: skip
    needs_root()
    return run(arguments, lambda: measure_all(arguments), show)


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every case, turn by turn."""
    names = list(CASES)[:1] if arguments.local_sgd else arguments.cases
    turns = [RARELY] if arguments.local_sgd else [CONTESTANTS[:3], CONTESTANTS[3:]]
    rounds: dict[str, dict[str, list[list[float]]]] = {name: {} for name in names}
    for name in names:
        try:
            with Hosts(CASES[name].gbit, 1500) as hosts:
                for _ in range(arguments.rounds):
                    for turn in turns:
                        for label, times in run_ranks(CASES[name], hosts, turn, arguments).items():
                            rounds[name].setdefault(label, []).append(times)
        except RuntimeError as error:
            raise Failed(f"{name}: {error}") from None
    return {
        "benchmark": "steps of a stack of layers between two hosts (namespaces, tbf), 1 rank each, 1 thread each; "
        f"{arguments.rounds} rounds of {arguments.steps} steps",
        "noise": {"reasons": few(arguments.rounds)},
        "cases": {name: found(CASES[name], one) for name, one in rounds.items()},
    }


def run_ranks(
    shape: Shape, hosts: Hosts, turn: tuple[str, ...], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """One turn in fresh ranks: label -> mean times of its steps. RuntimeError when a rank failed."""
    elements = shape.mbytes * 1e6 / 4
    plan = {
        "layers": [(int(size * elements), share * shape.computing_ms / 3) for size, share in shape.layers],
        "contestants": turn,
        "steps": arguments.steps,
    }
    every = hosts.run_ranks("priority_worker.py", plan, 1, arguments.limit)
    return {label: slowest_rank([rank[label] for rank in every]) for label in turn}


def found(shape: Shape, rounds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians; the speed-up with its 95 % interval, and how much of the communication is hidden."""
    summaries = {label: summarise(one) for label, one in rounds.items()}
    result = {
        "shape": dataclasses.asdict(shape),
        "contestants": {label: dataclasses.asdict(one) for label, one in summaries.items()},
        "hidden": {},
    }
    times = {label: one.rounds_us for label, one in summaries.items()}
    if "priority" in times:
        result["speed-up"] = dataclasses.asdict(ratio_of(times["priority"], times["fifo"]))
        alone = list(zip(times["computing alone"], times["communication alone"], strict=True))
        for label in ("fifo", "priority"):
            shares = sorted(1 - (step - a) / b for step, (a, b) in zip(times[label], alone, strict=True))
            result["hidden"][label] = {
                "ratio": shares[len(shares) // 2],
                "low": shares[0],
                "high": shares[-1],
            }
    return result


def show(whole: dict[str, Any]) -> None:
    """A table for each case."""
    for name, case in whole["cases"].items():
        shape, of = case["shape"], case["contestants"]
        print(
            f"{name}: {shape['gbit']:g} Gbit/s, {shape['mbytes']:g} MB of gradients in {len(shape['layers'])} layers"
        )
        rows = []
        for label, one in of.items():
            share = case["hidden"].get(label)
            spread = f"{time_text(one['low_us'])} .. {time_text(one['high_us'])}"
            beside = f"{one['median_us'] / of['computing alone']['median_us']:.3f}"
            rows.append(
                [
                    label,
                    time_text(one["median_us"]),
                    spread,
                    beside,
                    f"{share['ratio']:.0%}" if share else "-",
                ]
            )
        print_rows(["contestant", "step", "rounds", "of computing alone", "hidden"], rows)
        if "speed-up" in case:
            print(f"speed-up {ratio_text(case['speed-up'])}\n")


if __name__ == "__main__":
    sys.exit(main())
