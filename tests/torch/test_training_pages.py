"""The Python on the pages about ways of training, checkpoints and elastic jobs runs on two ranks."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from world import ranks

import horoclone.torch as hvd

DOCS = Path(__file__).resolve().parents[2] / "docs"


def block_of(page: str, part: str, **in_place_of: str) -> str:
    """The Python block of a page that has `part` in it; in_place_of: what stands for what a reader has to fill in."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [one for one in blocks if part in one]
    for other, text in in_place_of.items():
        assert text in block, f"{page}: {text!r} is not in the block with {part!r}"
        block = block.replace(text, other)
    return str(block)


def namespace() -> dict[str, Any]:
    """What the pages take for granted: a model, an optimizer, and batches of this rank."""
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(1 + hvd.rank() if hvd.is_initialized() else 1)
    labels = torch.randint(4, (8, 16), generator=chance)
    loader = [(F.one_hot(some, 4) + 0.3 * torch.randn(16, 4, generator=chance), some) for some in labels]
    model = torch.nn.Sequential()
    model.first, model.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
    return {
        "torch": torch, "hvd": hvd, "model": model, "loader": loader, "loss": F.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip


def run(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block, "a block of a page", "exec"), names)
    return names


def assert_alike(model: torch.nn.Module) -> None:
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    assert len({tuple(row.tolist()) for row in hvd.allgather(flat.view(1, -1))}) == 1


@ranks(2)
def test_quorum() -> None:
    names = run(block_of("quorum.md", "max_lag=8"), namespace())
    assert names["optimizer"].rounds >= 8
    assert_alike(names["model"])


@ranks(2)
def test_diloco() -> None:
    names = namespace()
    names["loader"] *= 25  # two movements of each fragment
    before = names["model"].first.weight.detach().clone()
    run(block_of("local_sgd.md", "fragment_sync_delay=5"), names)
    assert not torch.equal(before, names["model"].first.weight)


@ranks(2)
def test_local_sgd_in_an_elastic_job() -> None:
    names = namespace()
    run(block_of("local_sgd.md", "sync_every=8", **{"24": "10000"}), names)
    state = hvd.elastic.TorchState(model=names["model"], optimizer=names["optimizer"], step=0)
    names["train"](state)
    assert state.step == 24


@ranks(2)
def test_a_step_without_a_barrier() -> None:
    names = run(block_of("priority.md", "cross_barrier"), namespace())
    for x, y in names["loader"]:
        F.cross_entropy(names["model"](x), y).backward()
        names["optimizer"].step()
    names["optimizer"].synchronize()
    assert_alike(names["model"])


@ranks(2, init=False)
def test_checkpoints(tmp_path: Path) -> None:
    block = block_of(
        "checkpoints.md", "saves(path)", **{"model, optimizer, 0": "..., ..., 0", "{end}": "10000"}
    )
    for end, saves in ((3000, [1, 2, 3]), (4000, [2, 3, 4])):
        run(block.replace("{end}", str(end)), {**namespace(), "path": tmp_path})
        assert (
            hvd.checkpoint.saves(tmp_path)[-3:] == saves
        )  # rank 0 removes older ones after it has told the others


@ranks(2)
def test_checkpoints_of_an_elastic_job(tmp_path: Path) -> None:
    names = {**namespace(), "path": tmp_path, "sampler": hvd.elastic.ElasticSampler(range(8)), "epochs": 200}
    block = block_of("checkpoints.md", "state.commit()", **{"state.epoch += 1": "..."})
    run(block, names)
    names["train"](names["state"])
    assert hvd.checkpoint.saves(tmp_path) == [1, 2]  # of the commits 100 and 200


@ranks(2)
def test_an_elastic_script() -> None:
    names = namespace()
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
        **namespace(), "step": 1, "train_some_steps": lambda: hvd.allreduce(torch.ones(3), name="x"),
        "writer": SimpleNamespace(add_scalar=tell), "wandb": SimpleNamespace(log=tell),
        "mlflow": SimpleNamespace(log_metrics=tell), "train": tell,
    }  # fmt: skip
    before = Path.cwd()
    os.chdir(tmp_path)  # of this rank's process
    try:
        run(block_of("profiling.md", "export_chrome_trace"), names)
        run(block_of("profiling.md", "add_scalar"), names)
        if importlib.util.find_spec("tensorboard"):
            run(block_of("profiling.md", "MetricsLog"), {**names, "loader": names["loader"] * 25})
            assert hvd.rank() or list(Path("runs/first").glob("events*"))
    finally:
        os.chdir(before)
    assert "horoclone.allreduce" in (tmp_path / f"trace.rank{hvd.rank()}.json").read_text()
    assert len(told) > 10


@ranks(2)
def test_ddp_and_a_compiled_function() -> None:
    import torch.distributed as dist

    names = run(block_of("pytorch_on_cpus.md", "DistributedDataParallel(model)"), namespace())
    for x, y in names["loader"]:
        F.cross_entropy(names["model"](x), y).backward()
    assert_alike(names["model"])
    dist.destroy_process_group()
    block = block_of(
        "torch_ecosystem.md", "fullgraph=True", **{'fullgraph=True, backend="aot_eager"': "fullgraph=True"}
    )
    found = run(block, names)["loss"](torch.ones(3), torch.ones(3))
    assert found.item() == pytest.approx(6 * torch.ones(1).sin().item())
