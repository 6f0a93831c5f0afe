"""The Python on the pages about the optimizer and compression runs, block after block, on two ranks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from world import ranks

import horoclone.torch as hvd

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """The Python blocks; those that stand in a list are moved to the margin."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return ["\n".join(line[len(margin) :] for line in text.splitlines()) for margin, text in found]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight batches of this rank's: sixteen points in four classes, which a linear layer can tell apart."""
    chance = torch.Generator().manual_seed(1 + hvd.rank())
    found = []
    for _ in range(8):
        labels = torch.randint(4, (16,), generator=chance)
        found.append((F.one_hot(labels, 4) + 0.3 * torch.randn(16, 4, generator=chance), labels))
    return found


def namespace(folder: Path) -> dict[str, Any]:
    """What the pages take for granted."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return {
        "torch": torch, "hvd": hvd, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": batches(), "loss_of": F.cross_entropy, "checkpoint": folder / f"{hvd.rank()}.pt",
    }  # fmt: skip


def fit(names: dict[str, Any], epochs: int) -> tuple[float, float]:
    """Mean loss of the first and of the last epoch with the page's optimizer; the ranks end alike."""
    model, optimizer, losses = names["model"], names["optimizer"], []
    for _ in range(epochs):
        for points, labels in names["batches"]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    rows = hvd.allgather(model.weight.detach().view(1, -1))
    assert torch.equal(rows[0], rows[1])
    return sum(losses[:8]) / 8, sum(losses[-8:]) / 8


@pytest.mark.parametrize("page", ["optimizer.md", "compression.md"])
@ranks(2)
def test_every_block_runs(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    for number, block in enumerate(blocks):
        names = namespace(tmp_path)
        if re.search(
            "set_backward_passes|set_weight|clip_grad_norm_|consolidate", block
        ):  # goes on with a wrapped one
            names["optimizer"] = hvd.DistributedOptimizer(
                names["optimizer"],
                names["model"].named_parameters(),
                shard_optimizer_state="consolidate" in block,
            )
            fit(names, 1)
        exec(compile(block, f"{page}, block {number}", "exec"), names)
        if isinstance(names["model"], torch.nn.Linear):
            first, last = fit(names, 8)
            assert last < first, (number, first, last)
    if page == "optimizer.md" and hvd.rank() == 0:
        assert set(torch.load(tmp_path / "0.pt", weights_only=True)) == {"model", "optimizer"}
    assert len(blocks) >= 3


def test_every_argument_of_the_optimizer_has_a_row() -> None:
    text = (DOCS / "optimizer.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text.split("## Arguments")[1].split("\n## ")[0], re.M)
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    taken = inspect.signature(hvd.DistributedOptimizer).parameters
    assert described == [name for name in taken if name != "num_groups"]
    (first,) = re.findall(r"arguments from `(\w+)` on are keyword-only", text)
    own = [name for name, one in taken.items() if one.kind is one.KEYWORD_ONLY]
    assert own[0] == first
