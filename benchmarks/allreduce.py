"""Allreduce (or --operation) against gloo, MPI and memcpy: `python benchmarks/allreduce.py --short`.

Starts the ranks with mpirun; every contestant runs in the same processes, on the same memory, in turn, in random order.
Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 too noisy for a conclusion.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from oneccl import why_absent  # noqa: E402
from report import analyse, benchmark_of, print_tables  # noqa: E402
from session import Failed, add_options, run, words_of  # noqa: E402
from start import run_ranks  # noqa: E402

OPERATIONS = ("broadcast", "allgather", "reducescatter", "alltoall")
KIB, MIB = 1 << 10, 1 << 20
DEFAULT = [4**power for power in range(1, 14)]  # 4 B to 64 MiB
SHORT = [4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
CONTESTANTS = ("horoclone", "async", "gloo", "mpi", "memcpy")
ALL = (*CONTESTANTS, "oneccl")  # the last only with --mpi impi, for allreduce


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = parse(argv)
    return run(arguments, lambda: measure(arguments), print_tables)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if "oneccl" in arguments.contestants and (absent := why_absent()):
        raise Failed(absent)
    plan = {
        name: getattr(arguments, name)
        for name in ("sizes", "rounds", "contestants", "memory", "seed", "extras", "operation")
    }
    raw = run_ranks(plan, arguments.np, arguments.limit, arguments.bind, arguments.mpi)
    result = analyse(raw, settings_of(arguments))
    result["benchmark"] = benchmark_of(result["settings"])
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    parser.add_argument("--operation", choices=("allreduce", *OPERATIONS), default="allreduce",
                        help="others: sizes only; gloo and MPI write into given memory")  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--short", action="store_true", help="6 sizes, 7 rounds")
    which.add_argument("--full", action="store_true", help="also 25 MiB and 256 MiB")
    which.add_argument("--sizes", type=sizes_of, help="bytes, for example 4,4096,1048576")
    parser.add_argument(
        "--rounds", type=int, help="rounds (15; 7 with --short); below 7 the intervals say little"
    )
    parser.add_argument(
        "--contestants", type=words_of(ALL, "contestant"), default=list(CONTESTANTS), help=",".join(ALL)
    )
    parser.add_argument("--memory", choices=("private", "huge", "shared"), default="private",
                        help="of all contestants: plain, huge pages, horoclone's shared memory")  # fmt: skip
    parser.add_argument("--bind", choices=("none", "core"), default="none", help="mpirun's --bind-to")
    parser.add_argument(
        "--no-extras", dest="extras", action="store_false", help="sizes only: no loop, no small tensors"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order (1)")
    parser.add_argument(
        "--limit", type=float, default=1200.0, help="seconds after which the ranks are killed"
    )
    parser.add_argument("--mpi", default="openmpi", help="openmpi, mpich, impi, or the path of an mpirun")
    add_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = 7 if arguments.short else 15
    if arguments.np < 1 or arguments.rounds < 1:
        parser.error("--np and --rounds must be at least 1")
    if "oneccl" in arguments.contestants and (arguments.mpi != "impi" or arguments.operation != "allreduce"):
        parser.error("oneccl takes part in allreduce only, with --mpi impi")
    if arguments.operation != "allreduce":
        arguments.extras = False
        arguments.contestants = [one for one in arguments.contestants if one not in ("async", "memcpy")]
    if arguments.sizes is None:
        extra = [25 * MIB, 256 * MIB] if arguments.full else []
        arguments.sizes = SHORT if arguments.short else sorted(DEFAULT + extra)
        if arguments.operation != "allreduce":
            arguments.sizes = [nbytes for nbytes in arguments.sizes if nbytes % (4 * arguments.np) == 0]
    return arguments


def sizes_of(text: str) -> list[int]:
    """Bytes, whole float32 numbers."""
    sizes = [int(word) for word in text.split(",")]
    if any(nbytes < 4 or nbytes % 4 for nbytes in sizes):
        raise argparse.ArgumentTypeError("sizes are multiples of 4 bytes")
    return sizes


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    kept = ("rounds", "memory", "bind", "seed", "force", "contestants", "mpi", "operation")
    prefixes = ("HOROCLONE_", "HOROVOD_", "OMPI_MCA_", "MPICH_", "UCX_", "GLOO_", "CCL_", "I_MPI_")
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {
        "ranks": arguments.np,
        **{name: getattr(arguments, name) for name in kept},
        "environment": environment,
    }


if __name__ == "__main__":
    sys.exit(main())
