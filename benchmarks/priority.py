"""Priorities and cross_barrier between two hosts with a slow link: `python benchmarks/priority.py`. Needs root.

A stack of layers with the sizes of a known network, scaled so that one step's gradients take a given time on the link,
and with computing (matrix products of given lengths) for as long, or as given. The ordinary step (FIFO) against
cross_barrier, in fresh ranks that take turns, as once priorities are in use everything runs in parts.
hidden = 1 - (step - computing alone) / communication alone.
Exit codes: 0, 1 a rank failed, 2 wrong arguments, 3 no conclusion.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hosts import Hosts  # noqa: E402
from network import Case, place, verdict, wait  # noqa: E402
from report import print_rows, ratio_text, time_text  # noqa: E402
from session import Failed, add_options, run, say  # noqa: E402
from statistics_of import MIN_ROUNDS, ratio_of, slowest_rank, summarise  # noqa: E402

from horoclone.simulate import LAYERS  # noqa: E402

# Per layer, in the order of the forward pass: shares of the parameters and of the computing.
VGG, RESNET = LAYERS["vgg16"], LAYERS["resnet50"]


@dataclass(frozen=True)
class Shape:
    """What trains over which link: gradients of so many bytes, computing of so many ms in a step."""

    layers: tuple[tuple[float, float], ...]
    gbit: float
    mbytes: float
    computing_ms: float
    gates: dict[str, float]


CASES = {
    "vgg": Shape(VGG, 1, 36, 300, {"speed-up": 1.15}),
    "resnet": Shape(RESNET, 1, 36, 300, {"speed-up": 1.15}),
    "vgg, computing twice as long": Shape(VGG, 1, 18, 300, {"speed-up": 0.98, "hidden": 0.8}),
    "vgg, fast link": Shape(VGG, 10, 18, 300, {"speed-up": 0.98}),
}
CONTESTANTS = ("computing alone", "communication alone", "fifo", "priority")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default=";".join(CASES), help="; between them: " + "; ".join(CASES))
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"fresh ranks ({MIN_ROUNDS})")
    parser.add_argument("--steps", type=int, default=8, help="in a turn (8)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one turn")
    add_options(parser)
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.cases.split(";") if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}")
    if os.geteuid() != 0:
        say("network namespaces need root")
        return 2
    return run(arguments, lambda: measure_all(arguments), print_result)


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every case, turn by turn."""
    cases = {name: CASES[name] for name in arguments.cases.split(";")}
    rounds: dict[str, dict[str, list[list[float]]]] = {
        name: {label: [] for label in CONTESTANTS} for name in cases
    }
    for name, shape in cases.items():
        try:
            with Hosts(shape.gbit, 1500) as hosts:
                for _ in range(arguments.rounds):
                    for turn in (CONTESTANTS[:3], CONTESTANTS[3:]):
                        for label, times in run_ranks(shape, hosts, turn, arguments).items():
                            rounds[name][label].append(times)
        except RuntimeError as error:
            raise Failed(f"{name}: {error}") from None
    few = arguments.rounds < MIN_ROUNDS
    reasons = [f"{arguments.rounds} rounds are too few, {MIN_ROUNDS} are needed"] if few else []
    return {
        "benchmark": "steps of a stack of layers between two hosts (namespaces, tbf), 1 rank each, 1 thread each; "
        f"{arguments.rounds} rounds of {arguments.steps} steps",
        "noise": {"reasons": reasons},
        "cases": {name: found(cases[name], one) for name, one in rounds.items()},
    }


def run_ranks(
    shape: Shape, hosts: Hosts, turn: tuple[str, ...], arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """One turn in fresh ranks: label -> mean times of its steps. RuntimeError when a rank failed."""
    from horoclone.bootstrap.rendezvous import Server

    elements = shape.mbytes * 1e6 / 4
    plan = {
        "layers": [(int(size * elements), share * shape.computing_ms / 3) for size, share in shape.layers],
        "contestants": turn,
        "steps": arguments.steps,
    }
    secret, job = secrets.token_hex(16), f"priority-{secrets.token_hex(4)}"
    server = hosts.inside(0, lambda: Server(secret.encode(), job, 2, [f"{hosts.addresses[0]}:0"]))
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        try:
            for rank in range(2):
                words = [sys.executable, str(HERE / "priority_worker.py"), json.dumps(plan), str(out)]
                environment = {
                    **os.environ,
                    **place(Case(shape.gbit, 1500, 1, (), (), {}), rank),
                    "HOROCLONE_RENDEZVOUS": ",".join(server.addresses),
                    "HOROCLONE_SECRET": secret,
                    "HOROCLONE_JOB": job,
                }
                ranks.append(
                    subprocess.Popen(hosts.command(rank, words), env=environment, start_new_session=True)
                )
            wait(ranks, arguments.limit)
        finally:
            for one in ranks:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
            server.close()
        every = json.loads(out.read_text(encoding="utf-8"))
    return {label: slowest_rank([rank[label] for rank in every]) for label in turn}


def found(shape: Shape, rounds: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Medians, the speed-up with its 95 % interval, and how much of the communication is hidden."""
    summaries = {label: summarise(one) for label, one in rounds.items()}
    speed = dataclasses.asdict(ratio_of(summaries["priority"].rounds_us, summaries["fifo"].rounds_us))
    hidden = {}
    for label in ("fifo", "priority"):
        shares = [
            1 - (step - computing) / communication
            for step, computing, communication in zip(
                summaries[label].rounds_us,
                summaries["computing alone"].rounds_us,
                summaries["communication alone"].rounds_us,
                strict=True,
            )
        ]
        shares.sort()
        hidden[label] = {"ratio": shares[len(shares) // 2], "low": shares[0], "high": shares[-1]}
    return {
        "shape": dataclasses.asdict(shape),
        "contestants": {label: dataclasses.asdict(one) for label, one in summaries.items()},
        "speed-up": speed,
        "hidden": hidden,
    }


def print_result(whole: dict[str, Any]) -> None:
    """A table for each case, and its gates."""
    for name, case in whole["cases"].items():
        shape = case["shape"]
        print(
            f"{name}: {shape['gbit']:g} Gbit/s, {shape['mbytes']:g} MB of gradients in {len(shape['layers'])} layers"
        )
        rows = []
        for label, one in case["contestants"].items():
            share = case["hidden"].get(label)
            spread = f"{time_text(one['low_us'])} .. {time_text(one['high_us'])}"
            rows.append(
                [label, time_text(one["median_us"]), spread, f"{share['ratio']:.0%}" if share else "-"]
            )
        print_rows(["contestant", "step", "rounds", "hidden"], rows)
        for what, least in shape["gates"].items():
            value = case["speed-up"] if what == "speed-up" else case["hidden"]["priority"]
            shares = f"{value['ratio']:.0%} ({value['low']:.0%} to {value['high']:.0%})"
            text = ratio_text(value) if what == "speed-up" else shares
            print(f"  {what} >= {least:g}: {text}, {verdict(value, least)}")
        print()


if __name__ == "__main__":
    sys.exit(main())
