"""benchmarks/priority.py: what it concludes from times. Its hosts need root and minutes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


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
