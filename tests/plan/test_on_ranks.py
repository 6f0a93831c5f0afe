"""`horoclone plan` on real ranks: the example is measured, planned and run; wrong files are refused with a next move."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("rich", reason="rich is not installed")

HERE = ("horoclone/plan", "horoclone/replay.py", "horoclone/torch/planning", "horoclone/launch/plan.py")
COMMAND = [sys.executable, "-m", "horoclone.launch.tool", "plan"]


@pytest.mark.guards(*HERE, "examples/plan_transformer.py", "horoclone/torch/optimizer", packages=("torch",))
def test_the_example_is_measured_and_its_three_best_ways_are_run(
    launch: Any, examples: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    words = ["-np", "2", "--validate", "3", "--approximate", "--json", out]
    words += ["--only", "data parallel; cross_barrier; ZeRO-1; int8; DiLoCo, 20", "--steps", "4"]
    said = launch(
        [*COMMAND, f"{examples / 'plan_transformer.py'}:build", *words],
        env={"OMP_NUM_THREADS": "1"},
        timeout_s=150,
    ).stdout
    plan = json.loads(out.read_text())
    assert f"chosen: {plan['chosen']}, because its step of" in said
    measured = {way["name"]: way["measured_s"] for way in plan["ways"] if way["measured_s"] is not None}
    assert len(measured) == 3 and all(isinstance(took, float) for took in measured.values()), measured
    assert measured[plan["chosen"]] == min(measured.values())
    assert plan["profile"]["parameters"] == sum(size for size, _ in plan["layers"])
    assert plan["profile"]["activations"] > 0 and plan["profile"]["memory_by"] == "torch's MemTracker"
    assert plan["rates"]["operations"]["bucket"][1] > 0 and not plan["assumed"]


WRONG = {
    "nothing": ("def build():\n    return None\n", "returned None. build() must return"),
    "frozen": (
        "import torch\ndef build():\n    m = torch.nn.ReLU()\n    return m, lambda: m(torch.ones(1))\n",
        "the model has no parameters that are trained",
    ),
    "loss": (
        "import torch\ndef build():\n    m = torch.nn.Linear(2, 2)\n    return m, lambda: m(torch.ones(2))\n",
        "loss_of_batch() returned a tensor of shape (2,)",
    ),
    "another": ("def other():\n    pass\n", "has no function 'build'; it has other"),
    "breaks": (
        "def build():\n    raise KeyError('words')\n",
        "build() or loss_of_batch() failed: KeyError: 'words'",
    ),
    "one rank": (
        "import horoclone.torch as hvd\nimport torch\ndef build():\n    m = torch.nn.Linear(2, 2)\n"
        "    return (m, lambda: m(torch.ones(2)).sum()) if hvd.rank() == 0 else 7\n",
        "on rank 1: build() of model.py returned an object of int",
    ),
}


@pytest.mark.guards(*HERE, packages=("torch",))
@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_planned_is_refused_on_every_rank(
    name: str, launch: Any, tmp_path: Path
) -> None:
    program, text = WRONG[name]
    file = tmp_path / "model.py"
    file.write_text(program)
    done = launch([*COMMAND, f"{file}:build", "-np", "2"], check=False, timeout_s=100)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
