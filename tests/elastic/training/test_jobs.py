"""Elastic jobs under the launcher: a rank is killed, or leaves, and every sample is still trained on once."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("exactly_once.py")


def parts_of(text: str) -> dict[str, float]:
    """What the launcher says of the time of a job."""
    found = re.search(r"goodput ([\d.]+)% of (\d+) s(?:: (.*))?", text)
    assert found is not None, text
    parts = re.findall(r"([a-z ]+) ([\d.]+) s", found[3] or "")
    return {
        "share": float(found[1]),
        "whole": float(found[2]),
        **{what.strip(): float(seconds) for what, seconds in parts},
    }


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("how", "loader", "part"),
    [
        (signal.SIGKILL, "plain", "recoveries"),
        (signal.SIGTERM, "2", "newcomers and leavers"),
        (signal.SIGTERM, "plain", "newcomers and leavers"),
        (signal.SIGKILL, "0", "recoveries"),
    ],
    ids=["killed", "leaves-stateful-workers", "leaves", "killed-stateful"],
)
def test_a_rank_ends_and_every_sample_is_trained_on_once(
    launch: Any, tmp_path: Path, how: int, loader: str, part: str
) -> None:
    pytest.importorskip("torch" if loader == "plain" else "torchdata")
    command = [sys.executable, "-m", "horoclone.launch", "-np", "3", "--min-np", "1", "-H", "localhost:3"]
    env = {"OMP_NUM_THREADS": "1"}
    done = launch(
        [*command, sys.executable, SCRIPT, str(int(how)), tmp_path / "mark", loader], env=env, timeout_s=120
    )
    for said in ("epoch 0: 300 300", "epoch 1: 300 300", "the same", "generation 2 of 2"):
        assert said in done.stdout, done.stdout + done.stderr
    parts = parts_of(done.stderr)
    assert 1 <= parts["whole"] <= done.seconds + 1
    assert parts[part] > 0 and parts["share"] < 100, done.stderr
    lost = sum(seconds for what, seconds in parts.items() if what not in ("share", "whole"))
    # The whole is said in seconds, the parts in tenths of one.
    least, most = (100 * (1 - (lost + by) / (parts["whole"] - by)) for by in (0.5, -0.5))
    assert least <= parts["share"] <= most, done.stderr
