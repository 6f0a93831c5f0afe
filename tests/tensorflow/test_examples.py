"""The TensorFlow examples: equal metrics on both ranks, and those of one process that takes the whole batch."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from world import later, printed_by, ranks

later("tensorflow")

later("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


# Each rank first alone with the whole batch, then both together, in the processes that the launcher has started.
BOTH_WAYS = """
import os, runpy, sys
import tensorflow as tf
import horoclone.tensorflow as hvd

ours, theirs, folder = sys.argv[1:]
hvd.init([int(os.environ["HOROCLONE_RANK"])])
whole = ["--steps", "300", "--batch-size", "64", "--learning-rate", "0.1"]
sys.argv = [ours, *whole, "--checkpoints", folder + "/alone" + os.environ["HOROCLONE_RANK"]]
runpy.run_path(ours, run_name="__main__")
hvd.shutdown()
tf.compat.v1.reset_default_graph()
sys.argv = [theirs, "--checkpoints", folder + "/together"]
runpy.run_path(theirs, run_name="__main__")
"""


@pytest.mark.long(100)
def test_digits_in_the_style_of_tensorflow_1(launch: Any, tmp_path: Path) -> None:
    """On two ranks under Horovod's name. Losses agree to 2 %, accuracies to 1 in 100."""
    ours = EXAMPLES / "tensorflow1_digits.py"
    script, driver = tmp_path / "train.py", tmp_path / "both_ways.py"
    script.write_text(ours.read_text().replace("import horoclone.", "import horovod."))
    assert "import horovod.tensorflow as hvd" in script.read_text()
    driver.write_text("from horoclone import horovod_alias\nhorovod_alias.install()\n" + BOTH_WAYS)
    launcher = [sys.executable, "-m", "horoclone.launch.cli", "-np", "2", sys.executable]
    done = launch([*launcher, driver, ours, script, tmp_path], timeout_s=180)
    assert done.returncode == 0, done.output
    assert (tmp_path / "together" / "model.ckpt-300.index").exists()

    def metrics(size: int, times: int) -> tuple[float, float]:
        pattern = rf"{size} ranks?, identical metrics: loss ([\d.]+), test accuracy ([\d.]+)%"
        found = re.findall(pattern, done.output)
        assert len(found) == times and len(set(found)) == 1, done.output
        return float(found[0][0]), float(found[0][1])

    (loss, accuracy), (expected_loss, expected_accuracy) = metrics(2, 1), metrics(1, 2)
    assert abs(loss - expected_loss) <= 0.02 * expected_loss + 1e-4
    assert abs(accuracy - expected_accuracy) <= 1.0 and accuracy >= 95.0


@ranks(2, init=False, limit_s=120)
def test_two_ranks_train_as_one_process_with_the_whole_batch() -> None:
    """The losses agree to 2 %, the accuracies to one image in a hundred, after five epochs of float32 rounding."""
    import horoclone.tensorflow as hvd

    def curve(size: int) -> tuple[list[float], list[float]]:
        text = printed_by(EXAMPLES / "tensorflow2_digits.py", "--epochs", "5")
        if hvd.rank() == 0:
            assert f"{size} ranks, identical parameters" in text
        losses = [float(x) for x in re.findall(r"loss ([\d.]+), test", text)]
        return losses, [float(x) for x in re.findall(r"test accuracy ([\d.]+)%", text)]

    if os.environ["HOROCLONE_RANK"] == "0":  # alone, with the whole batch
        hvd.init([0])
        alone, expected = curve(1)
        hvd.shutdown()
    hvd.init()
    together, accuracies = curve(2)
    if hvd.rank() == 0:
        assert len(together) == len(alone) == 5
        for mine, theirs in zip(together, alone, strict=True):
            assert abs(mine - theirs) <= 0.02 * theirs + 1e-3, (together, alone)
        assert all(abs(a - b) <= 1.0 for a, b in zip(accuracies, expected, strict=True)), (
            accuracies,
            expected,
        )
        assert accuracies[-1] >= 97.0


@ranks(2, init=False, limit_s=120)
def test_an_unedited_loop_for_horovod(checkpoints: str) -> None:
    """scripts/tape.py knows nothing of horoclone. The ranks end alike, the loss has fallen, rank 0 alone wrote."""
    from horoclone import horovod_alias

    horovod_alias.install()
    folder = Path(checkpoints) / os.environ["HOROCLONE_RANK"]
    os.environ["CHECKPOINTS"] = str(folder / "digits")
    names = runpy.run_path(str(Path(__file__).parent / "scripts" / "tape.py"), run_name="__main__")
    hvd, losses = names["hvd"], names["losses"]
    state = [[v.numpy().tobytes() for v in names["model"].variables], losses, names["accuracy"]]
    assert hvd.size() == 2 and all(theirs == state for theirs in hvd.allgather_object(state))
    assert len(losses) == 10 and losses[-1] < 0.7 * losses[0] and names["accuracy"] > 0.7
    assert (folder / "digits-1.index").exists() == (hvd.rank() == 0) and folder.exists() == (hvd.rank() == 0)


@pytest.fixture
def checkpoints(tmp_path: Path) -> str:
    return str(tmp_path)
