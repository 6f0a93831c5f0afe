"""The torch examples, started as a person would start them; what they do in short is in test_example_claims.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.long(30)
def test_digits_under_the_launcher(launch: Any, examples: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    program = [sys.executable, examples / "torch_digits.py", "--checkpoint", checkpoint]
    output = launch(
        [sys.executable, "-m", "horoclone.launch.cli", "-np", "2", *program], timeout_s=150
    ).output
    assert "2 ranks, identical parameters" in output
    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)%", output)]
    assert len(accuracies) == 12 and accuracies[-1] >= 97, output
    assert set(torch.load(checkpoint)) == {"model", "optimizer"}


@pytest.mark.long(30)
def test_text(launch: Any, examples: Path) -> None:
    small = ["--steps", "20", "--sample", "20", "--megabytes", "0.5", "--layers", "1", "--width", "64"]
    program = [sys.executable, examples / "torch_gpt_text.py", *small, "--compress"]
    done = launch([sys.executable, "-m", "horoclone.launch.cli", "-np", "2", *program], timeout_s=150)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.output)]
    assert len(losses) == 2 and losses[1] < losses[0] < 6.0, done.output
    assert re.search(r"tokens/s per rank [\d,]+, [\d,]+; in all [\d,]+", done.output)
