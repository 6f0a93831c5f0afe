"""How long a job stands still when a rank is killed: from kill -9 to the next step that all survivors did.

    python benchmarks/recovery.py [--ranks 4] [--hosts 2] [--kills 50] [--phase random] [--elements 25000] [--json FILE]
    python benchmarks/recovery.py --contestants horoclone,torchrun,torchft [--torchft-python PYTHON]

The ranks run recovery_worker.py (--framework torch or numpy), which compares every gradient and every weight of every
step with a NumPy model of the ranks that are there; a wrong sum ends the benchmark with code 1. A rank is killed, or
kills itself at a point that was chosen, when the job is whole; what is lost is started anew, and the next kill comes
when all are there again.
Kinds of kills: in forward, backward, collective, step and commit; at any moment (moment); in init, while the job grows
(those who are there do not synchronise then: the new one was sent the state); and in the recovery from a loss a moment
before (recovery). --phase random takes all of them in turn. The phase in which the process really was is read from its
file, and recorded with each kill.

--hosts 2: horoclonerun runs in a network namespace, and half of its workers in another one (root and iproute2).
The clock is CLOCK_MONOTONIC, which all processes of a machine share. "known": until the first survivor knows;
"formed": until the next generation of the survivors is up; "step": until all of its ranks did a step.
"growing" is what a new worker costs: how long the others stand still, from the interrupt until they train again, which
they do while it still receives what has changed; and how much longer than a step it takes until all did one.

torchrun restarts all ranks from a file (--max-restarts, gloo); torchft 0.2.0 leaves a replica out of the next quorum
(gloo, one replica a rank, its lighthouse with --torchft-heartbeat-ms; it needs a Python that has it).

Exit codes: 0, 1 the job failed, a sum was wrong, or something was left behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
from recovery_jobs import LIMIT_S, Horoclone, Job, Torchft, Torchrun
from recovery_worker import Page
from session import Failed, options, refuse, write

# kind -> phases of the worker in which it is done; "" for a kill from outside
KINDS: dict[str, list[str]] = {
    "forward": ["forward"],
    "backward": ["backward"],
    "collective": ["collective"],
    "step": ["step"],
    "commit": ["elastic.commit.begin", "elastic.commit.saved", "elastic.commit.agree", "elastic.commit.done"],
    "moment": [""],
    "init": ["init.wait", "init.told", "init.gathered", "init.connected"],
    "recovery": [
        "elastic.run.failed", "elastic.run.restored", "elastic.run.between", "membership.suspect",
        "init.wait", "membership.form", "init.told", "init.gathered", "init.connected", "elastic.run.reset"
    ],
}  # fmt: skip
OTHERS = {
    "forward": ["forward"], "backward": ["backward"], "step": ["step"], "commit": ["commit"], "moment": [""],
}  # fmt: skip
LATE = ("forward", "backward", "collective")  # death comes up to 1 ms after the phase has begun


class Kill:
    """One that was done: who, when, and in which phase."""

    def __init__(self, kind: str, pid: int, killed_s: float, phase: str) -> None:
        self.kind, self.pid, self.killed_s, self.phase = kind, pid, killed_s, phase


class Killer:
    """Kills ranks of a job, one after the other, and waits until it is whole again."""

    def __init__(self, job: Job, kinds: list[str], arguments: argparse.Namespace) -> None:
        self._job, self._kinds = job, kinds
        self._table = KINDS if isinstance(job, Horoclone) else OTHERS
        self._chance = random.Random(arguments.seed)
        self._ranks, self._count = arguments.ranks, arguments.kills
        self._number = 0  # of the generation that is known to be complete
        self.kills: list[Kill] = []

    def run(self) -> None:
        self._number = self._job.wait_for(
            lambda number: self._job.size(number) == self._ranks, "the first steps"
        )
        kinds = itertools.cycle(self._kinds)
        while len(self.kills) < self._count:
            time.sleep(self._chance.uniform(0.05, 0.15))
            kind = next(kinds)
            if kind == "init":
                self._while_growing()
            elif kind == "recovery":
                self._twice()
            else:
                self._once(kind, self._chance.choice(self._members()))
            self._number = self._job.wait_for(self._is_whole, "a whole job")

    def _members(self) -> list[int]:
        return list(self._job.members(self._number).values())

    def _is_whole(self, number: int) -> bool:
        gone = {kill.pid for kill in self.kills}
        return self._job.size(number) == self._ranks and not gone & set(self._job.members(number).values())

    def _once(self, kind: str, victim: int) -> None:
        phase = self._chance.choice(self._table[kind])
        page = Page(self._job.folder, victim)
        if phase:
            page.aim(phase, self._chance.uniform(1e-6, 1e-3) if kind in LATE else 0.0)
            self._job.wait_for_the_end(victim)
            killed_s = page.died_s()
        else:
            time.sleep(self._chance.uniform(0.0, 0.02))
            killed_s = self._job.kill(victim)
        self.kills.append(Kill(kind, victim, killed_s, page.phase()))

    def _while_growing(self) -> None:
        """One is killed first, so that the job grows; the second dies in it."""
        first, second, third = self._chance.sample(self._members(), 3)
        self._once("moment", first)
        self._job.wait_for(lambda number: number > self._number, "a step of those who are left")
        page = Page(self._job.folder, second)
        page.aim(self._chance.choice(self._table["init"]), 0.0)
        kind, deadline = "init", time.monotonic() + LIMIT_S
        while not self._job.wait_for_the_end(second, 0.5):
            newest = self._job.newest()
            if (
                third
                and self._job.size(newest) == self._ranks
                and time.monotonic() > deadline - LIMIT_S + 1.0
            ):
                self._once("moment", third)  # the job had grown before the aim was taken
                kind, third = "recovery", 0
            if time.monotonic() > deadline:
                raise Failed(f"process {second} should have died in {kind}")
        self.kills.append(Kill(kind, second, page.died_s(), page.phase()))

    def _twice(self) -> None:
        first, second = self._chance.sample(self._members(), 2)
        phase = self._chance.choice(self._table["recovery"])
        page = Page(self._job.folder, second)
        page.aim(phase, 0.0)
        self._once("moment", first)
        self._job.wait_for_the_end(second)
        self.kills.append(Kill("recovery", second, page.died_s(), page.phase()))


def row_of(job: Job, kill: Kill) -> dict[str, Any]:
    """What happened after a kill, in ms: in the first generation without it that did a step."""
    for number in job.complete():
        done_s = job.times("step", number)
        members = set(job.members(number).values())
        if min(done_s) > kill.killed_s and kill.pid not in members:
            break
    else:
        raise Failed(f"nothing came after the kill of {kill.pid} in {kill.phase}")
    before = [one for one in job.all_numbers() if one < number and kill.pid in job.members(one).values()]
    lost_s = [when for one in before for when in job.times("lost", one) if when >= kill.killed_s]
    formed_s = max(job.times("generation", number))
    row: dict[str, Any] = {
        "kind": kill.kind,
        "phase": kill.phase,
        "generation": number,
        "left": job.size(number),
        "formed": (formed_s - kill.killed_s) * 1000,
        "step": (max(done_s) - kill.killed_s) * 1000,
    }
    if lost_s:
        row["known"] = (min(lost_s) - kill.killed_s) * 1000
    return row


def pauses_of(job: Job) -> list[tuple[float, ...]]:
    """In ms, where somebody came and nobody was lost: from the interrupt until the others train, until all train, until
    all did a step, and that without the time of a step as it was before."""
    found = []
    for number in job.complete():
        asked_s = job.times("updated", number - 1)
        if asked_s and not job.times("lost", number - 1):
            before = set(job.members(number - 1).values())
            began_s = job.beginnings(number)
            done_s = max(job.times("step", number))
            ends_s = [
                max(when for pid, when in began_s.items() if pid in before),
                max(began_s.values()),
                done_s,
            ]
            ends_s.append(done_s - job.step_s(number - 1))
            found.append(tuple((when - min(asked_s)) * 1000 for when in ends_s))
    return found


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def figures(values: list[float]) -> str:
    shown = [percentile(values, part) for part in (0.5, 0.9, 0.99)] + [max(values)]
    return f"{len(values):>7}" + "".join(f"{one:10.1f}" for one in shown)


HEADER = f"{'':<34}{'kills':>7}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One contestant: its rows, and what else was seen."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        job = {"horoclone": Horoclone, "torchrun": Torchrun, "torchft": Torchft}[name](
            Path(folder), arguments
        )
        table = KINDS if name == "horoclone" else OTHERS
        kinds = list(table) if arguments.phase == "random" else [arguments.phase]
        if arguments.phase not in ("random", *table):
            raise Failed(f"{name} has no kills of the kind {arguments.phase}")
        load = machine.Load()
        with job:
            killer = Killer(job, kinds, arguments)
            killer.run()
            time.sleep(0.2)
        job.check_nothing_is_left()
        job.check_the_sums()
        rows = [row_of(job, kill) for kill in killer.kills]
        return {
            "contestant": name,
            "framework": arguments.framework if name == "horoclone" else "torch",
            "hosts": arguments.hosts,
            "elements": arguments.elements,
            "others_load": load.others(),
            "steps_checked": job.steps(),
            "generations": len(job.all_numbers()),
            "rows": rows,
            "growing": pauses_of(job),
        }


def print_one(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    rows, where = found["rows"], f"{found['hosts']} host{'s' if found['hosts'] > 1 else ''}"
    print(
        f"\n{found['contestant']} ({found['framework']}): {arguments.ranks} ranks on {where}, "
        f"{found['elements']} elements, {len(rows)} kills, {found['generations']} generations; "
        "every sum right. ms after kill -9"
    )
    if found["others_load"] is not None:
        print(f"other processes used {found['others_load']:.2f} of {os.cpu_count()} cores meanwhile")
    print(HEADER)
    names = {"known": "the first survivor knows", "formed": "the next generation is up"}
    for key, text in {**names, "step": "all survivors did a step"}.items():
        values = [row[key] for row in rows if key in row]
        if values:
            print(f"{text:<34}{figures(values)}")
    growing = ("growing: until the others train", "until all train", "until all did a step", "less a step")
    for i, text in enumerate(growing):
        if values := [row[i] for row in found["growing"]]:
            print(f"{text:<34}{figures(values)}")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        values = [row["step"] for row in rows if row["kind"] == kind]
        print(f"{'  step, killed in ' + kind:<34}{figures(values)}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    arguments = options(
        __doc__, argv, ("--contestants", ["horoclone"], "of the same training", ("horoclone", "torchrun", "torchft")),
        ("--framework", "torch", "of horoclone's ranks; numpy's come much sooner", ("torch", "numpy")),
        ("--ranks", 4, "ranks"), ("--hosts", 1, "hosts", (1, 2)), ("--kills", 50, "kills"),
        ("--phase", "random", "kind of kill", ("random", *KINDS)), ("--step-ms", 5.0, "pause after each step"),
        ("--elements", 25_000, "of the model, 4 bytes each: up to 25 million"),
        ("--save-every", 1, "steps between the files of torchrun's rank 0"),
        ("--torchft-python", sys.executable, "an interpreter that has torchft"),
        ("--torchft-heartbeat-ms", 5000, "of its lighthouse, whose default it is"), ("--seed", 1, "of the kills"),
        ("--verbose", False, "show what launcher and workers say"),
    )  # fmt: skip
    if arguments.hosts == 2 and arguments.contestants != ["horoclone"]:
        refuse("--hosts 2 is for horoclone alone")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    found = []
    for name in arguments.contestants:
        try:
            found.append(measure(name, arguments))
        except Failed as error:
            print(f"recovery of {name}: {error}", file=sys.stderr)
            return 1
        print_one(found[-1], arguments)
    if len(found) > 1:
        print(f"\nuntil all survivors did a step, ms\n{HEADER}")
        for one in found:
            print(f"{one['contestant']:<34}{figures([row['step'] for row in one['rows']])}")
        medians = {one["contestant"]: statistics.median(row["step"] for row in one["rows"]) for one in found}
        first = found[0]["contestant"]
        for name in list(medians)[1:]:
            print(f"the median of {name} is {medians[name] / medians[first]:.1f} times that of {first}")
    write(
        arguments.json,
        {"machine": machine.facts(), "ranks": arguments.ranks, "limit_s": LIMIT_S, "found": found},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
