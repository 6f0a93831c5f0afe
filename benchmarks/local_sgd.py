"""DiLoCo beside steps without communication and beside averaging in every step, between two hosts with a slow link.

`python benchmarks/local_sgd.py`: the cable and layers of priority.py (VGG, 36 MB of gradients, 1 Gbit/s). Needs root.
One movement of all parameters is sent in each turn, and is under way for half of its steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from hosts import Hosts  # noqa: E402
from priority import CASES, run_ranks  # noqa: E402

TURN = ("computing alone", "diloco", "fifo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="in a turn, and between two movements (40)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one turn")
    wish = parser.parse_args()
    shape = CASES["vgg"]
    ms: dict[str, list[float]] = {name: [] for name in TURN}
    with Hosts(shape.gbit, 1500) as hosts:
        for number in range(wish.rounds):
            order = TURN if number % 2 == 0 else TURN[::-1]
            for name, times in run_ranks(shape, hosts, order, wish).items():
                ms[name].append(times[0] / 1e3)
    for name in TURN:
        beside = statistics.median(a / b for a, b in zip(ms[name], ms[TURN[0]], strict=True))
        rounds = ", ".join(f"{one:.1f}" for one in ms[name])
        print(
            f"{name:16} {statistics.median(ms[name]):7.1f} ms a step ({rounds}), {beside:.3f} of computing alone"
        )


if __name__ == "__main__":
    main()
