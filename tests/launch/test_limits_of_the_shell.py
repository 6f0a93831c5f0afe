"""Jobs under limits of the shell: the right result, or a text that names the limit and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOROCLONERUN = Path(sys.executable).with_name("horoclonerun")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import numpy as np
import horoclone as hvd
hvd.init()
print("sum", hvd.allreduce(np.ones(300_000), op=hvd.Sum)[:2].tolist(), flush=True)
"""


def under(limit: str, ranks: int, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    run = f"ulimit {limit}; exec {HOROCLONERUN} -np {ranks} {sys.executable} {tmp_path / 'program.py'}"
    return subprocess.run(
        ["bash", "-c", run],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


GIB = 1 << 20  # as ulimit counts, in KiB


@pytest.mark.parametrize("limit", [f"-v {200 * GIB}", f"-v {20 * GIB}", f"-v {8 * GIB}", f"-v {4 * GIB}"])
def test_less_address_space_makes_smaller_arenas(limit: str, tmp_path: Path) -> None:
    done = under(limit, 3, tmp_path)
    assert done.stdout.count("sum [3.0, 3.0]\n") == 3, done.stderr


def test_too_little_address_space_for_shared_memory_is_said_and_the_job_runs(tmp_path: Path) -> None:
    done = under(f"-v {2 * GIB}", 3, tmp_path)
    assert done.stdout.count("sum [3.0, 3.0]\n") == 3, done.stderr
    assert "ulimit -v" in done.stderr and "TCP" in done.stderr


@pytest.mark.parametrize("limit", ["-l 0", "-s 256", "-f 1000000", "-c 0", "-n 200"])
def test_limits_that_leave_enough_change_nothing(limit: str, tmp_path: Path) -> None:
    done = under(limit, 2, tmp_path)
    assert done.stdout.count("sum [2.0, 2.0]\n") == 2, done.stderr


def test_too_few_descriptors_are_named(tmp_path: Path) -> None:
    done = under("-n 24", 4, tmp_path)
    assert done.returncode and "ulimit -n" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr.split("root cause")[-1]
