"""Elastic jobs under the launcher, also those of the examples: a rank is killed, or leaves, and the others train on."""

from __future__ import annotations

import importlib.util
import os
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


JOB = [
    sys.executable, "-m", "horoclone.launch", "-np", "2", "--min-np", "1", "-H", "localhost:2", sys.executable
]  # fmt: skip


def process_of_rank(started: Any, rank: int) -> int:
    """The worker that started as this rank."""
    needle = f"HOROVOD_RANK={rank}".encode()
    found = [
        pid for pid in started.processes() if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1, started.describe(found)
    return found[0]


@pytest.mark.long(60)
@pytest.mark.parametrize(
    ("name", "needs", "epochs"), [("torch", "torch", 30), ("jax", "optax", 20), ("keras", "keras", 12)], ids=["torch", "jax", "keras"]
)  # fmt: skip
def test_an_elastic_example_learns_its_circle_though_a_rank_is_killed(
    launch: Any, examples: Path, name: str, needs: str, epochs: int
) -> None:
    for package in (needs, *(["torch"] if name == "keras" else [])):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    env = {"KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env |= {
        "HOROCLONE_COMPARE": "error",
        "HOROCLONE_COMPARE_STEPS": "1",
    }  # in no generation are values different
    started = launch.start([*JOB, examples / f"{name}_elastic.py", "--epochs", str(epochs)], env=env)
    started.wait_for("epoch 2: ", timeout_s=90)
    os.kill(process_of_rank(started, 1), signal.SIGKILL)
    done = started.finish(timeout_s=120)
    assert done.returncode == 0, done.output
    said = re.findall(r"epoch (\d+): loss [\d.]+, (\d) ranks", done.stdout)
    assert [int(epoch) for epoch, _ in said] == list(range(1, epochs + 1)), done.output
    assert ("2", "2") in said and re.search(r"generation [23]: ", done.stdout), done.output
    assert "was killed by SIGKILL; 1 of the job's ranks is left" in done.stderr, done.output
    accuracy = re.search(r"accuracy ([\d.]+)%", done.stdout)
    assert accuracy is not None and float(accuracy.group(1)) > 90, done.output
    assert "do not have the same values" not in done.output, done.output
    assert not started.left_over()
