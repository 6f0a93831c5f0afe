"""What an engine costs that has nothing to do, and what init() alone costs: `python benchmarks/idle.py`.

Ranks that sleep after init(): processor time, messages, sleeps and wake-ups of each. A process alone that computes,
before init(), after it, and after shutdown(), in turn. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

from report import print_rows, ratio_text
from session import on_ranks, options, run
from statistics_of import ratio_of

WAYS = {"shared memory": {}, "TCP": {"HOROCLONE_SHARED_MEMORY": "0"}}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--np", [2, 4], "ranks"), ("--seconds", 5.0, "for which the ranks sleep"),
        ("--rounds", 9, "turns of the process alone"),
    )  # fmt: skip
    return run(arguments, lambda: measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    idle = {
        f"{size} ranks, {way}": on_ranks(sleep, arguments.seconds, np=size, **environment)
        for size in arguments.np
        for way, environment in WAYS.items()
    }
    (alone,) = on_ranks(compute, arguments.rounds, np=1)
    return {
        "benchmark": f"idle engines for {arguments.seconds:g} s; init() and a process alone, {arguments.rounds} rounds",
        "idle": idle,
        "alone_ms": alone,
        "cost": {
            n: dataclasses.asdict(ratio_of(alone["before"], alone[n])) for n in ("after init", "shut down")
        },
    }


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, ranks in result["idle"].items():
        worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        rows.append([
            name, f"{100 * worst['cpu']:.4f} %", f"{worst['messages']:.0f}", f"{worst['bytes']:.0f}",
            f"{worst['sleeps']:.0f}", f"{worst['switches']:.1f}/s",
        ])  # fmt: skip
    print_rows(
        ["idle, the worst rank", "of a core", "messages", "bytes", "sleeps", "switches of our threads"], rows
    )
    cost = {name: ratio_text(one) for name, one in result["cost"].items()}
    rows = [
        [name, f"{statistics.median(ms):.2f} ms", cost.get(name, "")]
        for name, ms in result["alone_ms"].items()
    ]
    print_rows(["a process alone", "a step", "of the time before init()"], rows)


# --- on the ranks --------------------------------------------------------------------------------------------------


def sleep(seconds: float) -> dict[str, float]:
    """What this rank did while nobody wanted anything of it."""
    import json
    import re
    import time

    import numpy as np

    import horoclone as hvd
    from horoclone.runtime import native

    hvd.init()
    for turn in range(3):
        hvd.allreduce(np.ones(1000), name=f"warm.{turn}")
    time.sleep(0.5)

    def switches() -> int:
        """Of the threads of ours."""
        tasks = [t for t in Path("/proc/self/task").iterdir() if (t / "comm").read_text()[:3] == "hc-"]
        texts = [(task / "status").read_text() for task in tasks]
        return sum(int(n) for text in texts for n in re.findall(r"ctxt_switches:\s+(\d+)", text))

    def look() -> tuple[dict[str, Any], int]:
        return json.loads(native().counters()), switches()

    before = look()
    began = time.process_time()
    time.sleep(seconds)
    used = time.process_time() - began
    after = look()
    mesh = [counters["mesh"] for counters, _ in (before, after)]
    found = {
        "cpu": used / seconds,
        "messages": mesh[1]["frames_sent"] - mesh[0]["frames_sent"],
        "bytes": mesh[1]["bytes_sent"] - mesh[0]["bytes_sent"],
        "sleeps": after[0]["sleeps"] - before[0]["sleeps"],
        "switches": (after[1] - before[1]) / seconds,
    }
    hvd.barrier()
    return found


def compute(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step of plain torch before init(), after it and after shutdown(), in turn."""
    import time

    import torch

    import horoclone.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 512)

    def step() -> float:
        times = []
        for _ in range(40):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            times.append(1000 * (time.perf_counter() - began))
        return sorted(times)[len(times) // 2]

    step()
    found: dict[str, list[float]] = {"before": [], "after init": [], "shut down": []}
    for _ in range(rounds):
        found["before"].append(step())
        hvd.init()
        found["after init"].append(step())
        hvd.shutdown()
        found["shut down"].append(step())
    return found


if __name__ == "__main__":
    sys.exit(main())
