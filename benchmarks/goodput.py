"""What is left of a job's training when a rank is killed again and again.

    python benchmarks/goodput.py [--minutes 30] [--every 15] [--ranks 3] [--torchft-python PYTHON] [--json FILE]

horoclone, torchrun and torchft do the same training (recovery_worker.py, which compares every gradient and weight with
NumPy) at the same time on the same cores, and one rank of each is killed at the same moments. Goodput is the number of
steps a second that are in the state at the end, divided by that of the same job before the first kill (--calm seconds):
what was done and lost does not count. For batches each step counts as often as ranks took part in it, so that a rank
that is still missing lowers it, too.

Exit codes: 0, 1 a job failed, a sum was wrong, or something was left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import machine
from recovery_jobs import Horoclone, Job, Torchft, Torchrun
from session import options, write

CONTESTANTS: dict[str, type[Job]] = {"horoclone": Horoclone, "torchrun": Torchrun, "torchft": Torchft}


class Trial(threading.Thread):
    """One job, killed at the moments that all share. found: what came of it; failure: why nothing did."""

    def __init__(
        self, name: str, folder: Path, arguments: argparse.Namespace, ready: threading.Barrier
    ) -> None:
        super().__init__(name=name)
        self._job = CONTESTANTS[name](folder / name, arguments)
        self._wishes, self._ready = arguments, ready
        self._chance = random.Random(arguments.seed)
        self.found: dict[str, Any] = {}
        self.failure = ""

    def run(self) -> None:
        try:
            with self._job:
                self._train()
            self._job.check_nothing_is_left()
            self._job.check_the_sums()
        except Exception as error:  # the others must not wait for this job
            self.failure = f"{self.name}: {type(error).__name__}: {error}"
            self._ready.abort()

    def _train(self) -> None:
        wishes, job = self._wishes, self._job
        job.wait_for(lambda number: job.size(number) == wishes.ranks, "the first steps")
        self._ready.wait(600)
        began = time.monotonic(), *job.work_at(job.newest())
        time.sleep(wishes.calm)
        first = last = self._interrupt()
        kills = 1
        for turn in range(1, int(wishes.minutes * 60 / wishes.every) + 1):
            time.sleep(max(0.0, first[0] + turn * wishes.every - time.monotonic()))
            last = self._interrupt()
            kills += 1
        calm_s, under_s = first[0] - began[0], last[0] - first[0]
        self.found = {
            "contestant": self.name,
            "kills": kills,
            "seconds": under_s,
            "steps_s_before": (first[1] - began[1]) / calm_s,
            "steps_s": (last[1] - first[1]) / under_s,
            "goodput": (last[1] - first[1]) / under_s / ((first[1] - began[1]) / calm_s),
            "goodput_of_batches": (last[2] - first[2]) / under_s / ((first[2] - began[2]) / calm_s),
        }

    def _interrupt(self) -> tuple[float, int, int]:
        """Kills a rank; when that was, and the steps and batches in the state with which the others went on."""
        job = self._job
        number = job.wait_for(lambda number: job.size(number) > 1, "a second rank")
        victim = self._chance.choice(list(job.members(number).values()))
        killed_s = job.kill(victim)
        after = job.wait_for(lambda now: now > number and victim not in job.members(now).values(), "going on")
        return killed_s, *job.work_at(after)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    return options(
        __doc__, argv, ("--contestants", list(CONTESTANTS), "side by side", tuple(CONTESTANTS)),
        ("--minutes", 30.0, "of kills"), ("--every", 15.0, "seconds between two kills"),
        ("--calm", 60.0, "seconds before the first one"), ("--ranks", 3, "ranks"),
        ("--framework", "torch", "of horoclone's ranks", ("torch", "numpy")), ("--hosts", 1, "hosts", (1,)),
        ("--step-ms", 50.0, "pause after each step"), ("--elements", 25_000, "of the model, 4 bytes each"),
        ("--save-every", 1, "steps between the files of torchrun's rank 0"),
        ("--torchft-python", sys.executable, "an interpreter that has torchft"),
        ("--torchft-heartbeat-ms", 5000, "of its lighthouse, whose default it is"), ("--seed", 1, "of the kills"),
        ("--verbose", False, "show what launcher and workers say"),
    )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    load = machine.Load()
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        ready = threading.Barrier(len(arguments.contestants))
        trials = [Trial(name, Path(folder), arguments, ready) for name in arguments.contestants]
        for one in trials:
            one.start()
        for one in trials:
            one.join()
    failures = [one.failure for one in trials if one.failure]
    print("\n".join(failures), file=sys.stderr, end="\n" if failures else "")
    found = [one.found for one in trials if one.found and not one.failure]
    print(
        f"{arguments.ranks} ranks each, a kill every {arguments.every:g} s for {arguments.minutes:g} minutes"
    )
    if (others := load.others()) is not None:
        print(f"other processes used {others:.2f} of {os.cpu_count()} cores meanwhile")
    print(f"{'':<12}{'kills':>7}{'steps/s before':>16}{'under kills':>13}{'goodput':>9}{'of batches':>12}")
    for row in found:
        print(
            f"{row['contestant']:<12}{row['kills']:>7}{row['steps_s_before']:>16.1f}{row['steps_s']:>13.1f}"
            f"{row['goodput']:>9.1%}{row['goodput_of_batches']:>12.1%}"
        )
    write(arguments.json, {"machine": machine.facts(), "found": found})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
