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


def test_speed_up_and_hidden_share_are_held_against_their_gates(priority: Any, capsys: Any) -> None:
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
    priority.print_result({"cases": {name: case}})
    said = capsys.readouterr().out
    assert "speed-up >= 0.98: 1.36x" in said
    assert "hidden >= 0.8: 90% (90% to 90%), met" in said
