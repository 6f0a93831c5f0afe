"""The short form of every benchmark, and one table of what became of them: `make bench`. Under 15 minutes.

Each runs as a program of its own, with --json into the folder of results, and prints its own table. One that finds the
machine too noisy, or that cannot run here (no root for namespaces, no such MPI), is named so at the end.
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
from pathlib import Path

from oneccl import why_absent
from report import print_rows
from session import Failed
from start import find_mpi

HERE = Path(__file__).resolve().parent
PARTS: dict[str, list[str]] = {
    "allreduce": ["allreduce.py", "--short"],
    "allreduce, MPICH": ["allreduce.py", "--sizes", "4,65536,16777216,67108864", "--no-extras", "--rounds", "7",
                         "--contestants", "horoclone,mpi", "--mpi", "mpich"],
    "allreduce, Intel MPI": ["allreduce.py", "--sizes", "4,65536,16777216,67108864", "--no-extras", "--rounds", "7",
                             "--contestants", "horoclone,mpi,oneccl", "--mpi", "impi"],
    "from C++": ["core.py", "--short"],
    "models": ["models.py"],
    "models, 4 ranks": ["models.py", "--np", "4", "--sets", "ResNet-50"],
    "many small": ["models.py", "--sets", "1000 x 64 B,1000 x 1 KiB"],
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
    codes, began = {}, time.monotonic()
    for name in arguments.parts:
        print(f"\n=== {name}", flush=True)
        codes[name] = run_part(name, arguments.out, arguments.force)
    print(f"\n=== all, {(time.monotonic() - began) / 60:.1f} minutes\n")
    print_rows(
        ["part", "what became of it"],
        [[name, verdict_of(name, code, arguments.out)] for name, code in codes.items()],
    )
    return 1 if 1 in codes.values() else 3 if 3 in codes.values() else 0


def verdict_of(name: str, code: int, out: Path) -> str:
    """The part's own table is above."""
    path = result_of(name, out)
    if code == 0 and path.exists():
        noisy = json.loads(path.read_text(encoding="utf-8"))["noise"]["reasons"]
        return f"noisy: {'; '.join(noisy)}" if noisy else "measured"
    return {2: "cannot run here", 3: "too noisy, no conclusion"}.get(code, "FAILED") + ": see above"


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
    command = [sys.executable, str(HERE / program), *options, "--json", str(path)]
    path_of_package = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path_of_package}
    part = subprocess.Popen([*command, *(["--force"] if force else [])], env=environment)
    try:
        return part.wait()
    finally:
        if part.poll() is None:  # we are being ended: the part ends its ranks itself
            part.terminate()
            part.wait(20)


if __name__ == "__main__":
    sys.exit(main())
