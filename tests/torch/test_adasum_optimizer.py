"""DistributedOptimizer(op=Adasum): local steps whose differences are reduced, against a float64 model in NumPy."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world import alike, load, ranks, wrapped_sgd

import horoclone.torch as hvd

Arrays = list[np.ndarray]
SHAPES = {"weight": (5, 4), "bias": (5,)}


# --- the model -----------------------------------------------------------------------------------------------------


adasum = load(Path(__file__).with_name("test_adasum.py"), "test_adasum").tree


def momentum_step(gradient: np.ndarray, state: dict[str, Any]) -> np.ndarray:
    """torch.optim.SGD(lr=0.05, momentum=0.9)"""
    state["buffer"] = 0.9 * state["buffer"] + gradient if "buffer" in state else gradient
    return -0.05 * state["buffer"]


def adam_step(gradient: np.ndarray, state: dict[str, Any]) -> np.ndarray:
    """torch.optim.Adam(lr=0.01)"""
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    return -0.01 * (state["m"] / (1 - 0.9**t)) / (np.sqrt(state["v"] / (1 - 0.999**t)) + 1e-8)


STEPS: dict[str, tuple[Callable[..., Any], Callable[..., np.ndarray]]] = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), momentum_step),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), adam_step),
}


def data(rank: int, part: int) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng([rank, part])
    return chance.normal(size=(8, 4)), chance.normal(size=(8, 5)) + rank


def start() -> Arrays:
    chance = np.random.default_rng(99)
    return [chance.normal(size=shape) for shape in SHAPES.values()]


def model_of(step_of: Callable[..., np.ndarray], size: int, steps: int, passes: int = 1) -> Arrays:
    """Parameters after `steps` steps of `size` ranks that fit weight x + bias to y, with squares of the difference."""
    parameters = start()
    states: list[list[dict[str, Any]]] = [[{}, {}] for _ in range(size)]
    for step in range(steps):
        deltas: list[Arrays] = []
        for rank in range(size):
            gradients = [np.zeros(shape) for shape in SHAPES.values()]
            for part in range(passes):
                x, y = data(rank, step * passes + part)
                error = 2 * (x @ parameters[0].T + parameters[1] - y) / y.size
                gradients[0] += error.T @ x
                gradients[1] += error.sum(0)
            deltas.append([step_of(g, s) for g, s in zip(gradients, states[rank], strict=True)])
        for i in range(len(parameters)):
            parameters[i] = parameters[i] + adasum([deltas[rank][i] for rank in range(size)])
    return parameters


# --- the real thing ------------------------------------------------------------------------------------------------


def linear(dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 5).to(dtype)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), start(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return model


def wrapped(model: torch.nn.Module, which: str = "momentum", **options: Any) -> Any:
    plain = STEPS[which][0](model.parameters())
    return hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Adasum, **options)


def backward(model: torch.nn.Module, part: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x, y = (torch.from_numpy(a).to(dtype) for a in data(hvd.rank(), part))
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


def train(model: torch.nn.Module, optimizer: Any, first: int = 0, steps: int = 6) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_close(model: torch.nn.Module, expected: Arrays, tolerance: float = 1e-11) -> None:
    for parameter, value in zip(model.parameters(), expected, strict=True):
        found = parameter.detach().double().numpy()
        assert np.abs(found - value).max() <= tolerance * np.abs(value).max(), np.abs(found - value).max()
    assert alike(model.parameters())


@pytest.mark.parametrize("which", sorted(STEPS))
@ranks(3)
def test_equals_the_model(which: str) -> None:
    model = linear()
    optimizer = wrapped(model, which)
    assert type(optimizer).__name__ == ("SGD" if which == "momentum" else "Adam")
    assert isinstance(optimizer, torch.optim.SGD if which == "momentum" else torch.optim.Adam)
    train(model, optimizer)
    assert_close(model, model_of(STEPS[which][1], hvd.size(), 6))
    # Gradients are there, and this rank's own
    assert len({float(p.grad.sum()) for p in model.parameters()}) == 2


@ranks(2, env={"HOROCLONE_SHARED_MEMORY": "0"})
def test_equals_the_model_over_tcp_with_several_parts() -> None:
    from horoclone.torch.optimizer import adasum as module

    before, module.BUCKET_BYTES = (
        module.BUCKET_BYTES,
        64,
    )  # the weight fills one part, the bias comes into the next
    try:
        model = linear()
        train(model, wrapped(model))
        assert_close(model, model_of(momentum_step, hvd.size(), 6))
    finally:
        module.BUCKET_BYTES = before


@ranks(2)
def test_several_backward_passes_are_one_local_step() -> None:
    model = linear()
    optimizer = wrapped(model, "adam", backward_passes_per_step=3)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            backward(model, step * 3 + part)
        optimizer.step()
    assert_close(model, model_of(adam_step, hvd.size(), 4, 3))
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    backward(model, 0)
    with pytest.raises(AssertionError, match=r"more than backward_passes_per_step times.*'(weight|bias)'"):
        backward(model, 1)
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert alike(model.parameters())


@ranks(2)
def test_compression_of_the_differences_and_models_in_other_dtypes() -> None:
    expected = model_of(momentum_step, hvd.size(), 6)
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        model = linear(torch.float32)
        train(model, wrapped(model, compression=compression))
        assert_close(model, expected, tolerance)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        model = linear(dtype)
        train(model, wrapped(model))
        assert_close(model, expected, tolerance)
    with pytest.raises(ValueError, match="Average and op=hvd.Sum"):
        wrapped(linear(), compression=hvd.Compression.int8)


@ranks(3)
def test_state_stays_on_its_rank_and_comes_back_from_a_checkpoint() -> None:
    model = linear()
    optimizer = wrapped(model)
    train(model, optimizer)
    buffers = hvd.allgather(optimizer.state[model.bias]["momentum_buffer"].unsqueeze(0))
    assert not torch.equal(buffers[0], buffers[1])  # each from its own gradients
    kept = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    revived = copy.deepcopy(optimizer)
    assert isinstance(revived, type(optimizer).__mro__[1]) and isinstance(revived, torch.optim.SGD)
    train(model, optimizer, 6)
    again = linear()
    other = wrapped(again)
    again.load_state_dict(kept[0])
    other.load_state_dict(kept[1])
    train(again, other, 6)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_close(again, model_of(momentum_step, hvd.size(), 12))
    hvd.broadcast_optimizer_state(other, root_rank=1)
    buffers = hvd.allgather(other.state[again.bias]["momentum_buffer"].unsqueeze(0))
    assert torch.equal(buffers[0], buffers[2])


@ranks(2)
def test_synchronize_does_nothing_and_cannot_be_skipped() -> None:
    model = linear()
    optimizer = wrapped(model)
    optimizer.zero_grad()
    backward(model, 0)
    mine = [p.grad.clone() for p in model.parameters()]
    optimizer.synchronize()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), mine, strict=True))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(AssertionError, match="Skipping synchronization is not supported when using Adasum"):
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.step()
    assert alike(model.parameters())


@ranks(1)
def test_alone_it_is_the_wrapped_optimizer() -> None:
    model, plain = linear(), linear()
    optimizer, other = wrapped(model, "adam"), STEPS["adam"][0](plain.parameters())
    for step in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        backward(model, step)
        backward(plain, step)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@ranks(2)
def test_a_parameter_group_added_later_moves_alike() -> None:
    model, more = linear(), torch.nn.Linear(5, 5).double()
    with torch.no_grad():
        more.weight.copy_(torch.eye(5))
        more.bias.zero_()
    optimizer = wrapped(model)
    whole = torch.nn.Sequential(model, more)
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.01})
        before = more.weight.detach().clone()
        optimizer.zero_grad()
        more.zero_grad()
        backward(whole, step)
        optimizer.step()
        assert torch.equal(more.weight, before) == (step < 2)
    assert alike(whole.parameters())


@ranks(2)
def test_local_frozen_unused_sparse_and_channels_last_parameters() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({
        "table": torch.nn.Embedding(30, 36, sparse=True), "body": torch.nn.Conv2d(4, 6, 3), "own": torch.nn.Linear(6, 2),
        "frozen": torch.nn.Linear(2, 2), "idle": torch.nn.Linear(2, 2),
    }).to(memory_format=torch.channels_last)  # fmt: skip
    model["frozen"].requires_grad_(False)
    wide = torch.randn(2, 12)
    model["idle"].weight = torch.nn.Parameter(wide[:, ::6])  # gaps between its elements
    plain = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(
        plain, model.named_parameters(), op=hvd.Adasum, local_parameters=model["own"]
    )
    before = copy.deepcopy(model)
    for step in range(3):
        words = torch.randint(30, (5, 4), generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        seen = model["body"](model["table"](words).view(5, 4, 6, 6)).mean((2, 3))
        loss = model["frozen"](model["own"](seen)).square().mean()
        if hvd.rank() == 1:
            loss = loss + model["idle"](torch.ones(1, 2)).sum()  # used on one rank only
        loss.backward()
        optimizer.step()
    assert model["body"].weight.is_contiguous(memory_format=torch.channels_last)
    assert alike(p for name in ("table", "body", "idle", "frozen") for p in model[name].parameters())
    assert not alike(model["own"].parameters())
    for part in ("table", "body", "own", "idle"):
        assert not torch.equal(model[part].weight, before[part].weight), part
    assert torch.equal(model["frozen"].weight, before["frozen"].weight)
    # Adam takes no sparse ones
    dense = wrapped(torch.nn.Sequential(model["table"]), "adam", sparse_as_dense=True)
    model["table"](torch.tensor([hvd.rank()])).sum().backward()
    dense.step()
    assert alike(model["table"].parameters())


@ranks(2)
def test_a_parameter_added_between_backward_and_step() -> None:
    """On one rank: told at once, and nothing has moved. On all: it takes part from this step on."""
    for ranks_that_add in ([0, 1], [0]):
        model, more = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        hvd.broadcast_parameters({**model.state_dict(), "more": more.weight}, root_rank=0)
        optimizer = wrapped_sgd(model, op=hvd.Adasum)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            (model(x).square().mean() + more(x).square().mean()).backward()
            before = model.weight.detach().clone()
            if step != 2:
                optimizer.step()
                continue
            if hvd.rank() in ranks_that_add:
                optimizer.add_param_group({"params": [more.weight]})
            if len(ranks_that_add) == 1:
                with pytest.raises(
                    hvd.Mismatch, match="'allreduce.noname.2' is .* on rank 0 and no such parameter"
                ):
                    optimizer.step()
                assert torch.equal(model.weight, before)
                break
            optimizer.step()
        weights = hvd.allgather(torch.cat([model.weight, more.weight])[None].detach())
        assert torch.equal(weights[0], weights[1]) or len(ranks_that_add) == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@ranks(2)
def test_closures_schedules_and_hooks() -> None:
    model = linear()
    optimizer = wrapped(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen: list[torch.Tensor] = []
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append(model.weight.detach().clone()))

    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            for _ in range(2):  # as a line search does
                optimizer.zero_grad()
                loss = backward(model, step)
            return loss

        assert float(optimizer.step(closure)) > 0
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 / 16)
    assert calls == ["pre"] * 4 and len(seen) == 4 and torch.equal(seen[-1], model.weight)
    rows = hvd.allgather(torch.stack(seen).unsqueeze(0))
    assert torch.equal(rows[0], rows[1])  # post hooks see what all ranks have
    optimizer.zero_grad()
    search = linear()
    lbfgs = hvd.DistributedOptimizer(
        torch.optim.LBFGS(search.parameters(), 0.5, max_iter=3), search.named_parameters(), op=hvd.Adasum
    )

    def once() -> torch.Tensor:
        lbfgs.zero_grad()
        return backward(search, 0)

    losses = [float(lbfgs.step(once)) for _ in range(3)]
    assert losses[-1] < losses[0] and alike(search.parameters())


@ranks(2)
def test_an_overflow_on_one_rank_makes_every_rank_skip_the_step() -> None:
    model = linear(torch.float32)
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        x, y = (torch.from_numpy(a).float() for a in data(hvd.rank(), step))
        loss = (model(x) - y).square().mean()
        if step == 2 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight) == (step == 2)
        assert scaler.get_scale() == (8.0 if step < 2 else 4.0)
    assert alike(model.parameters())


@ranks(2)
def test_a_failed_reduction_leaves_parameters_as_they_were() -> None:
    model = linear()
    optimizer = wrapped(model)
    train(model, optimizer, steps=2)
    before = [p.detach().clone() for p in model.parameters()]
    name = f"{optimizer._deltas._summaries[0]} (deltas.{optimizer._deltas._layout}.0)"
    if hvd.rank() == 0:  # another operation of that name
        # Of the backward
        hvd.allreduce(torch.zeros(2, dtype=torch.uint8), name="horoclone.overflow", op=hvd.Max)
        with pytest.raises(hvd.Mismatch):
            hvd.grouped_allreduce([torch.zeros(3), torch.zeros(2)], name=name, op=hvd.Adasum)
    else:
        backward(model, 2)
        with pytest.raises(hvd.Mismatch, match=re.escape(name)):
            optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    train(model, optimizer, 3, 2)
    assert alike(model.parameters())


@ranks(2, init=False)
def test_training_goes_on_after_shutdown_and_init() -> None:
    hvd.init()
    model = linear()
    optimizer = wrapped(model)
    for life in range(3):
        train(model, optimizer, 2 * life, 2)
        hvd.shutdown()
        hvd.init()
    assert_close(model, model_of(momentum_step, hvd.size(), 6))


@ranks(2, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_what_is_refused() -> None:
    model = linear()
    only = hvd.add_process_set([0])
    with pytest.raises(NotImplementedError, match="Adasum does not support non-global process sets"):
        wrapped(model, process_set=only)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        wrapped(model, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="shard_optimizer_state does not work with op=hvd.Adasum"):
        wrapped(model, shard_optimizer_state=True)
    with pytest.raises(ValueError, match="at least 1"):
        wrapped(model, backward_passes_per_step=0)
    optimizer = wrapped(model)
    for again in (hvd.Adasum, hvd.Average):
        with pytest.raises(ValueError, match="already a DistributedOptimizer"):
            hvd.DistributedOptimizer(optimizer, op=again)
    hvd.barrier()
    hvd.remove_process_set(only)
    different = torch.nn.Linear(4, 5 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(different.parameters(), 0.1), op=hvd.Adasum)
    different(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match="different parameters.*rank 0.*rank 1"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, wrapped(model), steps=2)
    assert alike(model.parameters())
