"""Horovod's published examples run unedited on two ranks: those of the folder that EXAMPLES_OF_HOROVOD names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from world import load

HERE = Path(__file__).resolve().parent
VARIABLE = "EXAMPLES_OF_HOROVOD"


RUN = load(HERE / "run.py", "horovod_examples_run")


def title(example: dict[str, Any]) -> str:
    return " ".join([example["name"], *example.get("arguments", ())[:8]])


def test_the_list_says_what_is_needed_and_what_was_seen() -> None:
    entries = RUN.listed()
    assert len(entries) >= 8
    for entry in entries:
        known = {
            "name", "start", "arguments", "data", "environment", "needs", "expect", "tried", "waits_for",
        }  # fmt: skip
        assert set(entry) <= known and entry["name"].endswith(".py"), entry
        assert "waits_for" in entry or ("expect" in entry and "needs" in entry), entry
        assert all(isinstance(word, str) for word in entry.get("arguments", ())), entry


@pytest.mark.slow
def test_a_script_is_run_on_two_ranks_and_its_failure_is_told(tmp_path: Path) -> None:
    """The way itself, on a script of ours that reads the made files as the examples do."""
    pytest.importorskip("torch")
    script = tmp_path / "examples" / "mine.py"
    script.parent.mkdir()
    script.write_text(
        "import horovod.torch as hvd\n"
        "from torchvision import datasets, transforms\n"
        "hvd.init()\n"
        "data = datasets.MNIST('data', train=False, download=True, transform=transforms.ToTensor())\n"
        "image, label = data[hvd.rank()]\n"
        "import torch\n"
        "model = torch.nn.Linear(28, 1)\n"
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())\n"
        "model(image[0]).sum().backward()\n"
        "optimizer.step()\n"
        "image = image if len(set(hvd.allgather_object(float(model.bias)))) == 1 else None\n"
        "print('rank', hvd.rank(), 'of', hvd.size(), tuple(image.shape), 0 <= label < 10, len(data))\n"
    )
    entry = {"name": "mine.py", "data": "mnist_files", "expect": r"rank 1 of 2 \(1, 28, 28\) True 256"}
    for number, expect in enumerate((entry["expect"], "something else")):
        place = tmp_path / str(number)
        place.mkdir()
        if number:
            with pytest.raises(AssertionError, match=r"mine\.py did not say something else"):
                RUN.run({**entry, "expect": expect}, script.parent, place)
        else:
            assert "rank 0 of 2" in RUN.run(entry, script.parent, place)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", RUN.listed(), ids=title)
def test_horovods_example(example: dict[str, Any], tmp_path: Path) -> None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} does not name the folder examples/ of a copy of Horovod's sources")
    why = RUN.obstacle(example, Path(folder).resolve())
    if why:
        pytest.skip(why)
    RUN.run(example, Path(folder).resolve(), tmp_path)
