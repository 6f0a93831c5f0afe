"""Allreduce of the core's C interface beside MPI's and memcpy, timed in C++: `python benchmarks/core.py --short`.

Private buffers and declared buckets in shared memory, in the same processes, in turn, in random order (core_calls.cc,
compiled when the benchmark starts).
Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 too noisy for a conclusion.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import analyse, print_rows, ratio_text, size_text, table
from session import Failed, options, run
from start import run_ranks

HERE = Path(__file__).resolve().parent
KIB, MIB = 1 << 10, 1 << 20
SHORT = [4, 8 * KIB, 64 * KIB, MIB, 4 * MIB, 32 * MIB]
FULL = [4, KIB, 8 * KIB, 64 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 128 * MIB]
CONTESTANTS = ("horoclone", "bucket", "mpi", "memcpy")
BUCKET = "horoclone bucket"


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = parse(argv)
    return run(arguments, lambda: measure(arguments), show)


def parse(argv: list[str] | None) -> argparse.Namespace:
    arguments = options(
        __doc__, argv, ("--np", 2, "ranks"), ("--short", False, "6 sizes instead of 10"),
        ("--sizes", [], "bytes, for example 4,4096,1048576"), ("--rounds", 7, "rounds"),
        ("--contestants", list(CONTESTANTS), "who takes part", CONTESTANTS),
        ("--memory", "private", "pages of the private buffers: 4 KiB, or huge ones", ("private", "huge")),
        ("--bind", "none", "mpirun's --bind-to", ("none", "core")),
        ("--mpi", "openmpi", "openmpi, mpich, impi, or the path of an mpirun"), ("--seed", 1, "of the order"),
        ("--limit", 900.0, "seconds after which the ranks are killed"),
    )  # fmt: skip
    arguments.sizes = arguments.sizes or (SHORT if arguments.short else FULL)
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = {name: getattr(arguments, name) for name in ("sizes", "rounds", "contestants", "memory", "seed")}
    with tempfile.TemporaryDirectory() as folder:
        plan["library"] = str(compile_calls(Path(folder)))
        raw = run_ranks(plan, arguments.np, arguments.limit, arguments.bind, arguments.mpi, "core_ranks.py")
    kept = ("rounds", "memory", "bind", "mpi", "seed")
    result = analyse(raw, {"ranks": arguments.np, **{name: getattr(arguments, name) for name in kept}})
    result["benchmark"] = (
        f"allreduce from C++, float32, sum, in place; {arguments.np} ranks, {arguments.rounds} rounds, "
        f"{arguments.memory} memory, {'not bound' if arguments.bind == 'none' else 'bound to ' + arguments.bind}"
    )
    return result


def compile_calls(folder: Path) -> Path:
    """core_calls.cc as a library beside the installed core. Failed with the compiler's words."""
    import horoclone

    package = Path(horoclone.__file__).parent
    library = folder / "core_calls.so"
    try:
        built = subprocess.run(
            ["g++", "-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", f"-I{HERE.parent / 'csrc' / 'include'}",
             str(HERE / "core_calls.cc"), "-o", str(library), f"-L{package}", "-l:libhoroclone.so",
             f"-Wl,-rpath,{package}"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    except FileNotFoundError:
        raise Failed("g++ is missing: the calls are timed in C++") from None
    if built.returncode:
        raise Failed(f"core_calls.cc cannot be compiled: {built.stderr[-2000:]}")
    return library


def show(result: dict[str, Any]) -> None:
    """Times of all and ratios of private buffers; ratios of buckets."""
    print_rows(*table(result))
    print_rows(
        ["buckets in shared memory", *(f"vs {peer}" for peer in peers_of(result))],
        [
            [size_text(one["bytes"]), *(ratio_text(one["ratios"][BUCKET][peer]) for peer in peers_of(result))]
            for one in result["sizes"]
            if BUCKET in one["ratios"]
        ],
    )
    print(
        "Cells: median of the rounds' medians / 99th percentile; the time of a call is the largest over the ranks."
    )
    print(
        "vs: the peer's time over ours, with its 95 % interval; vs memcpy: the fraction of the speed of a copy."
    )


def peers_of(result: dict[str, Any]) -> list[str]:
    """Whom the buckets are compared with, in alphabetical order."""
    return sorted({peer for one in result["sizes"] for peer in one["ratios"].get(BUCKET, {})})


if __name__ == "__main__":
    sys.exit(main())
