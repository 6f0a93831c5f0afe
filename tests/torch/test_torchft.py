"""torchft on horoclone: a replica that is killed and comes back ends with the weights of an undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horoclone._core", reason="the native module is not built")

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv" / "ecosystem" / "bin" / "python"
PROGRAM = ROOT / "tests" / "torch" / "torchft_replica.py"

pytestmark = [
    pytest.mark.skipif(not OWN.exists(), reason="torchft is not installed: `make ecosystem`"),
    pytest.mark.guards(
        "horoclone/torch/c10d",
        "horoclone/torch/torchft.py",
        "tests/torch/torchft_replica.py",
        packages=("torch", "torchft"),
    ),
]


def sums(launch: Any, backend: str, dies_at: int) -> set[str]:
    """Of the weights of both replicas, to ten decimals, after ten steps."""
    env = {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    done = launch([OWN, PROGRAM, "job", backend, dies_at], env=env, timeout_s=120)
    assert done.returncode == 0, done.output
    found = re.findall(r"replica \d after 10 steps: (\S+)", done.stdout)
    assert len(found) == 2, done.output
    return set(found)


def test_a_replica_that_is_killed_and_comes_back_changes_nothing(launch: Any) -> None:
    undisturbed = sums(launch, "gloo", -1)
    assert len(undisturbed) == 1
    assert sums(launch, "horoclone", 5) == undisturbed
