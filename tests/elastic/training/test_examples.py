"""The elastic examples in a job of a fixed size: one generation, from the first epoch to the last."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "needs"), [("torch", "torch"), ("jax", "optax"), ("keras", "keras")], ids=lambda value: value
)
def test_an_elastic_example_learns_its_circle(launch: Any, name: str, needs: str) -> None:
    for package in (needs, *(["torch"] if name == "keras" else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable]
    env = {"KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = launch([*command, EXAMPLES / f"{name}_elastic.py"], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"epoch \d+: loss [\d.]+, 2 ranks", done.stdout)) == 6, done.stdout
    accuracy = re.search(r"accuracy ([\d.]+)%", done.stdout)
    assert accuracy is not None and float(accuracy.group(1)) > 90, done.stdout
