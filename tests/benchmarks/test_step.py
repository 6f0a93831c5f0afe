"""benchmarks/step.py and priority.py: what they conclude from times and models. Their processes need minutes, TensorFlow or root."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ALONE, OURS, THEIRS = "tf_keras alone", "tf_keras horoclone", "tf_keras MultiWorkerMirrored"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("step")


def outcome(*digests: float) -> dict[str, Any]:
    return {"ranks": [{"digest": digest, "parameters": 25_000_000, "tensors": 14} for digest in digests]}


def test_models_that_differ_are_found(step: Any) -> None:
    alike = {ALONE: outcome(1.0, 2.0), OURS: outcome(5.0, 5.0), THEIRS: outcome(5.0001, 5.0001)}
    assert step.disagreements(alike) == []  # those that train alone differ by right
    assert "the ranks of" in step.disagreements({OURS: outcome(5.0, 5.00001)})[0]
    assert "sums of weights" in step.disagreements({OURS: outcome(5.0, 5.0), THEIRS: outcome(5.1, 5.1)})[0]


def test_overhead_is_what_a_round_took_longer_than_the_same_round_alone(step: Any, capsys: Any) -> None:
    alone = [100.0, 200.0, 110.0, 100.0, 100.0, 100.0, 100.0]
    times = {
        ALONE: {"wall": alone, "cpu": [90.0] * 7},
        OURS: {"wall": [t + 10 for t in alone], "cpu": [95.0] * 7},
        THEIRS: {"wall": [t + 40 for t in alone], "cpu": [120.0] * 7},
    }
    step.print_tables(times, {name: outcome(1.0, 1.0) for name in times})
    said = capsys.readouterr().out
    assert "2 ranks, 100.0 MB in 14 tensors" in said
    assert "overhead in time is 4.0 times horoclone's, 95 % interval 4.0 to 4.0" in said
    assert "overhead in processor time is 6.0 times" in said


def test_each_framework_has_its_rivals(step: Any, capsys: Any) -> None:
    names = step.parse(["--framework", "torch"]).contestants
    assert names == [
        "torch one rank", "torch one rank, initialised", "torch alone", "torch horoclone", "torch DDP", "torch DDP-view"
    ]  # fmt: skip
    longer = dict(zip(names, (0.0, 1.0, 100.0, 110.0, 150.0, 130.0), strict=True))
    times = {
        name: {"wall": [100 + longer[name] + i for i in range(7)], "cpu": [90 + longer[name]] * 7}
        for name in names
    }
    step.print_tables(times, {name: outcome(1.0, 1.0) for name in names})
    said = capsys.readouterr().out
    assert "hvd.init() makes one process's step 1.010 times as long" in said
    assert "\nDDP's overhead in time is 5.0 times horoclone's" in said
    assert "\nDDP-view's overhead in time is 3.0 times horoclone's" in said


def test_arguments(step: Any, capsys: Any) -> None:
    assert step.parse([]).contestants[1:] == [ALONE, OURS, THEIRS]
    assert step.parse(["--contestants", "all"]).contestants == list(step.CONTESTANTS)
    with pytest.raises(SystemExit):
        step.parse(["--contestants", "horovod"])
    assert "'horovod'" in capsys.readouterr().err


@pytest.fixture
def priority(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("priority")


def test_speed_up_and_hidden_share_come_from_the_rounds(priority: Any, capsys: Any) -> None:
    rounds = {
        "computing alone": [[100e3] * 3] * 7,
        "communication alone": [[100e3] * 3] * 7,
        "fifo": [[150e3] * 3] * 7,
        "priority": [[110e3] * 3] * 7,
    }
    name = "vgg, computing twice as long"
    case = priority.found(priority.CASES[name], rounds)
    assert case["hidden"]["priority"]["ratio"] == pytest.approx(0.9)
    assert case["speed-up"]["ratio"] == pytest.approx(150 / 110)
    priority.show({"cases": {name: case}})
    said = capsys.readouterr().out
    assert "speed-up 1.36x" in said and "90%" in said
