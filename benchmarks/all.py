"""The short form of every benchmark, and one table of what they found: `make bench`. Under 15 minutes.

Each runs as a program of its own, with --json into the folder of results. One that finds the machine too
noisy, or that cannot run here (no root for namespaces, no such MPI), has "no conclusion" in the table, with the reason
above it.
Exit codes: 0, 1 a benchmark failed, 3 too noisy for some conclusion.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from oneccl import why_absent  # noqa: E402
from report import print_rows, ratio_text, size_text, time_text  # noqa: E402
from session import Failed  # noqa: E402
from start import find_mpi  # noqa: E402
from statistics_of import ratio_of  # noqa: E402

FEW = "65536,16777216"
PARTS: dict[str, list[str]] = {
    "allreduce": ["allreduce.py", "--short"],
    "allreduce, MPICH": ["allreduce.py", "--sizes", "4,65536,16777216,67108864", "--no-extras", "--rounds", "7",
                         "--contestants", "horoclone,mpi", "--mpi", "mpich"],
    "allreduce, Intel MPI": ["allreduce.py", "--sizes", "4,65536,16777216,67108864", "--no-extras", "--rounds", "7",
                             "--contestants", "horoclone,mpi,oneccl", "--mpi", "impi"],
    **{
        operation: ["allreduce.py", "--operation", operation, "--sizes", FEW, "--rounds", "7"]
        for operation in ("broadcast", "allgather", "reducescatter", "alltoall")
    },
    "from C++": ["core.py", "--short"],
    "models": ["models.py"],
    "models, 4 ranks": ["models.py", "--np", "4", "--sets", "ResNet-50"],
    "many small": ["many_small.py", "--sets", "1000 x 64 B,1000 x 1 KiB"],
    "step": ["step.py", "--framework", "torch", "--rounds", "7", "--steps", "3"],
    "step of small tensors": ["step.py", "--framework", "torch", "--model", "small", "--batch", "8", "--rounds", "7",
                              "--steps", "20"],
    "network": ["network.py", "--cases", "1g,10g,1g-2x2,1g-2x4", "--sizes", "26214400"],
    "idle": ["idle.py"],
    "memory": ["memory.py", "--np", "2"],
    "control": ["control.py", "--np", "2,4,8", "--steps", "12"],
    "16-bit floats": ["dtypes.py", "--rounds", "7"],
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Runs the parts and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of results (out)")
    parser.add_argument(
        "--parts", type=lambda text: text.split(";"), default=list(PARTS), help=";".join(PARTS)
    )
    parser.add_argument(
        "--force", action="store_true", help="conclude although the machine is noisy, marked so"
    )
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    codes, rows, began = {}, [], time.monotonic()
    for name in arguments.parts:
        print(f"\n=== {name}", flush=True)
        codes[name] = run_part(name, arguments.out, arguments.force)
        path = result_of(name, arguments.out)
        if codes[name] == 0 and path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            mark = " (noisy)" if result["noise"]["reasons"] else ""
            rows += [[f"{name}: {row[0]}{mark}", *row[1:]] for row in rows_of(name, result)]
        else:
            rows.append([name, "no conclusion: see above", "", ""])
    print(f"\n=== all, {(time.monotonic() - began) / 60:.1f} minutes\n")
    print_rows(["what", "horoclone", "best of the others", "theirs / ours"], rows)
    print("theirs / ours: above 1 horoclone is faster; with a 95 % interval; ? undecided.")
    return 1 if 1 in codes.values() else 3 if 3 in codes.values() else 0


def result_of(name: str, out: Path) -> Path:
    return out / f"{name.replace(', ', '_').replace(' ', '_')}.json"


def run_part(name: str, out: Path, force: bool) -> int:
    """The exit code; 2 for a part that cannot run here."""
    program, *options = PARTS[name]
    if "--mpi" in options:
        try:
            find_mpi(options[options.index("--mpi") + 1])
        except Failed as error:
            print(f"SKIPPED: {error}", flush=True)
            return 2
    if "horoclone,mpi,oneccl" in options and (absent := why_absent()):
        print(f"SKIPPED: {absent}", flush=True)
        options = ["horoclone,mpi" if option == "horoclone,mpi,oneccl" else option for option in options]
    path = result_of(name, out)
    path.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(HERE / program),
        *options,
        "--json",
        str(path),
    ]
    path_of_package = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path_of_package}
    part = subprocess.Popen([*command, *(["--force"] if force else [])], env=environment)
    try:
        return part.wait()
    finally:
        if part.poll() is None:  # we are being ended: the part ends its ranks itself
            part.terminate()
            part.wait(20)


def rows_of(name: str, result: dict[str, Any]) -> Iterator[list[str]]:
    """What | ours | the best peer | ratio."""
    if "outcomes" in result:
        yield from step_rows(result["times"])
    elif "cases" in result:
        yield from network_rows(result)
    elif result.get("sets"):
        for title, one in result["sets"].items():
            for label, ratio in one["best"]["ratios"].items():
                peer = one["best"]["peer"]
                yield [f"{title}, {label.split(', ')[1]}", time_text(one["ways"][label]["median_us"]),
                       f"{time_text(one['ways'][peer]['median_us'])} {peer}", ratio_text(ratio)]  # fmt: skip
    elif "sizes" in result:
        for one in result["sizes"]:
            yield from size_rows(one)
    elif "idle" in result:
        for title, ranks in result["idle"].items():
            cpu = max(rank["cpu"] for rank in ranks)
            yield [
                title,
                f"{100 * cpu:.3f} % of a core, {max(rank['messages'] for rank in ranks):.0f} messages",
                "",
                "",
            ]
        yield [
            "init() of a process alone: its step after / before",
            "",
            "",
            ratio_text(result["cost"]["after init"]),
        ]
    elif "ways" in result:
        for title, of in result["ways"].items():
            last = list(of)[-2]
            yield [f"{title}, {last}", f"{of[last]['proportional'] / 1e6:.1f} MB", "", ""]
    elif "dtypes" in result:
        for size, by_dtype in result["dtypes"].items():
            for dtype in ("float16", "bfloat16"):
                plain, one = by_dtype["float32"]["median_us"], by_dtype[dtype]
                ratio = ratio_text(one["of float32's bytes/s"])
                ours, theirs = time_text(one["median_us"]), f"{time_text(plain)} float32"
                yield [f"{size_text(int(size))} of {dtype}", ours, theirs, ratio]
    elif "rows" in result:
        for row in result["rows"]:
            figures = f"{row['rank 0 messages']:.1f} messages, {row['rank 0 bytes']:.0f} B of rank 0 per step"
            yield [f"{row['ranks']} ranks, {row['way']}, {row['form']}", figures, "", ""]


def size_rows(one: dict[str, Any]) -> Iterator[list[str]]:
    """A blocking call of private memory and, where there is one, a declared bucket in shared memory."""
    of = one["contestants"]
    peers = [label for label in of if not label.startswith(("horoclone", "memcpy"))]
    best = min(peers, key=lambda label: of[label]["median_us"])
    for own, what in (("horoclone", ""), ("horoclone bucket", ", bucket")):
        if own in of:
            yield [size_text(one["bytes"]) + what, time_text(of[own]["median_us"]),
                   f"{time_text(of[best]['median_us'])} {best}", ratio_text(one["ratios"][own][best])]  # fmt: skip


def step_rows(times: dict[str, dict[str, list[float]]]) -> Iterator[list[str]]:
    """A step, and what communication adds to it. Where ours adds about nothing, the ratio of the two says nothing."""
    ours, alone = times["torch horoclone"]["wall"], times["torch alone"]["wall"]
    for name in ("torch DDP", "torch DDP-view"):
        theirs = times[name]["wall"]
        ratio = ratio_text(asdict(ratio_of(ours, theirs)))
        yield [
            f"beside {name}",
            time_text(1e3 * median(ours)),
            f"{time_text(1e3 * median(theirs))} {name}",
            ratio,
        ]
        extra = [1e3 * median([a - b for a, b in zip(of, alone, strict=True)]) for of in (ours, theirs)]
        yield ["  of it communication", time_text(extra[0]), time_text(extra[1]), ""]


def network_rows(result: dict[str, Any]) -> Iterator[list[str]]:
    for name, case in result["cases"].items():
        one = case["sizes"][-1]
        own, gloo = one["contestants"]["horoclone"], one["contestants"]["gloo"]
        line = f"{time_text(own['median_us'])}, {one['found']['of line']['ratio']:.3f} of line"
        yield [
            name,
            line,
            f"{time_text(gloo['median_us'])} gloo",
            ratio_text(one["found"]["horoclone vs gloo"]),
        ]
        for label in ("horoclone fp16", "horoclone int8"):
            if label in one["contestants"]:
                ratio = ratio_text(one["found"][f"{label} vs horoclone"])
                yield [f"{name}, {label.split()[1]}", time_text(one["contestants"][label]["median_us"]),
                       f"{time_text(own['median_us'])} float32", ratio]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
