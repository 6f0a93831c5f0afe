"""hvd.VirtualRanks: the same bits for any number of processes and across losses, and the right means."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import random
import re
import runpy
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from world import Worlds, ranks

import horoclone.torch as hvd
from horoclone.errors import Mismatch
from horoclone.torch import virtual_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_virtual_ranks.py"


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples with a random part of all three libraries, as augmentation makes it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) + float(np.random.rand()) + random.random()
        return index / 100 + 0.1 * noise


class Model(torch.nn.Module):
    """With what a forward pass changes, and what it leaves."""

    seen: torch.Tensor
    is_seen: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)
        self.dropout, self.last = torch.nn.Dropout(0.3), torch.nn.Linear(5, 1)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([0.1, -torch.inf, torch.nan]))
        self.register_buffer("seen", torch.tensor([1.0]))
        self.register_buffer("is_seen", torch.tensor([False, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.last(self.dropout(self.norm(self.first(x))))
        assert isinstance(found, torch.Tensor)
        return found


def model_of(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def number(tensor: torch.Tensor | None) -> float:
    assert tensor is not None
    return float(tensor.item())


def digest(model: torch.nn.Module) -> str:
    tensors = [one.reshape(-1).view(torch.uint8) for one in model.state_dict().values()]
    whole = torch.cat(tensors).numpy().tobytes()
    return hashlib.sha256(whole).hexdigest()


def trained(virtual_size: int, workers: int, dtype: torch.dtype) -> tuple[str, int, list[float]]:
    """What two epochs come to: of the weights, how many passes the normalisation has counted, unused weights."""
    torch.set_num_threads(1)
    model = model_of(dtype)
    virtual = hvd.VirtualRanks(model, virtual_size, seed=3)
    data = virtual.loader(Noisy(), batch_size=4, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(2 * len(data)):
        for rank in virtual.ranks(step):
            for inputs in (data.batch(rank, step).to(dtype), torch.rand(2, 4, dtype=dtype)):
                model(inputs).square().mean().backward()  # gradients of a rank are added up
        optimizer.step()
    return digest(model), int(number(model.norm.num_batches_tracked)), model.unused.tolist()


@pytest.mark.parametrize(
    ("virtual_size", "workers", "dtype"),
    [
        (8, 0, torch.float32),
        (5, 0, torch.bfloat16),
        pytest.param(8, 2, torch.float32, marks=pytest.mark.long(20)),
        pytest.param(1, 0, torch.float64, marks=pytest.mark.long(5)),
    ],
)
def test_the_bits_do_not_depend_on_the_number_of_processes(
    worlds: Worlds, virtual_size: int, workers: int, dtype: torch.dtype
) -> None:
    found = set()
    for size in (1, 2, 3, 4):
        for digest, passes, unused in worlds.run(
            size, trained, virtual_size=virtual_size, workers=workers, dtype=dtype
        ):
            found.add(digest)
            assert passes == 2 * 2 * (100 // (4 * virtual_size)), "each step counts once"
            assert unused == [1, 1, 1], "no gradient, so no decay either"
    assert len(found) == 1


def means() -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Of what the virtual ranks have, and of what lies outside of the loop."""
    model = model_of(torch.float64)
    virtual = hvd.VirtualRanks(model, 6)
    torch.manual_seed(5)
    before = torch.rand(1).item()
    for rank in virtual.ranks(0):
        model(torch.full((4, 4), rank + 1.0, dtype=torch.float64) + torch.eye(4)).sum().backward()
    after = torch.rand(1).item()
    assert model.norm.running_mean is not None
    return gradient(model.last.bias), model.norm.running_mean, before, after


@ranks(1, 2, 3)
def test_gradients_and_running_statistics_are_means_over_the_virtual_ranks() -> None:
    bias, running, before, after = means()
    assert bias.item() == pytest.approx(4.0, rel=1e-15), (
        "each of six batches of four adds one for each sample"
    )
    model = model_of(torch.float64)
    with torch.no_grad():
        expected = sum(
            0.1 * model.first(torch.full((4, 4), rank + 1.0, dtype=torch.float64) + torch.eye(4)).mean(0)
            for rank in range(6)
        )
    assert torch.allclose(running, expected / 6, rtol=1e-12)
    torch.manual_seed(5)
    assert [before, after] == torch.rand(2).tolist(), "the loop draws nothing from the numbers around it"


@ranks(3)
def test_processes_without_a_virtual_rank_have_the_result_too() -> None:
    model = model_of()
    virtual = hvd.VirtualRanks(model, 2)
    assert len(virtual.mine) == (0 if hvd.rank() == 0 else 1)
    for rank in virtual.ranks(0):
        model(torch.ones(3, 4) * rank).sum().backward()
    for found in (gradient(model.last.weight), model.norm.running_var, model.norm.num_batches_tracked):
        assert found is not None
        every = hvd.allgather(found[None])
        assert all(torch.equal(every[0], one) for one in every)
    assert number(model.norm.num_batches_tracked) == 1 and number(model.last.bias.grad) == 3


@ranks(2)
def test_a_buffer_that_some_virtual_ranks_change_is_the_mean_with_those_that_do_not() -> None:
    model = model_of()
    for rank in hvd.VirtualRanks(model, 4).ranks(0):
        assert model.seen.item() == 1 and not model.is_seen.any(), "as the step found them"
        if rank == 3:
            model.seen += 4
            model.is_seen[1] = True
    assert model.seen.item() == 2 and model.is_seen.tolist() == [False, True]


@ranks(2)
def test_what_is_wrong_is_an_error_on_all_and_they_go_on() -> None:
    model = model_of()
    for size, step in ((4 + hvd.rank(), 0), (4, hvd.rank())):
        with pytest.raises(ValueError, match=r"size, seed and step differ between processes: \["):
            for _ in hvd.VirtualRanks(model, size).ranks(step):
                pass
    for bad, text in (
        (lambda: hvd.VirtualRanks(model, 0), "at least 1"),
        (lambda: hvd.VirtualRanks(model, 2, -1), "seed"),
    ):
        with pytest.raises(ValueError, match=text):
            bad()
    virtual = hvd.VirtualRanks(model, 2)
    with pytest.raises(
        ValueError, match="7 samples are less than one batch of 4 for each of 2 virtual ranks"
    ):
        virtual.loader(range(7), batch_size=4)
    with pytest.raises(TypeError, match="have a length"):
        virtual.loader(iter([1]), batch_size=1)
    with pytest.raises(ValueError, match="batch_size"):
        virtual.loader(range(7), batch_size=0)
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ValueError, match="the gradient of weight is sparse"):
        for _ in hvd.VirtualRanks(embedding, 2).ranks(0):
            embedding(torch.tensor([0])).sum().backward()
    for _ in virtual.ranks(0):
        model(torch.ones(2, 4)).sum().backward()
        break
    assert model.last.bias.grad is None, "a loop that was left early leaves nothing for a step"
    for _ in virtual.ranks(1):
        model(torch.ones(2, 4)).sum().backward()
    assert number(model.last.bias.grad) == 2


class Held(torch.nn.Module):
    """Puts new tensors in the place of a buffer, and has two that are narrow."""

    mean: torch.Tensor
    count: torch.Tensor
    narrow: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor([200], dtype=torch.uint8))
        self.register_buffer("narrow", torch.tensor([30000.0], dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
        self.count += 1
        self.narrow += 32
        return found - self.mean


def held() -> tuple[str, list[float]]:
    model = Held()
    buffer = model.mean
    virtual = hvd.VirtualRanks(model, size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for _ in virtual.ranks(step):
            model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert model.mean is buffer
    return digest(model), [model.count.item(), model.narrow.item()]


def test_buffers_that_are_replaced_or_narrow_are_means_at_any_number_of_processes(worlds: Worlds) -> None:
    found = {outcome for n in (1, 2, 3) for outcome in map(repr, worlds.run(n, held))}
    assert len(found) == 1, found
    assert "[203, 30096.0]" in found.pop()


@ranks(1, 2)
def test_a_loop_that_is_left_or_fails_leaves_nothing() -> None:
    model = model_of()
    virtual = hvd.VirtualRanks(model, size=4)

    def found() -> tuple[str, bool, int]:
        drawn = torch.random.get_rng_state().sum().item()
        return digest(model), any(one.grad is not None for one in model.parameters()), int(drawn)

    before = found()
    for _ in virtual.ranks(0):
        model(torch.randn(3, 4)).sum().backward()
        break
    assert found() == before
    with pytest.raises(OSError, match="no data"):
        for _ in virtual.ranks(0):
            model(torch.randn(3, 4)).sum().backward()
            raise OSError("no data")
    assert found() == before
    table = torch.nn.Embedding(5, 2, sparse=True)
    with pytest.raises(ValueError, match="weight is sparse"):
        for _ in hvd.VirtualRanks(table, size=4).ranks(0):
            table(torch.tensor([1])).sum().backward()
    assert table.weight.grad is None


@ranks(1, 2)
def test_what_would_not_be_the_mean_is_an_error() -> None:
    model = model_of()
    virtual = hvd.VirtualRanks(model, size=4)
    data = virtual.loader(Noisy(), batch_size=2)
    with pytest.raises(RuntimeError, match="in step 0 no virtual rank .* one by one, not as a list"):
        for _ in list(virtual.ranks(0)):
            model(torch.randn(3, 4)).sum().backward()
    for rank, step in ((4, 0), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"no virtual rank .* batch\(rank, step\)"):
            data.batch(rank, step)
    with pytest.raises(ValueError, match=r"the buffer mask has become \(\[2\], "):
        for _ in virtual.ranks(0):
            model.mask = torch.zeros(2)
    with pytest.raises(ValueError, match="the buffer late of the model was made in the loop"):
        for _ in virtual.ranks(0):
            model.register_buffer("late", torch.zeros(2))
    del model._buffers["late"]
    twice = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(ValueError, match="DistributedOptimizer has parameters of this model"):
        next(virtual.ranks(0))
    del twice
    gc.collect()
    wrong: Any = [model]
    with pytest.raises(TypeError, match="it must be a torch.nn.Module"):
        hvd.VirtualRanks(wrong, size=2)
    for _ in virtual.ranks(0):
        model(torch.randn(3, 4)).sum().backward()
    assert gradient(model.last.weight).abs().sum() > 0


@ranks(2, 3)
def test_models_that_differ_are_told_before_the_first_step() -> None:
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(hvd.rank())
    virtual = hvd.VirtualRanks(model, size=4)
    for _ in range(2):
        with pytest.raises(Mismatch, match=r"before step 0 .* not the same.* hvd\.broadcast_parameters"):
            for _ in virtual.ranks(0):
                model(torch.ones(3, 4)).sum().backward()
        assert model.weight.grad is None
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in virtual.ranks(0):
        model(torch.ones(3, 4)).sum().backward()
    assert gradient(model.weight).tolist() == [[3.0] * 4] * 2


def mixed_up(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) * (torch.rand(()) + float(np.random.rand()) + random.random())


@ranks(1)
def test_a_batch_that_is_mixed_as_it_is_put_together_does_not_depend_on_workers_or_processes() -> None:
    virtual = hvd.VirtualRanks(model_of(), size=4)
    found = []
    for workers, processes in ((0, 1), (2, 1), (1, 2), (2, 4)):
        with mock.patch.multiple(virtual_ranks, size=lambda n=processes: n):
            data = virtual.loader(Noisy(), batch_size=2, num_workers=workers, collate_fn=mixed_up)
            found.append([data.batch(0, step) for step in range(3)])
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))
    workers, kept = data._batches._workers, weakref.ref(data)
    del data
    # In a circle its workers would not hear of the end, and each would be waited for for five seconds.
    assert kept() is None and not any(worker.is_alive() for worker in workers)


@ranks(1)
def test_a_loader_gives_the_right_batches_after_the_share_has_changed() -> None:
    virtual = hvd.VirtualRanks(model_of(), size=4)
    fresh = virtual.loader(Noisy(), batch_size=2)
    for before, after in ((1, 2), (2, 1), (1, 4)):
        data = virtual.loader(Noisy(), batch_size=2)
        for processes, steps in ((before, range(2)), (after, range(2, 5))):
            with mock.patch.multiple(virtual_ranks, size=lambda n=processes: n):
                for step in steps:
                    for rank in virtual.mine:
                        assert torch.equal(data.batch(rank, step), fresh.batch(rank, step)), (rank, step)
                        fresh._next = None


@ranks(1, 2)
def test_a_loader_begins_anywhere_and_gives_every_sample_once_an_epoch() -> None:
    virtual = hvd.VirtualRanks(torch.nn.Linear(1, 1), 3)
    data = virtual.loader(torch.arange(20), batch_size=2)
    assert len(data) == 3
    whole = {(step, rank): data.batch(rank, step).tolist() for step in range(6) for rank in virtual.mine}
    other = virtual.loader(torch.arange(20), batch_size=2)
    for step, rank in random.sample(sorted(whole), 4):
        assert other.batch(rank, step).tolist() == whole[step, rank]
    every = {key: samples for part in hvd.allgather_object(whole) for key, samples in part.items()}
    epochs = [
        [one for key in sorted(every) if key[0] // 3 == epoch for one in every[key]] for epoch in (0, 1)
    ]
    assert all(len(epoch) == len(set(epoch)) == 18 for epoch in epochs) and epochs[0] != epochs[1]
    plain = virtual.loader(torch.arange(20), batch_size=2, shuffle=False)
    assert plain.batch(virtual.mine.start, 1).tolist() == [
        6 + 2 * virtual.mine.start,
        7 + 2 * virtual.mine.start,
    ]


def weights_after(output: str) -> str:
    found = re.findall(r"after 50 steps: sha256 (\w+)", output)
    assert len(set(found)) == 1, output
    return found[0]


def example_alone() -> str:
    said = io.StringIO()
    with mock.patch.object(sys, "argv", [str(EXAMPLE)]), contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def goes_on(state: Any, steps: range, lost_at: int | None = None) -> tuple[str, Any]:
    """Of a training that goes on from what another number of processes has left.

    Before the step `lost_at` rank 2 of 3 goes, and the others keep model, loader and VirtualRanks.
    """
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    virtual = hvd.VirtualRanks(model, 4, seed=3)
    data = virtual.loader(Noisy(), batch_size=4)
    for step in steps:
        if step == lost_at:
            goes = hvd.rank() == 2
            hvd.shutdown()
            if goes:
                break
            hvd.init(comm=[0, 1])
            assert hvd.size() == 2
        for rank in virtual.ranks(step):
            model(data.batch(rank, step)).square().mean().backward()
        optimizer.step()
    return digest(model), (model.state_dict(), optimizer.state_dict())


def test_a_training_that_goes_on_with_other_processes_has_the_same_bits(worlds: Worlds) -> None:
    ((whole, _),) = worlds.run(1, goes_on, state=None, steps=range(9))
    state = None
    for size, steps in ((3, range(4)), (1, range(4, 6)), (2, range(6, 9))):
        found = worlds.run(size, goes_on, state=state, steps=steps)
        state = found[-1][1]
    assert {one for one, _ in found} == {whole}
    found = worlds.run(3, goes_on, state=None, steps=range(9), lost_at=4)
    assert {one for one, _ in found[:2]} == {whole} and found[2][0] != whole


@pytest.mark.long(30)
@pytest.mark.parametrize(("size", "most", "kills"), [(2, 2, 1), (3, 3, 2), (3, 4, 2)])
def test_losses_change_no_bit(launch: Any, worlds: Worlds, size: int, most: int, kills: int) -> None:
    (alone,) = worlds.run(1, example_alone, init=False)
    flags = ["-np", size, "--min-np", "1", "--max-np", most, "-H", f"localhost:{most}", "--verbose"]
    run = [sys.executable, "-m", "horoclone.launch", *flags, sys.executable, EXAMPLE, "--pause-s", "0.05"]
    job = launch.start(run)
    killed: list[int] = []
    begun = size  # lines of processes that have begun or gone on
    while len(killed) < kills:
        job.wait_for(": virtual", 60, begun)
        time.sleep(0.5)
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", job.stderr) if int(pid) not in killed]
        os.kill(pids[0], signal.SIGKILL)
        killed.append(pids[0])
        begun += size - 1
    done = job.finish(60)
    assert done.returncode == 0 and done.stderr.count("was killed by SIGKILL;") == kills, done.output
    assert re.search(r"step [1-9]\d*: virtual", done.stdout), done.output
    assert weights_after(done.stdout) == weights_after(alone)
