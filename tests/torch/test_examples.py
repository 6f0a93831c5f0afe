"""The torch examples, started as a person would start them.

Two epochs of the digits show what the example does; `make test-long` trains them in full, on two ranks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SHORT = ("--epochs", "2", "--accuracy", "0.85")


@pytest.mark.slow
@pytest.mark.parametrize(
    "short", [True, pytest.param(False, marks=pytest.mark.long(30))], ids=["short", "in full"]
)
def test_digits_under_the_launcher(launch: Any, examples: Path, tmp_path: Path, short: bool) -> None:
    checkpoint = tmp_path / "model.pt"
    program = [
        sys.executable,
        examples / "torch_digits.py",
        "--checkpoint",
        checkpoint,
        *(SHORT if short else ()),
    ]
    output = launch(
        [sys.executable, "-m", "horoclone.launch.cli", "-np", "2", *program], timeout_s=150
    ).output
    assert "2 ranks, identical parameters" in output
    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)%", output)]
    epochs, least = (2, 85.0) if short else (12, 97.0)
    assert len(accuracies) == epochs and accuracies[-1] >= least, output
    assert set(torch.load(checkpoint)) == {"model", "optimizer"}


@pytest.mark.long(30)
def test_text(launch: Any, examples: Path) -> None:
    small = ["--steps", "20", "--sample", "20", "--megabytes", "0.5", "--layers", "1", "--width", "64"]
    program = [sys.executable, examples / "torch_gpt_text.py", *small, "--compress"]
    done = launch([sys.executable, "-m", "horoclone.launch.cli", "-np", "2", *program], timeout_s=150)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.output)]
    assert len(losses) == 2 and losses[1] < losses[0] < 6.0, done.output
    assert re.search(r"tokens/s per rank [\d,]+, [\d,]+; in all [\d,]+", done.output)
