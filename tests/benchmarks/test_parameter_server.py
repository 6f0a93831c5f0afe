"""A tiny run of the parameter server's benchmark, of rows and of a dense tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "parameter_server.py"


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [str(part) for part in (sys.executable, PROGRAM, *options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


@pytest.mark.long(60)
@pytest.mark.parametrize(("dense", "rate"), [((), "k rows/s"), (("--dense", "0.1"), "GB/s")])
def test_a_tiny_run(tmp_path: Path, dense: tuple[str, ...], rate: str) -> None:
    pytest.importorskip("torch")
    done = run(*dense, "--steps", 2, "--repeats", 1, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["horoclone, one copy", "horoclone, two copies", "torch.distributed.rpc"]
    for times in found.values():
        assert len(times) == 2 and min(times) > 0, "the median of each worker"
    assert done.stdout.count(f"{rate} a worker") == 3, done.stdout


def test_rows_only_beside_ps_lite(tmp_path: Path) -> None:
    done = run("--dense", 1, "--pslite", tmp_path)
    assert done.returncode == 2 and "rows only" in done.stderr
