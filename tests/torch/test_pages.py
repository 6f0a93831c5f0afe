"""The Python on the pages about operations, the optimizer, compression, ways of training, checkpoints and elastic jobs
runs on two ranks."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from world import alike, ranks

import horoclone.torch as hvd
from horoclone import arrays
from horoclone.torch import operations

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks_of(page: str) -> list[str]:
    """The Python blocks; those that stand in a list are moved to the margin."""
    found = re.findall(r"^( *)```python\n(.*?)^\1```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return ["\n".join(line[len(margin) :] for line in text.splitlines()) for margin, text in found]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eight batches of this rank's: sixteen points in four classes, which a linear layer can tell apart."""
    chance = torch.Generator().manual_seed(1 + hvd.rank() if hvd.is_initialized() else 1)
    found = []
    for _ in range(8):
        labels = torch.randint(4, (16,), generator=chance)
        found.append((F.one_hot(labels, 4) + 0.3 * torch.randn(16, 4, generator=chance), labels))
    return found


def namespace(folder: Path) -> dict[str, Any]:
    """What the pages about the optimizer and compression take for granted."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return {
        "torch": torch, "hvd": hvd, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": batches(), "dataset": [one for pair in batches() for one in zip(*pair, strict=True)],
        "loss_of": F.cross_entropy, "checkpoint": folder / f"{hvd.rank()}.pt",
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
    assert alike(model.parameters())
    return sum(losses[:8]) / 8, sum(losses[-8:]) / 8


@pytest.mark.parametrize("page", ["optimizer.md", "compression.md"])
@ranks(2)
def test_every_block_runs(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    for number, block in enumerate(blocks):
        names = namespace(tmp_path)
        # Goes on with a wrapped one
        if re.search("set_backward_passes|set_weight|clip_grad_norm_|consolidate", block):
            names["optimizer"] = hvd.DistributedOptimizer(
                names["optimizer"],
                names["model"].named_parameters(),
                shard_optimizer_state="consolidate" in block,
            )
            fit(names, 1)
        exec(compile(block, f"{page}, block {number}", "exec"), names)
        if "set_weight" in block:
            names["optimizer"].set_weight(None)
        if isinstance(names["model"], torch.nn.Linear):
            first, last = fit(names, 8)
            assert last < first, (number, first, last)
    if page == "optimizer.md" and hvd.rank() == 0:
        assert set(torch.load(tmp_path / "0.pt", weights_only=True)) == {"model", "optimizer"}
    assert len(blocks) >= 2


def test_every_argument_of_the_optimizer_is_described() -> None:
    text = (DOCS / "optimizer.md").read_text()
    items = re.findall(
        r"^- ((?:`\w+`(?:, )?)+)(?: \(.*\))?: ", text.split("## Arguments")[1].split("\n## ")[0], re.M
    )
    described = [name for item in items for name in re.findall(r"`(\w+)`", item)]
    taken = inspect.signature(hvd.DistributedOptimizer).parameters
    assert described == [name for name in taken if name != "num_groups"]
    (first,) = re.findall(r"arguments from `(\w+)` on are keyword-only", text)
    own = [name for name, one in taken.items() if one.kind is one.KEYWORD_ONLY]
    assert own[0] == first


# --- operations ---


@ranks(2)
def test_every_block_of_the_page_of_operations_runs() -> None:
    blocks = blocks_of("operations.md")
    assert len(blocks) >= 7

    for number, block in enumerate(blocks):
        exec(compile(block, f"operations.md, block {number}", "exec"), {})
    hvd.barrier()


def test_every_operation_is_named() -> None:
    text = (DOCS / "operations.md").read_text()
    forms = re.compile(r"^grouped_|_async_?$|_$")
    functions = [*arrays.__all__, *operations.__all__]
    assert len(functions) > 60
    missing = {n for n in functions if n not in text and forms.sub("", forms.sub("", n)) not in text}
    assert not missing


@pytest.mark.parametrize("page", ["evaluation.md", "uneven_data.md"])
@ranks(2)
def test_the_script_of_a_page_runs_as_it_stands(page: str) -> None:
    (block,) = blocks_of(page)
    names = run(block, {})
    assert alike(names["model"].parameters())


@ranks(2)
def test_the_script_of_the_readme_prints_what_it_says() -> None:
    """With the lines of the diff on two ranks, and without them in one process."""
    readme = (DOCS.parent / "README.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", readme, re.DOTALL)
    lines = [line or " " for line in diff.splitlines()]
    here, before = ("\n".join(line[1:] for line in lines if line[0] != left_out) for left_out in "-+")
    shown = [float(loss) for loss in re.findall(r"^\[0\] epoch \d: loss (\S+)$", readme, re.M)]
    printed: list[str] = []
    run(here, {"print": printed.append})
    assert len(shown) == 3 and len(printed) == (3 if hvd.rank() == 0 else 0)
    if hvd.rank() == 0:
        assert [float(text.split()[-1]) for text in printed] == pytest.approx(shown, abs=2e-3)
    assert "hvd" not in before
    run(before, {"print": printed.append})
    assert len(printed) == (6 if hvd.rank() == 0 else 3)


# --- ways of training, checkpoints, elastic jobs: chosen blocks ---


def block_of(page: str, part: str, **in_place_of: str) -> str:
    """The Python block of a page that has `part` in it; in_place_of: what stands for what a reader has to fill in."""
    (block,) = [one for one in blocks_of(page) if part in one]
    for other, text in in_place_of.items():
        assert text in block, f"{page}: {text!r} is not in the block with {part!r}"
        block = block.replace(text, other)
    return block


def two_layers() -> dict[str, Any]:
    """What the pages about ways of training take for granted."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.first, model.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    return {
        "torch": torch, "hvd": hvd, "model": model, "loader": batches(), "loss": F.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip


def run(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block, "a block of a page", "exec"), names)
    return names


@ranks(2)
def test_quorum() -> None:
    names = run(block_of("quorum.md", "max_lag=8"), two_layers())
    assert names["optimizer"].rounds >= 8
    assert alike(names["model"].parameters())


@ranks(2)
def test_diloco() -> None:
    names = two_layers()
    names["loader"] *= 25  # two movements of each fragment
    before = names["model"].first.weight.detach().clone()
    run(block_of("local_sgd.md", "fragment_sync_delay=5"), names)
    assert not torch.equal(before, names["model"].first.weight)


@ranks(2)
def test_local_sgd_in_an_elastic_job() -> None:
    names = two_layers()
    run(block_of("local_sgd.md", "sync_every=8", **{"24": "10000"}), names)
    state = hvd.elastic.TorchState(model=names["model"], optimizer=names["optimizer"], step=0)
    names["train"](state)
    assert state.step == 24


@ranks(2)
def test_a_step_without_a_barrier() -> None:
    names = run(block_of("priority.md", "cross_barrier"), two_layers())
    for x, y in names["loader"]:
        F.cross_entropy(names["model"](x), y).backward()
        names["optimizer"].step()
    names["optimizer"].synchronize()
    assert alike(names["model"].parameters())


@ranks(2, init=False)
def test_checkpoints(tmp_path: Path) -> None:
    block = block_of(
        "checkpoints.md", "saves(path)", **{"model, optimizer, 0": "..., ..., 0", "{end}": "10000"}
    )
    for end, saves in ((3000, [1, 2, 3]), (4000, [2, 3, 4])):
        run(block.replace("{end}", str(end)), {**two_layers(), "path": tmp_path})
        # Rank 0 removes older ones after it has told the others
        assert hvd.checkpoint.saves(tmp_path)[-3:] == saves


@ranks(2)
def test_checkpoints_of_an_elastic_job(tmp_path: Path) -> None:
    names = {**two_layers(), "path": tmp_path, "sampler": hvd.elastic.ElasticSampler(range(8)), "epochs": 200}
    block = block_of("checkpoints.md", "state.commit()", **{"state.epoch += 1": "..."})
    run(block, names)
    names["train"](names["state"])
    assert hvd.checkpoint.saves(tmp_path) == [1, 2]  # of the commits 100 and 200


@ranks(2)
def test_an_elastic_script() -> None:
    names = two_layers()
    names["dataset"] = torch.utils.data.TensorDataset(torch.cat([x for x, _ in names["loader"]]))
    block = block_of(
        "elastic.md", "sampler.record_batch",
        **{"model, dataset": "..., ...", "for index, (x,) in": "for index, (x, y) in"},
    )  # fmt: skip
    assert run(block, names)["state"].epoch == 10


@ranks(2)
def test_callers_of_profilers_and_trackers(tmp_path: Path) -> None:
    told: list[tuple[Any, ...]] = []

    def tell(*given: Any, **named: Any) -> None:
        told.append(given)

    names = {
        **two_layers(), "step": 1, "train_some_steps": lambda: hvd.allreduce(torch.ones(3), name="x"),
        "writer": SimpleNamespace(add_scalar=tell), "wandb": SimpleNamespace(log=tell),
        "mlflow": SimpleNamespace(log_metrics=tell), "train": tell,
    }  # fmt: skip
    before = Path.cwd()
    os.chdir(tmp_path)  # of this rank's process
    try:
        run(block_of("observing.md", "export_chrome_trace"), names)
        run(block_of("observing.md", "add_scalar"), names)
        if importlib.util.find_spec("tensorboard"):
            run(block_of("observing.md", "MetricsLog"), {**names, "loader": names["loader"] * 25})
            assert hvd.rank() or list(Path("runs/first").glob("events*"))
    finally:
        os.chdir(before)
    assert "horoclone.allreduce" in (tmp_path / f"trace.rank{hvd.rank()}.json").read_text()
    assert len(told) > 10


@ranks(2)
def test_ddp_and_a_compiled_function() -> None:
    import torch.distributed as dist

    names = run(block_of("pytorch_on_cpus.md", "DistributedDataParallel(model)"), two_layers())
    for x, y in names["loader"]:
        F.cross_entropy(names["model"](x), y).backward()
    assert alike(names["model"].parameters())
    dist.destroy_process_group()
    block = block_of(
        "torch_ecosystem.md", "fullgraph=True", **{'fullgraph=True, backend="aot_eager"': "fullgraph=True"}
    )
    found = run(block, names)["loss"](torch.ones(3), torch.ones(3))
    assert found.item() == pytest.approx(6 * torch.ones(1).sin().item())
