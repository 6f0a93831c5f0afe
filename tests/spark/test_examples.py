"""The example with a DataFrame, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(420)
@pytest.mark.long(120)
def test_digits_from_a_dataframe_are_read_as_well_as_by_scikit_learn(
    engines: Path, launch: Any, tmp_path: Path
) -> None:
    env = {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    command = [engines, ROOT / "examples" / "spark_digits.py", "--work-dir", tmp_path]
    done = launch(command, env=env, timeout_s=400)
    found = re.search(
        r"test accuracy ([\d.]+)% after 12 epochs on 2 ranks; scikit-learn ([\d.]+)%", done.stdout
    )
    assert found and float(found[1]) >= float(found[2]) - 1 > 90, done.output
