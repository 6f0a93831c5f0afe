"""TorchEstimator and KerasEstimator on a real Spark application: from DataFrames to predictions, and what goes wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(420), pytest.mark.long(60)]


def test_a_torch_model_is_trained_saved_loaded_and_predicts(local: Any, tmp_path: Path) -> None:
    done = local.ask("estimators.torch_whole_way", 400, folder=str(tmp_path))
    assert done["apart"] < 0.05 and done["again"] < 1e-6 and done["module"], done
    assert done["columns"] == ["x", "more", "y", "row", "weight", "held", "y__output"]
    assert done["losses"] == sorted(done["losses"], reverse=True) and len(done["losses"]) == 4
    assert done["validation"][-1] < 0.05 < done["validation"][0]
    assert done["resumed"] < done["losses"][1], "it has not gone on from the checkpoint"
    assert done["rate"] == pytest.approx(0.1)  # that of one rank
    assert done["loaded"] == [16, ["x", "more"], "function", None]
    assert done["left"] == ["estimator", "runs", "saved"], "the training data is removed"


def test_what_lies_in_the_store_is_trained_on_or_refused(local: Any, tmp_path: Path) -> None:
    done = local.ask("estimators.torch_on_parquet", 400, folder=str(tmp_path))
    assert done["losses"][0] > done["losses"][-1] and done["validated"] == [True] * 3
    for name, texts in {
        "missing": ("there is no data at", "nowhere", "train_path"),
        "empty": ("no rows", "/empty"),
        "no parquet": ("is not a Parquet dataset", "/text"),
        "other columns": ("label_cols: 'z'", "/train", "weight"),
        "other sizes": ("input_shapes: column 'x' has 2 values", "3"),
    }.items():
        assert done[name]["kind"] == "ValueError", done[name]
        assert all(text in done[name]["text"] for text in texts), done[name]


def test_steps_losses_and_rows_can_be_ones_own(local: Any, tmp_path: Path) -> None:
    losses = local.ask("estimators.torch_transformed", 400, folder=str(tmp_path))
    assert len(losses) == 2 and losses[1] < losses[0]


def test_wrong_parameters_are_named_and_all_have_accessors(local: Any, tmp_path: Path) -> None:
    done = local.ask("estimators.torch_errors", 400, folder=str(tmp_path))
    found = done["found"]
    for name, text in {
        "model": "model must be a torch.nn.Module, not str",
        "no model": "model is missing",
        "loss": "loss is missing",
        "optimizer": "optimizer is missing",
        "store": "store is missing",
        "feature_cols": "feature_cols is missing",
        "missing column": "feature_cols: 'nothing' is not among the columns",
        "both": "loss and loss_constructors",
        "num_proc": "num_proc and backend",
        "validation": "validation=1.5",
        "no validation": "validation: 'nothing' is not among the columns",
        "batch": "batch_size must be at least 1, not 0",
        "data_module": "data_module is not supported",
        "shapes": "column 'more' does not have a uniform shape: its rows have from 1 to 2 values",
        "nulls": " nulls; fill or drop them first",
        "fails": "ZeroDivisionError: division by zero",
    }.items():
        assert text in found[name]["text"], (name, found[name])
    assert found["fails"]["kind"] == "RunError" and found["fails"]["rank"] in (0, 1)
    assert len(done["warned"]) == 1 and "reader_pool_type" in done["warned"][0] and done["accessors"] == []
    assert done["count"] == 43 and done["left"] in ([], ["runs"])


def test_a_keras_model_is_trained_saved_loaded_and_predicts(local: Any, tmp_path: Path) -> None:
    done = local.ask("estimators.keras_whole_way", 400, folder=str(tmp_path))
    assert done["apart"] < 0.1 and done["again"] < 1e-6, done
    wanted = {"loss", "mae", "square", "val_loss", "val_mae", "val_square"}
    assert set(done["history"]) >= wanted and set(done["history"].values()) == {4}
    assert done["losses"][-1] < done["losses"][0] / 10
    assert done["resumed"][0] < done["losses"][1], "it has not gone on from the checkpoint"
    assert done["scheduled"][1] < done["scheduled"][0], "nor with a schedule"
    assert done["loaded"] == ["Functional", "SGD", "mae"]
    for name, text in {
        "model": "model must be a keras.Model, not builtins.str",
        "no model": "model is missing",
        "loss": "loss is missing",
        "optimizer": "optimizer is missing",
        "columns": "feature_cols: 2 shapes for 1 columns",
        "sizes": "feature_cols: column 'y' has 1 values in a row",
        "unbuilt": "model has no inputs and outputs yet",
    }.items():
        assert text in done["found"][name]["text"], (name, done["found"][name])
    assert done["left"] == ["estimator", "runs", "saved"]


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(420)
@pytest.mark.long(120)
def test_digits_from_a_dataframe_are_read_as_well_as_by_scikit_learn(
    engines: Path, launch: Any, tmp_path: Path
) -> None:
    env = {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    command = [engines, ROOT / "examples" / "spark_digits.py", "--work-dir", tmp_path]
    done = launch(command, env=env, timeout_s=400)
    found = re.search(
        r"test accuracy ([\d.]+)% after 12 epochs on 2 ranks; scikit-learn ([\d.]+)%", done.stdout
    )
    assert found and float(found[1]) >= float(found[2]) - 1 > 90, done.output
