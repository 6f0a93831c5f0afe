"""The Keras examples on two ranks, and scripts in the manner of Horovod's own (scripts/), unedited under its names; the
examples against one process that takes the whole batch.

Every rank first runs the example as a world of its own, then all run it together, in the same warm processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import printed_by

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def comes_out_as_alone(script: str, folder: str, options: list[str], whole: list[str]) -> None:
    """options: of every run. whole: further ones, with which one process takes the whole batch."""
    import horoclone.keras as hvd
    from horoclone import horovod_alias

    horovod_alias.install()
    horovods = Path(folder) / f"train{os.environ['HOROCLONE_RANK']}.py"
    horovods.write_text(Path(script).read_text().replace("import horoclone.", "import horovod."))
    assert re.search(r"^import horovod\.\S*keras as hvd$", horovods.read_text(), re.MULTILINE)
    hvd.init([int(os.environ["HOROCLONE_RANK"])])
    alone = printed_by(script, *options, *whole)
    hvd.shutdown()
    hvd.init()
    together = printed_by(horovods, *options)
    if hvd.rank() != 0:
        assert together == "", "only rank 0 shows progress and results"
        return

    def metrics(text: str, size: int) -> tuple[float, float]:
        assert re.search(rf"^{size} ranks on \w+, identical models$", text, re.MULTILINE), text[-2000:]
        found = re.search(r"test loss ([\d.]+), accuracy ([\d.]+)%", text)
        assert found is not None
        return float(found[1]), float(found[2])

    (loss, accuracy), (expected, expected_accuracy) = metrics(together, 2), metrics(alone, 1)
    assert abs(loss - expected) <= 1e-3 * expected + 1e-4, (loss, expected)
    assert abs(accuracy - expected_accuracy) <= 0.3, (accuracy, expected_accuracy)
    assert re.search(r"22/22.*loss: [\d.]+", together), "a progress bar of 22 steps, as alone"


def run(
    on: Callable[..., Any], backend: str, name: str, folder: Path, options: list[str], whole: list[str]
) -> None:
    pytest.importorskip("sklearn")
    script = str(EXAMPLES / name)
    on(
        backend,
        comes_out_as_alone,
        init=False,
        limit_s=600,
        script=script,
        folder=str(folder),
        options=options,
        whole=whole,
    )


@pytest.mark.long(50)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_keras_3(on: Callable[..., Any], backend: str, tmp_path: Path) -> None:
    run(on, backend, "keras_fit.py", tmp_path, options=[], whole=[])


@pytest.mark.long(50)
def test_tf_keras(on: Callable[..., Any], tmp_path: Path) -> None:
    whole = ["--batch-size", "64", "--learning-rate", "0.02"]
    run(on, "legacy", "keras_legacy.py", tmp_path, options=["--warmup-epochs", "0"], whole=whole)


SCRIPTS = Path(__file__).resolve().parent / "scripts"


def names_of(script: str, **settings: str) -> dict[str, Any]:
    """What a script's names stand for when it has ended, and in `said` what it printed."""
    from horoclone import horovod_alias

    horovod_alias.install()
    os.environ.update(settings)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        return {**runpy.run_path(str(SCRIPTS / script), run_name="__main__"), "said": said.getvalue()}


def learnt_together(names: dict[str, Any], losses: list[float]) -> None:
    import horoclone.keras as hvd

    assert hvd.is_initialized() and names["hvd"].__name__.startswith("horoclone.")
    weights = [np.array(w) for w in names["model"].trainable_weights]  # moving averages are each rank's own
    state = [*weights, *map(float, losses), hvd.rank()]
    other = hvd.allgather_object(state)[1 - hvd.rank()]
    assert other[-1] == 1 - hvd.rank()
    assert all(np.array_equal(a, b) for a, b in zip(state[:-1], other[:-1], strict=True))
    assert losses[-1] < 0.7 * losses[0], losses


def classic(folder: str) -> None:
    names = names_of("classic.py", CHECKPOINTS=folder)
    learnt_together(names, names["history"]["loss"])
    rate = names["model"].optimizer.learning_rate
    assert np.isclose(float(rate.numpy()), 0.004), "twice a rank's rate, after the warm-up"
    assert ("finished gradual learning rate warmup to 0.004" in names["said"]) and names["opt"] is names[
        "model"
    ].optimizer
    written = sorted(path.name for path in Path(folder).iterdir())
    assert names["hvd"].rank() != 0 or written == [f"checkpoint-{epoch}.weights.h5" for epoch in (1, 2, 3)]


def goes_on_from_a_checkpoint(folder: str) -> None:
    first = names_of("resuming.py", CHECKPOINTS=folder, EPOCHS="2")
    assert first["resume_from_epoch"] == 0
    learnt_together(first, first["history"]["loss"])
    then = names_of("resuming.py", CHECKPOINTS=folder, EPOCHS="4")
    assert then["resume_from_epoch"] == 2
    learnt_together(then, [first["history"]["loss"][0], *then["history"]["loss"]])
    # A number is raised to the power of the epochs since start_epoch, as in Horovod: in epoch 3 to the power of 0.
    assert np.allclose(then["history"]["lr"], [0.04, 0.04]), "the schedule of epochs 2 and 3"
    steps = 4 * -(-700 // 32)
    assert int(then["model"].optimizer.iterations) == steps, "rank 0's state went on and was sent"
    assert float(then["score"][1]) > 0.8


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", ["tensorflow", "legacy"])
def test_a_short_script_for_tf_keras(on: Callable[..., Any], backend: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    on(backend, classic, init=False, folder=str(tmp_path))


@pytest.mark.in_turn
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_script_that_goes_on_from_rank_0s_checkpoint(
    on: Callable[..., Any], backend: str, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    on(backend, goes_on_from_a_checkpoint, init=False, folder=str(tmp_path))
