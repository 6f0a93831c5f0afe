"""torchft on horoclone: a replica that is killed and comes back ends with the weights of an undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("horoclone._core", reason="the native module is not built")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "torch" / "torchft_replica.py"

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(60)]


def sums(launch: Any, python: Path, backend: str, dies_at: int) -> set[str]:
    """Of the weights of both replicas, to ten decimals, after ten steps."""
    env = {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    done = launch([python, PROGRAM, "job", backend, dies_at], env=env, timeout_s=120)
    assert done.returncode == 0, done.output
    found = re.findall(r"replica \d after 10 steps: (\S+)", done.stdout)
    assert len(found) == 2, done.output
    return set(found)


def test_a_replica_that_is_killed_and_comes_back_changes_nothing(launch: Any, ecosystem_python: Path) -> None:
    undisturbed = sums(launch, ecosystem_python, "gloo", -1)
    assert len(undisturbed) == 1
    assert sums(launch, ecosystem_python, "horoclone", 5) == undisturbed
