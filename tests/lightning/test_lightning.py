"""HorocloneStrategy against plain loops that see all ranks' samples, under our launcher and mpirun, and its errors."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from world import alike, ranks, run_python

import horoclone.torch as hvd
from horoclone.bootstrap.detect import torch_port

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="Lightning 2 is not installed"
)
SAMPLES, BATCH = 64, 8  # of each rank
LIMIT_S = 180.0  # Lightning imports half of torch, on two ranks at once


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(5)
    count = SAMPLES * hvd.size()
    x = torch.randn(count, 6, generator=chance, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3] * 2 - 1).round())


@functools.cache
def kit() -> SimpleNamespace:
    """Modules of Lightning's, whose import takes seconds: on the ranks only, not where tests are collected."""
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        """Different parameters on every rank, until the strategy broadcasts rank 0's."""

        def __init__(self, seed: int | None = None) -> None:
            super().__init__()
            torch.manual_seed(hvd.rank() if seed is None else seed)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
            ).double()
            self.seen: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = F.mse_loss(self.layers(x), y)
            self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            self.log("largest", x.max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max")
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", F.mse_loss(self.layers(x), y), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class ByHand(Model):
        """Manual optimization of two optimizers, in turn."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()[index % 2]
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self.layers(batch[0]), batch[1]))
            optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.layers[i].parameters(), 0.1) for i in (0, 2)]

    return SimpleNamespace(pl=pl, Model=Model, ByHand=ByHand)


@contextmanager
def trainer(folder: Path, **options: Any) -> Iterator[Any]:
    """With a strategy object: its name would make Lightning look for MPI in the test's process. Quiet."""
    from horoclone.lightning import HorocloneStrategy

    how = {"enable_checkpointing": False, "logger": False, **options}
    strategy = how.pop("strategy", None) or HorocloneStrategy()
    try:
        yield kit().pl.Trainer(
            strategy=strategy, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=str(folder), **how,
        )  # fmt: skip
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def loader() -> DataLoader:
    return DataLoader(data(), BATCH)


def batches_of_all(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the ranks see together, by the sampler that Lightning puts in (it shuffles training data, always)."""
    parts = []
    for rank in range(hvd.size()):
        sampler = DistributedSampler(data(), hvd.size(), rank, shuffle=True, seed=0)
        sampler.set_epoch(epoch)
        parts.append(list(DataLoader(data(), BATCH, sampler=sampler)))
    return [
        tuple(torch.cat(tensors) for tensors in zip(*step, strict=True)) for step in zip(*parts, strict=True)
    ]


def reference(epochs: int, clip: float | None = None, accumulate: int = 1) -> tuple[Any, float]:
    """The same training in one process, on batches of all ranks' samples; the last epoch's mean loss."""
    model = kit().Model(seed=0)
    optimizer = model.configure_optimizers()
    for epoch in range(epochs):
        losses = []
        for index, (x, y) in enumerate(batches_of_all(epoch)):
            loss = F.mse_loss(model.layers(x), y)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return model, sum(losses) / len(losses)


@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(2, limit_s=LIMIT_S)
def test_trains_as_one_process_with_everybodys_samples(accumulate: int, tmp_path: Path) -> None:
    model = kit().Model()
    with trainer(tmp_path, max_epochs=3, gradient_clip_val=0.1, accumulate_grad_batches=accumulate) as t:
        t.fit(model, loader(), loader())
        assert (t.world_size, t.global_rank, t.is_global_zero) == (hvd.size(), hvd.rank(), hvd.rank() == 0)
        metrics = t.callback_metrics
        expected, loss = reference(3, 0.1, accumulate)
        for a, b in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        assert alike(model.parameters())
        assert metrics["loss"].item() == pytest.approx(loss, rel=1e-9)
        assert metrics["largest"].item() == data().tensors[0].max().item()
        whole = F.mse_loss(expected.layers(data().tensors[0]), data().tensors[1])
        assert metrics["error"].item() == pytest.approx(whole.item(), rel=1e-9)


@ranks(2, limit_s=LIMIT_S)
def test_collectives_of_the_strategy(tmp_path: Path) -> None:
    with trainer(tmp_path, max_epochs=1, limit_train_batches=1) as t:
        t.fit(kit().Model(), loader())
        strategy, rank, size = t.strategy, hvd.rank(), hvd.size()
        assert dist.get_backend() == "horoclone"
        assert strategy.broadcast({"from": rank}, src=size - 1) == {"from": size - 1}
        assert strategy.reduce(torch.tensor(float(rank)), reduce_op="mean").item() == (size - 1) / 2
        assert strategy.reduce(torch.tensor(rank), reduce_op="sum").item() == sum(range(size))
        assert strategy.reduce("no tensor") == "no tensor"
        assert strategy.all_gather(torch.tensor([rank])).flatten().tolist() == list(range(size))
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert not strategy.reduce_boolean_decision(rank == 0, all=True)
        strategy.barrier("here")
        assert strategy.distributed_sampler_kwargs == {"num_replicas": size, "rank": rank}


@ranks(2, limit_s=LIMIT_S)
def test_rank_zero_writes_the_checkpoint_and_everybody_goes_on_from_it(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    folder = hvd.broadcast_object(str(tmp_path / "kept"), 0)
    keep = ModelCheckpoint(dirpath=folder, save_last=True)
    with trainer(tmp_path, max_epochs=2, callbacks=[keep], enable_checkpointing=True) as t:
        t.fit(kit().Model(), loader())
        hvd.barrier()
        assert [p.name for p in Path(folder).glob("last*")] == ["last.ckpt"]
    model = kit().Model(seed=70 + hvd.rank())
    with trainer(tmp_path, max_epochs=4) as t:
        t.fit(model, loader(), ckpt_path=str(Path(folder) / "last.ckpt"), weights_only=True)
        assert t.current_epoch == 4
    expected, _ = reference(4)
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert alike(model.parameters())


@ranks(2, limit_s=LIMIT_S)
def test_manual_optimization_and_a_communication_hook(tmp_path: Path) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    from horoclone.lightning import HorocloneStrategy

    by_hand = kit().ByHand()
    with trainer(tmp_path, max_epochs=2) as t:
        t.fit(by_hand, loader())
    assert alike(by_hand.parameters())
    model = kit().Model()
    strategy = HorocloneStrategy(ddp_comm_hook=fp16_compress_hook, gradient_as_bucket_view=True)
    with trainer(tmp_path, max_epochs=2, strategy=strategy) as t:
        t.fit(model, loader())
    expected, _ = reference(2)
    differences = [
        float((a - b).abs().max()) for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    ]
    assert 0 < max(differences) < 0.05 and alike(model.parameters())  # the hook was there: float16 rounds


@ranks(2, limit_s=LIMIT_S)
def test_the_callback_logs_horoclones_numbers_to_the_trainers_logger(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    # Else TensorBoard loads TensorFlow where it is installed, for its file system.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from horoclone.lightning import MetricsCallback

    own: list[tuple[int, float]] = []
    both = [
        MetricsCallback(every=2),
        MetricsCallback(3, lambda numbers, step: own.append((step, max(numbers.values()))), all_ranks=True),
    ]
    folder = hvd.broadcast_object(str(tmp_path), 0)
    logger = TensorBoardLogger(folder, name="", version="run")
    with trainer(tmp_path, max_epochs=1, callbacks=both, logger=logger) as t:
        t.fit(kit().Model(), loader())
        steps = t.global_step
    assert [step for step, _ in own] == sorted({*range(3, steps + 1, 3), steps}) and own[-1][1] > 0
    hvd.barrier()
    events = EventAccumulator(f"{folder}/run")
    events.Reload()
    logged = events.Scalars("horoclone/operations")
    assert [one.step for one in logged] == sorted({*range(2, steps + 1, 2), steps})
    values = [one.value for one in logged]
    assert values == sorted(values) and 0 < values[0] <= values[-1] <= hvd.metrics()["operations"]
    with trainer(tmp_path, max_epochs=1, callbacks=[MetricsCallback()]) as t:
        with pytest.raises(ValueError, match="MetricsCallback has nowhere to log"):
            t.fit(kit().Model(), loader())
    with pytest.raises(ValueError, match="all_ranks=True needs `to`"):
        MetricsCallback(all_ranks=True)


@ranks(2, limit_s=LIMIT_S)
def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.accelerators import CUDAAccelerator

    from horoclone.lightning import HorocloneEnvironment, HorocloneStrategy

    for wish in ({"devices": 4}, {"num_nodes": 3}):
        with pytest.raises(ValueError, match=rf"Trainer\({next(iter(wish))}=\d\).*horoclonerun -np"):
            with trainer(tmp_path, max_epochs=1, **wish):
                pass
    with trainer(tmp_path, max_epochs=1, devices=2) as t:
        assert t.world_size == 2 and t.num_devices == 2 and t.num_nodes == 1
    with pytest.raises(hvd.Unsupported, match="CPUs, not with CUDAAccelerator"):
        HorocloneStrategy().accelerator = CUDAAccelerator()
    ours = str(torch_port("a job"))  # where the script may serve a store of its own already
    with patch.dict(os.environ, HOROCLONE_JOB="a job", MASTER_ADDR="127.0.0.1", MASTER_PORT=ours):
        assert str(HorocloneEnvironment().main_port) != ours
    environment = HorocloneEnvironment()
    meeting = environment.main_address, environment.main_port
    assert meeting[0] == "127.0.0.1" and len(set(hvd.allgather_object(meeting))) == 1
    dist.init_process_group(
        "gloo", init_method=f"tcp://{meeting[0]}:{meeting[1]}", rank=hvd.rank(), world_size=hvd.size()
    )
    with trainer(tmp_path, max_epochs=1) as t:
        with pytest.raises(RuntimeError, match="initialised with the backend 'gloo' before"):
            t.fit(kit().Model(), loader())


def test_without_lightning_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['lightning'] = None; import horoclone.lightning"
    done = run_python(code)
    assert re.search(
        r"ImportError: horoclone.lightning needs Lightning 2 \(pip install lightning\)", done.stderr
    )


@pytest.mark.long(40)
@pytest.mark.parametrize("how", ["horoclonerun", "mpirun"])
def test_the_example_by_the_strategys_name(how: str, launch: Any, examples: Path, request: Any) -> None:
    pytest.importorskip("sklearn")
    script, env = examples / "lightning_digits.py", {}
    if how == "mpirun":
        mpi = request.getfixturevalue("open_mpi")
        command, env = [*mpi.command(2), sys.executable, script], mpi.env
    else:
        command = [sys.executable, "-m", "horoclone.launch.cli", "-np", "2", sys.executable, script]
    done = launch([*command, "--epochs", "6"], env=env, timeout_s=180)
    found = re.search(r"2 ranks, loss ([\d.]+), best accuracy ([\d.]+), same weights: True", done.stdout)
    assert found and float(found[1]) < 0.5 and float(found[2]) > 0.9, done.output
