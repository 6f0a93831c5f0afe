"""Elastic jobs under the launcher: a rank is killed, or leaves, and every sample is still trained on once."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from horoclone.launch import options

SCRIPT = Path(__file__).with_name("exactly_once.py")


@pytest.mark.skipif(hasattr(options, "_NO_ELASTIC"), reason="this launcher has no elastic jobs")
@pytest.mark.parametrize(
    ("how", "loader"),
    [(signal.SIGKILL, "plain"), (signal.SIGTERM, "plain"), (signal.SIGKILL, "0"), (signal.SIGTERM, "2")],
    ids=["killed", "leaves", "killed-stateful", "leaves-stateful-workers"],
)
def test_a_rank_ends_and_every_sample_is_trained_on_once(
    launch: Any, tmp_path: Path, how: int, loader: str
) -> None:
    pytest.importorskip("torch" if loader == "plain" else "torchdata")
    command = [sys.executable, "-m", "horoclone.launch", "-np", "3", "--min-np", "1", "-H", "localhost:3"]
    env = {"OMP_NUM_THREADS": "1"}
    done = launch(
        [*command, sys.executable, SCRIPT, str(int(how)), tmp_path / "mark", loader], env=env, timeout_s=120
    )
    for said in ("epoch 0: 300 300", "epoch 1: 300 300", "the same", "generation 2 of 2"):
        assert said in done.stdout, done.stdout + done.stderr
