"""`horoclone plan` on real ranks: the example is measured, planned and run; wrong files are refused with a next move."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from world import ranks

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("rich", reason="rich is not installed")

COMMAND = [sys.executable, "-m", "horoclone.launch.tool", "plan"]


@pytest.mark.long(90)
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
    measured = {
        strategy["name"]: strategy["measured_s"]
        for strategy in plan["strategies"]
        if strategy["measured_s"] is not None
    }
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
        "on rank 1: build() of model5.py returned an object of int",
    ),
}


@ranks(2, init=False)
def test_a_file_that_cannot_be_planned_is_refused_on_every_rank(tmp_path: Path) -> None:
    import torch

    from horoclone.plan.torch.ranks import measure

    for number, (program, text) in enumerate(WRONG.values()):
        file = tmp_path / f"model{number}.py"
        file.write_text(program)
        assert text in measure(str(file), "build", 2).error, program
    assert torch.is_grad_enabled()


@ranks(2, init=False)
def test_a_small_model_is_measured_on_both_ranks_alike(tmp_path: Path) -> None:
    from horoclone.plan.torch.ranks import measure

    file = tmp_path / "model.py"
    file.write_text(SMALL)
    answer = measure(str(file), "build", 4)
    assert not answer.error
    profile, rates = answer.value
    assert profile.optimizer == "SGD" and profile.is_chain and profile.is_per_parameter
    assert [block.name for block in profile.blocks] == ["0", "1", "2"]
    first, last = profile.gradients[0], profile.gradients[-1]
    assert first.size == 4 * 8 * 64 and first.needed_s < last.needed_s and first.ready_s >= last.ready_s
    assert profile.parameters == 4 * (8 * 64 + 64 + 64 + 1) and profile.state == profile.parameters
    int8 = profile.compressions["int8"]
    assert [[one.op for stage in bucket for one in stage.sent] for bucket in int8] == [
        ["alltoall", "allgather"]
    ]
    assert int8[0][0].sent[0].size >= profile.parameters / 4  # integers for four ranks, and their scales
    assert rates.size == 2 and 0 <= rates.load <= 1 and len(rates.compute_s) == 2
    assert all(line.fixed_s > 0 and line.per_byte_s > 0 for line in rates.operations.values())


SMALL = """
import torch
def build():
    m = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    return m, lambda: m(torch.ones(2, 8)).sum(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
"""


@pytest.mark.long(90)
def test_started_on_every_rank_of_a_job_it_prints_once(launch: Any, examples: Path) -> None:
    job = [Path(sys.executable).with_name("horoclonerun"), "-np", "2", *COMMAND]
    subject, only = f"{examples / 'plan_transformer.py'}:build", "data parallel; ZeRO-1"
    said = launch([*job, subject, "--only", only], env={"OMP_NUM_THREADS": "1"}).stdout
    assert said.count("chosen: ") == 1 and "measured on 2 rank(s)" in said
    done = launch([*job, subject, "-np", "3"], check=False)
    assert done.returncode == 2 and done.stderr.count("this job has 2 ranks: leave -np out") >= 1
