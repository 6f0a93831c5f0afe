"""Allreduce against gloo, MPI and memcpy: `python benchmarks/allreduce.py --short`.

Starts the ranks with mpirun; every contestant runs in the same processes, on the same memory, in turn, in random order.
Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 too noisy for a conclusion.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from oneccl import why_absent
from report import analyse, benchmark_of, print_tables
from session import Failed, options, refuse, run
from start import run_ranks

KIB, MIB = 1 << 10, 1 << 20
DEFAULT = [4**power for power in range(1, 14)]  # 4 B to 64 MiB
SHORT = [4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
CONTESTANTS = ("horoclone", "async", "gloo", "mpi", "memcpy")
ALL = (*CONTESTANTS, "oneccl")  # the last only with --mpi impi


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = parse(argv)
    return run(arguments, lambda: measure(arguments), print_tables)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if "oneccl" in arguments.contestants and (absent := why_absent()):
        raise Failed(absent)
    plan = {
        name: getattr(arguments, name)
        for name in ("sizes", "rounds", "contestants", "memory", "seed", "extras")
    }
    raw = run_ranks(plan, arguments.np, arguments.limit, arguments.bind, arguments.mpi)
    result = analyse(raw, settings_of(arguments))
    result["benchmark"] = benchmark_of(result["settings"])
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The plan in full: sizes and rounds are those of the form that was chosen."""
    arguments = options(
        __doc__, argv, ("--np", 2, "ranks"),
        ("--short", False, "6 sizes, 7 rounds"), ("--full", False, "also 25 MiB and 256 MiB"),
        ("--sizes", [], "bytes, for example 4,4096,1048576"), ("--rounds", 15, "7 with --short; below 7 too few"),
        ("--contestants", list(CONTESTANTS), "who takes part", ALL),
        ("--memory", "private", "of all: plain, huge pages, horoclone's shared memory", ("private", "huge", "shared")),
        ("--bind", "none", "mpirun's --bind-to", ("none", "core")),
        ("--no-extras", False, "sizes only, no loop"), ("--seed", 1, "of the order"),
        ("--limit", 1200.0, "seconds after which the ranks are killed"),
        ("--mpi", "openmpi", "openmpi, mpich, impi, or the path of an mpirun"),
    )  # fmt: skip
    arguments.extras = not arguments.no_extras
    if arguments.short and arguments.full:
        refuse("--short or --full")
    given = any(word.startswith("--round") for word in (argv if argv is not None else sys.argv))
    if arguments.short and not given:
        arguments.rounds = 7
    if "oneccl" in arguments.contestants and arguments.mpi != "impi":
        refuse("oneccl takes part with --mpi impi only")
    if any(nbytes < 4 or nbytes % 4 for nbytes in arguments.sizes):
        refuse("sizes are multiples of 4 bytes")
    chosen = SHORT if arguments.short else sorted(DEFAULT + ([25 * MIB, 256 * MIB] if arguments.full else []))
    arguments.sizes = arguments.sizes or chosen
    return arguments


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    kept = ("rounds", "memory", "bind", "seed", "force", "contestants", "mpi")
    prefixes = ("HOROCLONE_", "HOROVOD_", "OMPI_MCA_", "MPICH_", "UCX_", "GLOO_", "CCL_", "I_MPI_")
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {
        "ranks": arguments.np,
        **{name: getattr(arguments, name) for name in kept},
        "environment": environment,
    }


if __name__ == "__main__":
    sys.exit(main())
