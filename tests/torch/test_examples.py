"""The torch examples, started as a person would start them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def check_digits(output: str, size: int, checkpoint: Path) -> None:
    assert f"{size} ranks, identical parameters" in output
    accuracies = [float(a) for a in re.findall(r"test accuracy ([\d.]+)%", output)]
    assert len(accuracies) == 12 and accuracies[-1] >= 97.0, output
    assert set(torch.load(checkpoint)) == {"model", "optimizer"}


@pytest.mark.slow
def test_digits_under_the_launcher(launch: Any, examples: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    program = [sys.executable, examples / "torch_digits.py", "--checkpoint", checkpoint]
    done = launch([sys.executable, "-m", "horoclone.launch.cli", "-np", "2", *program], timeout_s=150)
    check_digits(done.output, 2, checkpoint)


@pytest.mark.slow
def test_digits_alone(launch: Any, examples: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    done = launch([sys.executable, examples / "torch_digits.py", "--checkpoint", checkpoint], timeout_s=150)
    check_digits(done.output, 1, checkpoint)


@pytest.mark.slow
def test_digits_under_torchrun(launch: Any, examples: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    program = [examples / "torch_digits.py", "--checkpoint", checkpoint]
    done = launch(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *program], timeout_s=150
    )
    check_digits(done.output, 2, checkpoint)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", ["open_mpi", "mpich"])
def test_digits_under_mpirun(launch: Any, examples: Path, tmp_path: Path, which: str, request: Any) -> None:
    mpi = request.getfixturevalue(which)
    checkpoint = tmp_path / "model.pt"
    program = [sys.executable, examples / "torch_digits.py", "--checkpoint", checkpoint]
    done = launch([*mpi.command(2), *program], env=mpi.env, timeout_s=150)
    check_digits(done.output, 2, checkpoint)


@pytest.mark.slow
def test_text(launch: Any, examples: Path) -> None:
    program = [
        sys.executable,
        examples / "torch_gpt_text.py",
        "--steps",
        "20",
        "--sample",
        "20",
        "--compress",
    ]
    done = launch([sys.executable, "-m", "horoclone.launch.cli", "-np", "2", *program], timeout_s=150)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.output)]
    assert len(losses) == 2 and losses[1] < losses[0] < 6.0, done.output
    assert re.search(r"tokens/s per rank [\d,]+, [\d,]+; in all [\d,]+", done.output)
