"""The TensorFlow examples, started as a person would start them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")


def launcher(size: int) -> list[str]:
    return [sys.executable, "-m", "horoclone.launch.cli", "-np", str(size), sys.executable]


@pytest.mark.slow
def test_digits_in_the_style_of_tensorflow_1(launch: Any, examples: Path, tmp_path: Path) -> None:
    done = launch([*launcher(2), examples / "tensorflow1_digits.py", "--checkpoints", tmp_path])
    assert "2 ranks, identical metrics" in done.output and (tmp_path / "model.ckpt-300.index").exists()
    assert float(re.findall(r"test accuracy ([\d.]+)%", done.output)[-1]) >= 95.0


@pytest.mark.slow
def test_two_ranks_train_as_one_process_with_the_whole_batch(launch: Any, examples: Path) -> None:
    """The losses agree to 2 %, the accuracies to one image in a hundred, after eight epochs of float32 rounding."""

    def curve(command: list[Any]) -> tuple[list[float], list[float]]:
        done = launch(
            [*command, examples / "tensorflow2_digits.py", "--epochs", "8", "--learning-rate", "0.05"]
        )
        assert "identical parameters" in done.output
        losses = [float(x) for x in re.findall(r"loss ([\d.]+), test", done.output)]
        return losses, [float(x) for x in re.findall(r"test accuracy ([\d.]+)%", done.output)]

    (together, accuracies), (alone, expected) = curve(launcher(2)), curve([sys.executable])
    assert len(together) == len(alone) == 8
    for mine, theirs in zip(together, alone, strict=True):
        assert abs(mine - theirs) <= 0.02 * theirs + 1e-3, (together, alone)
    assert all(abs(a - b) <= 1.0 for a, b in zip(accuracies, expected, strict=True)), (accuracies, expected)
    assert accuracies[-1] >= 97.0
