"""The Keras examples on two ranks, under Horovod's names, against one process that takes the whole batch.

Every rank first runs the example as a world of its own, then all run it together, in the same warm processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
