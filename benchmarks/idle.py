"""What an engine costs that has nothing to do: `python benchmarks/idle.py`.

Ranks that sleep after init(): processor time, messages, sleeps and wake-ups of each. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from report import print_rows
from session import on_ranks, options, run

WAYS = {"shared memory": {}, "TCP": {"HOROCLONE_SHARED_MEMORY": "0"}}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = options(
        __doc__, argv, ("--np", [2, 4], "ranks"), ("--seconds", 5.0, "for which the ranks sleep")
    )
    return run(arguments, lambda: measure(arguments), show)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    idle = {
        f"{size} ranks, {way}": on_ranks(sleep, arguments.seconds, np=size, **environment)
        for size in arguments.np
        for way, environment in WAYS.items()
    }
    return {"benchmark": f"idle engines for {arguments.seconds:g} s", "idle": idle}


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


if __name__ == "__main__":
    sys.exit(main())
