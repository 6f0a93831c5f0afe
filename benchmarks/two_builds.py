"""Two builds of horoclone beside each other: `python benchmarks/two_builds.py BEFORE AFTER [--rounds 25]`.

BEFORE and AFTER are checkouts, each with its own virtual environment .venv into which it is installed. Two ranks of
each build run at the same time; while one pair measures, the other sleeps. The pairs take turns case by case, every few
milliseconds to a second, so that what the machine does meanwhile meets both alike: a run of one build after a run of
the other compares the machine's moods where they last longer than a run. The cases are those of core.py, allreduce.py
--short and models.py without the peers. A ratio above 1 says that AFTER is faster.

Give the same checkout twice to see what the method itself cannot tell apart. Exit codes: see session.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RANKS = 2
LABELS = ("before", "after")
GATE = 0.97  # a median below this share of the speed before is marked
WAYS = {"one by one": "start_many", "grouped": "group_many", "buckets": "bucket_many"}
CASES = "TWO_BUILDS"  # sizes and sets, for the ranks
Measure = Callable[[list[Any], bool], list[float]]


def be_a_rank(where: str, library: str) -> None:
    """A rank of one of the builds, whose own folder of benchmarks it imports: measures the cases that it is told."""
    import torch
    from core_ranks import Core
    from measure import Bench, Plan, calls_for
    from meeting import communicator

    comm = communicator()
    torch.set_num_threads(1)
    sizes, sets = json.loads(os.environ[CASES])
    bench = Bench(comm, Plan(sizes, 1, ["horoclone", "async"], "private", 1, True, sets))
    core = Core(library, comm)
    core.allocate(max(*sizes, 1 << 20), False, True)
    own = {one.label: one for one in bench.contestants}

    def measure(case: list[Any], first: bool) -> list[float]:
        kind, label, what = case
        if kind == "core":
            return (
                core.loop("horoclone")
                if label == "loop"
                else core.calls(label, what, 6 if first else 3, calls_for(what))
            )
        if kind == "size":
            return bench._time_size(own[label], what, first)
        if kind == "loop":
            return bench._time_loop(own[label])
        return bench._sets._time(own["horoclone async"], WAYS[label], what, sets[what])

    with torch.no_grad(), socket.socket(socket.AF_UNIX) as link:
        link.connect(where)
        stream = link.makefile("rw")
        print(comm.rank, file=stream, flush=True)
        for line in stream:
            order = json.loads(line)
            print(json.dumps(measure(order["case"], order["first"])), file=stream, flush=True)
    core.close()
    bench.close()


@contextlib.contextmanager
def pair(checkout: Path, folder: Path, cases: str) -> Iterator[Measure]:
    """A call that has a case measured by the two ranks of one build: microseconds per call, of the slower rank."""
    from session import Failed
    from start import environment, stop
    from statistics_of import slowest_rank

    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        raise Failed(
            f"{checkout} has no .venv with horoclone in it: make .venv/.ready-test .venv/.ready-package there"
        )
    # core_calls.cc of that checkout against its installed core
    code = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import core; core.compile_calls(pathlib.Path('.'))"
    subprocess.run([python, "-c", code, checkout / "benchmarks"], check=True, cwd=folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "door"))
        listener.listen(RANKS)
        listener.settimeout(120)
        words: list[str | Path] = [__file__, "--rank", checkout, folder / "door", folder / "core_calls.so"]
        ranks = subprocess.Popen(
            [python.parent / "mpirun", "--bind-to", "none", "-n", str(RANKS), python, *words],
            env=environment() | {CASES: cases}, start_new_session=True,
        )  # fmt: skip
        try:
            links = [listener.accept()[0] for _ in range(RANKS)]
            for link in links:
                link.settimeout(120)
            streams = [link.makefile("rw") for link in links]
            for stream in streams:
                stream.readline()  # its rank

            def measure(case: list[Any], first: bool) -> list[float]:
                for stream in streams:
                    print(json.dumps({"case": case, "first": first}), file=stream, flush=True)
                lines = [stream.readline() for stream in streams]
                if not all(lines):
                    raise Failed(f"a rank of {checkout} failed in {case}; what it wrote is above")
                return slowest_rank([json.loads(line) for line in lines])

            yield measure
            for stream, link in zip(streams, links, strict=True):
                stream.close()
                link.close()
            ranks.wait(30)
        finally:
            stop(ranks)


def cases_of(sizes: list[int], sets: dict[str, list[int]]) -> list[list[Any]]:
    """[program, way, size or set]."""
    labels = ("horoclone", "horoclone async")
    return [
        *(["core", kind, size] for kind in ("horoclone", "bucket") for size in sizes),
        ["core", "loop", 4],
        *(["size", label, size] for label in labels for size in sizes),
        *(["loop", label, 4] for label in labels),
        *(["set", way, name] for name in sets for way in WAYS),
    ]


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    from models import SETS
    from statistics_of import ratio_of, summarise

    cases = [one for one in cases_of(arguments.sizes, SETS) if arguments.only in json.dumps(one)]
    times: dict[tuple[int, int], list[list[float]]] = defaultdict(list)
    order = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        calls = []
        for label in LABELS:
            place = Path(folder) / label
            place.mkdir()
            checkout = getattr(arguments, label).resolve()
            calls.append(stack.enter_context(pair(checkout, place, json.dumps([arguments.sizes, SETS]))))
        for case in cases:  # prepares and warms up
            for measure in calls:
                measure(case, True)
        for _ in range(arguments.rounds):
            for index in order.sample(range(len(cases)), len(cases)):
                for build in order.sample(range(2), 2):
                    times[index, build].append(calls[build](cases[index], False))
    rows = []
    for index, case in enumerate(cases):
        before, after = (summarise(times[index, build]) for build in range(2))
        found: dict[str, Any] = {
            "before": before,
            "after": after,
            "ratio": ratio_of(after.rounds_us, before.rounds_us),
        }
        rows.append({"case": case, **{name: dataclasses.asdict(one) for name, one in found.items()}})
    return {
        "benchmark": f"Two builds; float32, sum, {RANKS} ranks, {arguments.rounds} rounds in turn",
        "rows": rows,
    }


def show(result: dict[str, Any]) -> None:
    from report import print_rows, ratio_text, size_text, time_text

    rows = []
    for row in result["rows"]:
        kind, way, what = row["case"]
        ratio = row["ratio"]
        rows.append([
            f"{kind}, {way}, {size_text(what) if isinstance(what, int) else what}",
            *(time_text(row[label]["median_us"]) for label in LABELS), ratio_text(ratio),
            "" if ratio["ratio"] >= GATE else ("slower" if ratio["high"] < GATE else "slower?"),
        ])  # fmt: skip
    print_rows(["", "before", "after", "before / after", f"below {GATE}"], rows)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    from core import SHORT
    from session import options, run

    arguments = options(
        __doc__, argv, ("before", Path(), "a checkout with its .venv"), ("after", Path(), "another one, or the same"),
        ("--rounds", 25, "of all cases"), ("--sizes", SHORT, "bytes"), ("--seed", 1, "of the order"),
        ("--only", "", 'cases whose JSON holds this text, for example "size"'),
    )  # fmt: skip
    return run(arguments, lambda: measured(arguments), show)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.path[0] = str(Path(sys.argv[2]) / "benchmarks")
        be_a_rank(sys.argv[3], sys.argv[4])
    else:
        sys.exit(main())
