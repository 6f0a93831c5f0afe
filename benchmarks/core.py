"""Allreduce of the core's C interface beside MPI's and memcpy, timed in C++: `python benchmarks/core.py --short`.

Private buffers and declared buckets in shared memory, in the same processes, in turn, in random order (core_calls.cc,
compiled when the benchmark starts). At the end a line for each figure that is aimed at beside Open MPI and memcpy.
Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 too noisy for a conclusion.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from allreduce import sizes_of  # noqa: E402
from report import MEMCPY, analyse, print_rows, ratio_text, size_text, table  # noqa: E402
from session import Failed, add_options, run, words_of  # noqa: E402
from start import run_ranks  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SHORT = [4, 8 * KIB, 64 * KIB, MIB, 4 * MIB, 32 * MIB]
FULL = [4, KIB, 8 * KIB, 64 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 128 * MIB]
CONTESTANTS = ("horoclone", "bucket", "mpi", "memcpy")
OWN, BUCKET = "horoclone", "horoclone bucket"
# Ours, from and to how many bytes, beside whom, how many times as fast at least: with 2 ranks on 2 cores.
AIMS = [
    (OWN, 4, KIB, "Open MPI", 1.15),
    (OWN, 8 * KIB, 8 * KIB, "Open MPI", 2.2),
    (OWN, 64 * KIB, 64 * KIB, "Open MPI", 1.5),
    (OWN, 512 * KIB, MIB, "Open MPI", 0.95),
    (OWN, 4 * MIB, 16 * MIB, "Open MPI", 0.9),
    (OWN, 32 * MIB, 128 * MIB, "Open MPI", 2.0),
    (OWN, 4 * MIB, 16 * MIB, MEMCPY, 0.54),
    (OWN, 32 * MIB, 128 * MIB, MEMCPY, 0.80),
    (BUCKET, 64 * KIB, 16 * MIB, "Open MPI", 1.7),
    (BUCKET, 32 * MIB, 128 * MIB, "Open MPI", 3.3),
    (BUCKET, 64 * KIB, 16 * MIB, MEMCPY, 1.1),
    (BUCKET, 32 * MIB, 128 * MIB, MEMCPY, 1.4),
]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = parse(argv)
    return run(arguments, lambda: measure(arguments), show)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--short", action="store_true", help="6 sizes and 7 rounds instead of 10 and 15")
    parser.add_argument("--sizes", type=sizes_of, help="bytes, for example 4,4096,1048576")
    parser.add_argument("--rounds", type=int, help="rounds")
    parser.add_argument(
        "--contestants",
        type=words_of(CONTESTANTS, "contestant"),
        default=list(CONTESTANTS),
        help=",".join(CONTESTANTS),
    )
    parser.add_argument("--memory", choices=("private", "huge"), default="private",
                        help="pages of the private buffers: 4 KiB, or huge where the kernel gives them")  # fmt: skip
    parser.add_argument("--bind", choices=("none", "core"), default="none", help="mpirun's --bind-to")
    parser.add_argument("--mpi", default="openmpi", help="openmpi, mpich, impi, or the path of an mpirun")
    parser.add_argument("--seed", type=int, default=1, help="of the order (1)")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which the ranks are killed")
    add_options(parser)
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (7 if arguments.short else 15)
    arguments.sizes = arguments.sizes or (SHORT if arguments.short else FULL)
    if arguments.np < 1 or arguments.rounds < 1:
        parser.error("--np and --rounds must be at least 1")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    plan = {name: getattr(arguments, name) for name in ("sizes", "rounds", "contestants", "memory", "seed")}
    with tempfile.TemporaryDirectory() as folder:
        plan["library"] = str(compile_calls(Path(folder)))
        raw = run_ranks(plan, arguments.np, arguments.limit, arguments.bind, arguments.mpi, "core_ranks.py")
    settings = {
        "ranks": arguments.np,
        "memory": arguments.memory,
        "bind": arguments.bind,
        "mpi": arguments.mpi,
    }
    result = analyse(raw, settings | {"rounds": arguments.rounds, "seed": arguments.seed})
    result["benchmark"] = (
        f"allreduce from C++, float32, sum, in place; {arguments.np} ranks, {arguments.rounds} rounds, "
        f"{arguments.memory} memory, {'not bound' if arguments.bind == 'none' else 'bound to ' + arguments.bind}"
    )
    result["aims"] = list(judge(result)) if arguments.np == 2 else []
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


def judge(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each aim at each of its sizes that was measured: holds, missed, or undecided (the interval holds the aim)."""
    for own, first, last, peer, aim in AIMS:
        for one in result["sizes"]:
            ratios = one["ratios"].get(own, {})
            label = next((label for label in ratios if label.startswith(peer)), None)
            if not first <= one["bytes"] <= last or label is None:
                continue
            ratio = ratios[label]
            verdict = "holds" if ratio["ratio"] >= aim else "missed"
            if ratio["low"] < aim <= ratio["high"]:
                verdict = f"undecided, {verdict}"
            yield {
                "own": own,
                "bytes": one["bytes"],
                "peer": label,
                "aim": aim,
                "ratio": ratio,
                "verdict": verdict,
            }


def show(result: dict[str, Any]) -> None:
    """Times of all and ratios of private buffers; ratios of buckets; aims."""
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
        "vs: the peer's time over ours, with its 95 % interval; vs memcpy: the fraction of the speed of a copy.\n"
    )
    if result["aims"]:
        print_rows(
            ["aim", "at least", "found", ""],
            [
                [f"{aim['own']}, {size_text(aim['bytes'])}, vs {aim['peer']}", f"{aim['aim']:.2f}",
                 ratio_text(aim["ratio"]), aim["verdict"]]
                for aim in result["aims"]
            ],
        )  # fmt: skip


def peers_of(result: dict[str, Any]) -> list[str]:
    """Whom the buckets are compared with, in alphabetical order."""
    return sorted({peer for one in result["sizes"] for peer in one["ratios"].get(BUCKET, {})})


if __name__ == "__main__":
    sys.exit(main())
