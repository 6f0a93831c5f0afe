"""How long an elastic job stands still when a rank is killed: from kill -9 to the next step that all survivors did.

    python benchmarks/recovery.py [--ranks 4] [--kills 50] [--step-ms 5] [--elements 25000] [--json FILE]

horoclonerun starts the ranks on this machine. A rank chosen at random is killed when the job is whole; its slot gets a
new worker, and the next kill comes when that one has joined. The clock is CLOCK_MONOTONIC, which all processes of a
machine share. Printed are the distribution, and where the time of the median kill goes: until the first survivor knows,
until the next generation is formed and connected, and the step itself. "Growing" is the pause when the new worker
joins: from the last step of the smaller generation to the first of the larger one.

Exit codes: 0, 1 the job failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

SELF = Path(__file__).resolve()
LIMIT_S = 60.0  # for anything that is waited for


def worker(step_s: float, elements: int) -> None:
    """Steps until killed; prints `generation number rank size pid t`, `step number t`, `lost t`."""
    import numpy as np

    import horoclone as hvd
    from horoclone.elastic.generation import generation
    from horoclone.elastic.member import offer_commits, start_notices

    wanted = [0]
    start_notices(lambda number, update: wanted.__setitem__(0, number))
    model = np.ones(elements, dtype=np.float32)

    def say(*words: object) -> None:
        print(*words, f"{time.monotonic():.6f}", flush=True)

    hvd.init()
    step = 0
    while True:
        now = generation()
        say("generation", now.number, now.rank, now.size, os.getpid())
        try:
            if not now.skip_sync:
                hvd.broadcast(model, root_rank=now.commit_root, name="model")
                step = int(hvd.broadcast(np.array([step]), root_rank=now.commit_root, name="step")[0])
            first = True
            while True:
                hvd.allreduce(model, name="gradients")
                step += 1
                if first:
                    say("step", now.number)
                    first = False
                offer_commits((step,))
                newest = hvd.allreduce(np.array([wanted[0]]), op=hvd.Max, name="commit")[0]
                if newest > now.number:
                    say("updated", now.number)
                    break
                time.sleep(step_s)
        except hvd.HorovodInternalError:
            say("lost", now.number)
        hvd.shutdown()
        hvd.init()


class Watched:
    """What the workers of a running job have said, by generation."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pids: dict[int, dict[int, int]] = defaultdict(dict)  # generation -> rank -> pid
        self.sizes: dict[int, int] = {}
        self.times: dict[tuple[str, int], list[float]] = defaultdict(list)  # (what, generation) -> when

    def read_until_whole(self, size: int, after: int) -> int:
        """Reads until all ranks of a generation of this size, newer than `after`, have done a step; its number."""
        deadline = time.monotonic() + LIMIT_S
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._take(line.split())
            for number, pids in self.pids.items():
                if number > after and len(pids) == size and len(self.times["step", number]) == size:
                    return number
            if time.monotonic() > deadline:
                break
        raise RuntimeError(f"no generation of {size} ranks came after {after}")

    def _take(self, words: list[str]) -> None:
        match words:
            case [_, "generation", number, rank, size, pid, at]:
                self.pids[int(number)][int(rank)] = int(pid)
                self.sizes[int(number)] = int(size)
                self.times["generation", int(number)].append(float(at))
            case [_, ("step" | "lost" | "updated") as what, number, at]:
                self.times[what, int(number)].append(float(at))


def measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    ranks, found = arguments.ranks, []
    command = [sys.executable, "-m", "horoclone.launch", "-np", str(ranks), "--min-np", "1"]
    command += [sys.executable, str(SELF), "--worker", "--step-ms", str(arguments.step_ms)]
    command += ["--elements", str(arguments.elements)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOROCLONE_SELECTION": "fixed"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=sys.stderr if arguments.verbose else subprocess.DEVNULL,
        text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            seen = Watched(process)
            whole = seen.read_until_whole(ranks, 0)
            chance = random.Random(arguments.seed)
            for _ in range(arguments.kills):
                time.sleep(chance.uniform(0.05, 0.15))
                victim = seen.pids[whole][chance.randrange(ranks)]
                killed = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                before, whole = whole, seen.read_until_whole(ranks, whole)
                found.append(times_of(seen, before, killed, whole))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            process.wait(LIMIT_S)
    return found


def times_of(seen: Watched, before: int, killed: float, whole: int) -> dict[str, float]:
    """In ms after the kill."""
    number = before + 1
    while len(seen.times["step", number]) < seen.sizes.get(number, 1):  # one that was lost while it began
        number += 1
    lost, formed, done = (
        seen.times["lost", before],
        seen.times["generation", number],
        seen.times["step", number],
    )
    row = {"known": min(lost) - killed, "formed": max(formed) - killed, "step": max(done) - killed}
    if number < whole:
        ended = seen.times["updated", whole - 1]
        row["growing"] = max(seen.times["step", whole]) - min(ended) if ended else float("nan")
    return {name: value * 1000 for name, value in row.items()}


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--elements", type=int, default=25_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="show what the launcher says")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.step_ms / 1000, arguments.elements)
        return 0
    try:
        rows = measure(arguments)
    except RuntimeError as error:
        print(f"recovery: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.ranks} ranks on one machine, {len(rows)} kills; ms after kill -9")
    print(f"{'':<28}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}")
    names = {
        "known": "the first survivor knows",
        "formed": "the next generation is up",
        "step": "all survivors did a step",
        "growing": "growing: the pause",
    }
    for name, text in names.items():
        values = [row[name] for row in rows if row.get(name, float("nan")) == row.get(name)]
        if values:
            figures = [percentile(values, part) for part in (0.5, 0.9, 0.99)] + [max(values)]
            print(f"{text:<28}" + "".join(f"{figure:8.1f}" for figure in figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
