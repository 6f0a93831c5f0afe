"""What scripts do to gradients and models between backward() and step(): the reduced values change, or an error says
what to add. Parameters are never left different on the ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from world import alike, ranks
from world import wrapped_sgd as wrapped

import horoclone.torch as hvd
from horoclone.torch.optimizer.backward_calls import BackwardCalls

Model = torch.nn.Module


def mean_of_ranks() -> float:
    """The reduced gradient of a loss of (1 + rank) * parameter."""
    return sum(1.0 + rank for rank in range(hvd.size())) / hvd.size()


def same(model: Model, apart: tuple[torch.Tensor, ...] = ()) -> bool:
    """Whether parameters are the same on all ranks, but for those `apart`."""
    return alike(p for p in model.parameters() if not any(p is one for one in apart))


# --- one action, once ----------------------------------------------------------------------------------------------


def _data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Model], None]:
    def act(model: Model) -> None:
        for parameter in model.parameters():
            parameter.grad.data = change(parameter.grad.data)

    return act


def _each(change: Callable[[torch.Tensor], Any]) -> Callable[[Model], None]:
    def act(model: Model) -> None:
        for parameter in model.parameters():
            change(parameter)

    return act


ACTIONS: dict[str, Callable[[Model], Any]] = {
    "mask": _data(lambda grad: grad * 0.5),
    "clamp": _data(lambda grad: grad.clamp(-1, 1)),
    "set": _each(lambda p: p.grad.set_(p.grad.clone())),
    "new": _each(lambda p: setattr(p, "grad", p.grad * 0.5)),
    "in place": _each(lambda p: p.grad.mul_(0.5)),
    "data in place": _each(lambda p: p.grad.data.mul_(0.5)),
    "transposed": _each(lambda p: (p.grad.t_(), p.grad.t_()) if p.dim() == 2 else None),
    "requires grad": _each(lambda p: p.grad.requires_grad_()),
    "shared": lambda model: model.share_memory(),
    "storage shared": _each(lambda p: p.grad.untyped_storage().share_memory_()),
    "cloned": lambda model: model._apply(lambda t: t.clone()),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "swapped": _each(lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach().clone()))),
    "loaded": lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "zero": {"shard_optimizer_state": True},
    "zero, whole": {"shard_optimizer_state": "parameters"},
    "groups": {"groups": 1},
    "predivide": {"gradient_predivide_factor": 2.0},
    "fp16": {"compression": hvd.Compression.fp16},
    "unused": {"unused_as_none": True},
}


# test_any_sequence... has all options.
@pytest.mark.parametrize(
    "option",
    [
        pytest.param(one, marks=[] if one in ("none", "zero") else [pytest.mark.in_turn])
        for one in sorted(OPTIONS)
    ],
)
@ranks(2)
def test_what_was_done_once_to_gradients_or_model_leaves_later_steps_right(option: str) -> None:
    for name, act in ACTIONS.items():
        for moment in ("after backward", "after synchronize", "after step"):
            model = torch.nn.Conv2d(2, 2, 2)
            optimizer = wrapped(model, 0.0, **OPTIONS[option])
            for step in range(5):
                optimizer.zero_grad()
                x = torch.ones(1, 2, 2, 2, dtype=model.weight.dtype)
                (model(x) * (1 + hvd.rank())).sum().backward()
                if step == 2 and moment == "after backward":
                    act(model)
                if step != 2 or moment == "after synchronize":
                    optimizer.synchronize()
                    for parameter in model.parameters():
                        assert set(parameter.grad.flatten().tolist()) == {mean_of_ranks()}, (
                            name,
                            moment,
                            step,
                        )
                    if step == 2:
                        act(model)
                    with optimizer.skip_synchronize():
                        optimizer.step()
                else:
                    optimizer.step()
                if step == 2 and moment == "after step":
                    act(model)
            if name in ("double", "half", "bfloat16"):
                assert model.weight.grad.dtype == model.weight.dtype


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 brought Tensor.grad_dtype")
@pytest.mark.parametrize("choice", ["float32", "any"])
@ranks(2)
def test_gradients_of_a_dtype_of_their_own_keep_it(choice: str) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.float().sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.full((3,), 1.001 + hvd.rank(), dtype=torch.float32) * grad

    for options in ({}, {"shard_optimizer_state": "parameters"}, {"groups": 1}, {"op": hvd.Sum}):
        weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        weight.grad_dtype = torch.float32 if choice == "float32" else None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.0), [("w", weight)], **options)
        want = np.float32(1.501) * (2 if "op" in options else 1)
        for _ in range(3):
            optimizer.zero_grad()
            Sum.apply(weight).backward()
            optimizer.synchronize()
            assert weight.grad.dtype == torch.float32
            assert weight.grad.tolist() == pytest.approx([want] * 3, rel=1e-7)
            with optimizer.skip_synchronize():
                optimizer.step()


# --- clipping ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_clipping_together_with_a_gradient_that_some_rank_lacks_names_the_lines_to_add() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
    optimizer = wrapped(layers)
    hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
    x = torch.ones(1, 3)
    for _ in range(2):
        optimizer.zero_grad()
        (layers[0](x).sum() + layers[1 + hvd.rank()](x).sum()).backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        with pytest.raises(
            RuntimeError, match=r"'0\.weight' was changed.*'[12]\.(weight|bias)'.*not"
        ) as caught:
            optimizer.step()
        assert "optimizer.synchronize()" in str(caught.value) and "skip_synchronize()" in str(caught.value)
    for _ in range(3):  # as it says
        optimizer.zero_grad()
        (layers[0](x).sum() + layers[1 + hvd.rank()](x).sum()).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert same(layers)


@ranks(2)
def test_clipping_with_a_parameter_that_has_taken_anothers_place_in_its_group() -> None:
    """`optimizer.zero_grad()` finds it; where only the model clears gradients, step() names it."""
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
    hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
    optimizer = wrapped(layers)
    for step, clears in enumerate((optimizer, optimizer, layers, optimizer)):
        if step:
            layers[1] = torch.nn.Linear(3, 3)
            hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
            optimizer.param_groups[0]["params"] = list(layers.parameters())
        clears.zero_grad()
        (layers[1](layers[0](torch.ones(1, 3))) * (1 + hvd.rank())).sum().backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        told = pytest.raises(RuntimeError, match="has taken another's place in optimizer.param_groups")
        with told if clears is layers else contextlib.nullcontext():
            optimizer.step()
        assert same(layers)


@ranks(2)
def test_gradients_that_a_script_keeps_in_one_memory_are_no_change_of_each_other() -> None:
    class Own(hvd.Compression.none):
        """Each gradient is reduced alone."""

    model = torch.nn.Linear(3, 3)
    optimizer = wrapped(model, 0.0, compression=Own)
    memory = torch.zeros(12)
    for _ in range(3):
        memory.zero_()
        model.weight.grad, model.bias.grad = memory[:9].view(3, 3), memory[9:]
        (model(torch.ones(1, 3)) * (1 + hvd.rank())).sum().backward()
        optimizer.step()
        assert set(memory.tolist()) == {mean_of_ranks()}


@pytest.mark.parametrize("option", ["none", "groups", "predivide", "fp16", "zero, whole"])
@ranks(2)
def test_a_change_through_data_while_another_gradient_is_not_reduced_is_seen_as_well(option: str) -> None:
    """It raises no version; each rank would have scaled by a norm of its own."""
    for late in (torch.float32, torch.bfloat16):
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
        layers[1:].to(late)
        optimizer = wrapped(layers, **OPTIONS[option])
        hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
        x = torch.ones(1, 3)
        for step in range(4):
            optimizer.zero_grad()
            mine = layers[1 + hvd.rank()](x.to(late)).sum()
            ((layers[0](x).sum() + mine) * (1 + hvd.rank())).backward()
            if step == 2:
                for parameter in layers[0].parameters():
                    parameter.grad.data.mul_(0.5 + hvd.rank())
                with pytest.raises(
                    RuntimeError, match=r"'0\.weight' was changed.*'[12]\.(weight|bias)'.*not"
                ):
                    optimizer.step()
                hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
            else:
                optimizer.step()
            assert same(layers)


@ranks(2)
def test_a_parameter_that_one_rank_leaves_out_later_holds_up_nobody() -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
    optimizer = wrapped(layers)
    hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
    for step in range(5):
        used = [0, 1, 2] if step in (0, 4) else [0, 1 + (hvd.rank() + step) % 2]
        optimizer.zero_grad()
        sum(layers[i](torch.ones(1, 3)).sum() for i in used).backward()
        hvd.allreduce(torch.ones(1), name="metric")  # another blocking collective before step()
        norm = torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        share = [1.0 if step in (0, 4) or i == 0 else 0.5 for i in range(3)]
        assert norm.item() == pytest.approx(sum(12 * s * s for s in share) ** 0.5, rel=1e-5), step
        optimizer.step()
        assert same(layers)


@ranks(2)
def test_a_step_that_is_left_out_for_an_overflow_is_left_out_everywhere() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = wrapped(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(6):
        loss = model(torch.ones(1, 3)).sum() * (float("inf") if (step + hvd.rank()) % 3 == 0 else 1.0)
        loss.backward()
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
        if finite:
            optimizer.step()
        if step % 2:
            optimizer.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
        assert finite == ((step % 3) not in (0, 2)) and same(model)


@pytest.mark.parametrize("option", ["none", "zero"])
@ranks(2)
def test_an_overflow_in_a_local_gradient_leaves_the_step_out_on_every_rank(option: str) -> None:
    net = torch.nn.ModuleDict({"trunk": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2 + hvd.rank())})
    optimizer = wrapped(net, local_parameters=net["head"], **OPTIONS[option])
    hvd.broadcast_parameters(net["trunk"].state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        hidden = net["trunk"](torch.ones(1, 3))
        factor = float("inf") if step == 2 and hvd.rank() == 1 else 1.0
        scaler.scale(hidden.sum() + (net["head"](hidden.detach()) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if step < 2 else 4.0)
    assert same(net["trunk"])


@pytest.mark.parametrize("adds", [[0, 1], [1]], ids=["all ranks add", "one rank adds"])
@pytest.mark.parametrize("script", ["as alone", "with the lines", "all overflow"])
@ranks(2, env={"HOROCLONE_DEADLOCK_TIME_SECONDS": "5"})
def test_an_overflow_in_a_further_backward_into_a_local_gradient(script: str, adds: list[int]) -> None:
    net = torch.nn.ModuleDict({"trunk": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2 + hvd.rank())})
    optimizer = wrapped(net, local_parameters=net["head"])
    hvd.broadcast_parameters(net["trunk"].state_dict(), root_rank=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        hidden = net["trunk"](torch.ones(1, 3))
        infinite = step == 2 and hvd.rank() == 1
        shared = hidden.sum() * (float("inf") if script == "all overflow" and infinite else 1.0)
        scaler.scale(shared + net["head"](hidden.detach()).sum()).backward()
        if hvd.rank() in adds:
            scaler.scale(net["head"](hidden.detach()).sum() * (float("inf") if infinite else 1.0)).backward()
        if script == "as alone" or (script == "all overflow" and step != 2):
            with pytest.raises(
                RuntimeError, match="(?s)further call of backward.*on every rank.*synchronize"
            ):
                scaler.step(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        else:
            if script == "with the lines":
                optimizer.synchronize()
            with optimizer.skip_synchronize() if script == "with the lines" else contextlib.nullcontext():
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (8.0 if step < 2 else 4.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=scaler.get_scale())
        assert same(net["trunk"])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@pytest.mark.parametrize("where", ["first step", "no backward", "fewer passes"])
@ranks(2, env={"HOROCLONE_DEADLOCK_TIME_SECONDS": "5"})
def test_beside_local_parameters_a_rank_whose_backward_did_not_wait_meets_the_others(where: str) -> None:
    """Each rank tells of overflows before it sends what some rank did not compute in the first step."""
    net = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in ("trunk", "late", "head")})
    passes = 2 if where == "fewer passes" else 1
    optimizer = wrapped(net, local_parameters=net["head"], backward_passes_per_step=passes)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    ones = torch.ones(1, 3)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(passes):
            if where == "first step" and step == 0 and hvd.rank() == 1:
                net["head"](ones).sum().backward()
                continue
            if where != "first step" and step == 2 and hvd.rank() == 1 and part == passes - 1:
                continue  # the other rank has one more
            loss = net["trunk"](ones).sum() + net["head"](ones).sum()
            (loss + net["late"](ones).sum() if hvd.rank() == 0 else loss).backward()
        optimizer.step()
    assert same(net["trunk"]) and same(net["late"])


@ranks(2)
def test_a_local_gradient_that_several_calls_of_backward_add_up_is_divided_once() -> None:
    net = torch.nn.ModuleDict({"trunk": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2)})
    optimizer = wrapped(net, 0.0, local_parameters=net["head"])
    for _ in range(3):
        optimizer.zero_grad()
        (net["trunk"](torch.ones(1, 3)).sum() + net["head"](torch.ones(1, 3)).sum()).backward()
        for calls in (1, 2):
            assert set(net["head"].weight.grad.flatten().tolist()) == {calls / hvd.size()}
            if calls == 1:
                net["head"](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert set(net["head"].weight.grad.flatten().tolist()) == {2 / hvd.size()}


# --- nothing but the calls that say so communicates ------------------------------------------------------------------


@pytest.mark.parametrize("op", ["average", "adasum"])
@ranks(2)
def test_one_rank_may_look_at_the_optimizer_at_any_time(op: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = wrapped(model, op=hvd.Adasum if op == "adasum" else hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4) * (hvd.rank() + 1)).sum()
        loss.backward()
        if hvd.rank() == step % 2:
            assert optimizer.param_groups[0]["lr"] == 0.1
            assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1 and "SGD" in repr(optimizer)
        hvd.allreduce(loss.detach(), name="loss")
        optimizer.step()
        assert same(model)


# --- calls of backward -----------------------------------------------------------------------------------------------


def test_calls_of_backward_are_told_apart_with_checkpoints_inside_each_other() -> None:
    class Watch:
        def __init__(self) -> None:
            self.ends: list[list[int]] = []
            self.fired: list[int] = []
            self.calls = BackwardCalls(self.ended)

        def ended(self) -> None:
            self.ends.append(self.fired)
            self.fired = []

    watch, layer = Watch(), torch.nn.Linear(3, 3, bias=False)

    def hook(_: torch.Tensor) -> None:
        watch.calls.note()
        watch.fired.append(watch.calls.number)

    layer.weight.register_post_accumulate_grad_hook(hook)
    for reentrant in (True, False):
        before = watch.calls.number
        for call in range(2):
            x = torch.ones(1, 3, requires_grad=True)

            def inner(x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
                return checkpoint(
                    layer, checkpoint(layer, x, use_reentrant=reentrant), use_reentrant=reentrant
                )

            y = checkpoint(inner, checkpoint(inner, x, use_reentrant=reentrant), use_reentrant=reentrant)
            y.sum().backward()
            assert watch.calls.number == before + call + 1 and not watch.fired
            assert set(watch.ends[-1]) == {before + call} and len(watch.ends[-1]) == (4 if reentrant else 1)


# --- join ------------------------------------------------------------------------------------------------------------

JOINING: dict[str, dict[str, Any]] = {
    "none": {}, "unused": {"unused_as_none": True}, "fp16": {"compression": hvd.Compression.fp16},
    "groups": {"groups": 2}, "predivide": {"gradient_predivide_factor": 2.0}, "adasum": {"op": hvd.Adasum},
    "powersgd": {"compression": hvd.Compression.powersgd(rank=1)}, "int8": {"compression": hvd.Compression.int8},
    "topk": {"compression": hvd.Compression.topk(ratio=0.5)},
}  # fmt: skip


@pytest.mark.parametrize("option", sorted(JOINING))
@ranks(2)
def test_a_rank_without_any_batch_joins_and_is_back_in_the_next_epoch(option: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = wrapped(model, **JOINING[option])
    for epoch in range(3):
        for _ in range(3 if (epoch + hvd.rank()) % 2 == 0 or epoch == 2 else 0):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            if option != "adasum" and epoch < 2:
                optimizer.synchronize()
                assert model[1].bias.grad.tolist() == pytest.approx([0.5])  # of two ranks, one is away
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=epoch % 2)
    assert same(model)


# --- any sequence ----------------------------------------------------------------------------------------------------


def drawn_by_all(examples: int) -> Any:
    """All ranks must draw the same examples: a fixed seed, no database, no shrinking (which would part them)."""

    def decorate(test: Any) -> Any:
        test = settings(
            max_examples=examples, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(test)  # fmt: skip
        return seed(20261)(test)

    return decorate


class Twin:
    """The same training in NumPy, in float64: the mean of all ranks' gradients, and what is done to it."""

    def __init__(self, model: Model, rate: float) -> None:
        self.values = [p.detach().double().numpy().copy() for p in model.parameters()]
        self.rate = rate
        self.grads: list[np.ndarray] = []

    def step(self) -> None:
        for value, grad in zip(self.values, self.grads, strict=True):
            value -= self.rate * grad


def _clip(grads: list[np.ndarray]) -> list[np.ndarray]:
    norm = np.sqrt(sum((grad**2).sum() for grad in grads))
    return [grad * min(1.0, 0.3 / (norm + 1e-6)) for grad in grads]


# (what a script does, what NumPy does)
CHANGES: dict[str, tuple[Callable[[Model], Any], Callable[[list[np.ndarray]], list[np.ndarray]]]] = {
    "clip": (lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3), _clip),
    "value": (
        lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.2),
        lambda grads: [grad.clip(-0.2, 0.2) for grad in grads],
    ),
    **{
        name: (ACTIONS[name], lambda grads: [grad * 0.5 for grad in grads])
        for name in ("mask", "new", "in place", "data in place")
    },
    **{
        name: (ACTIONS[name], lambda grads: grads)
        for name in (
            "set",
            "transposed",
            "shared",
            "storage shared",
            "cloned",
            "channels last",
            "double",
            "loaded",
        )
    },
}
RANDOM: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "passes": {"backward_passes_per_step": 2},
    "adasum": {"op": hvd.Adasum},
    "own set": {},
    "int8": {"compression": hvd.Compression.int8},
    "topk": {"compression": hvd.Compression.topk(ratio=0.5)},
    "powersgd": {"compression": hvd.Compression.powersgd(rank=1)},
    "cross_barrier": {},
    "quorum": {"quorum": 1.0},
    "local": {},
    "local, zero": {"shard_optimizer_state": True},
    "local, int8": {"compression": hvd.Compression.int8},
    "sparse": {},
    "sparse as dense": {"sparse_as_dense": True},
    "sparse, zero": {"shard_optimizer_state": True},
    "sparse as dense, groups": {"sparse_as_dense": True, "groups": 1},
}
TOLERANCES = {
    "fp16": 2e-3,
    "int8": 2e-2,
    "local, int8": 2e-2,
    "topk": np.inf,
    "powersgd": np.inf,
}  # inf: only the ranks are compared
OF_SPARSE = (
    "channels last",
    "cloned",
    "double",
    "in place",
    "loaded",
    "mask",
    "new",
)  # torch refuses the others
UNSEEN = {"channels last", "loaded"}  # what leaves gradients as they are


class Rows(torch.nn.Module):
    """A row for each number, whose gradients are sparse, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 3))
        self.bias = torch.nn.Parameter(torch.randn(3))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(numbers, self.weight, sparse=True) + self.bias


def _batch(option: str, number: int, shape: tuple[int, ...]) -> np.ndarray:
    chance = np.random.default_rng(number)
    return chance.integers(5, size=shape[:-1]) if "sparse" in option else chance.normal(size=shape)


def _loss_gradients(values: list[np.ndarray], parts: np.ndarray) -> list[np.ndarray]:
    """Of the mean of the squared outputs."""
    weight, bias = values
    grads = [np.zeros_like(weight), np.zeros_like(bias)]
    for part in parts:
        if part.ndim == 1:
            out = weight[part] + bias
            np.add.at(grads[0], part, 2 * out / out.size)
        else:
            out = part @ weight.T + bias
            grads[0] += 2 * out.T @ part / out.size
        grads[1] += 2 * out.sum(0) / out.size
    return grads


def _adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, aa, bb = (a * b).sum(), max((a * a).sum(), 1e-30), max((b * b).sum(), 1e-30)
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


def _mean(each: list[list[np.ndarray]]) -> list[np.ndarray]:
    return [np.mean(grads, axis=0) for grads in zip(*each, strict=True)]


@pytest.mark.parametrize("option", sorted(RANDOM))
@ranks(2, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_any_sequence_of_changes_trains_as_numpy_says(option: str) -> None:
    """Or an error on every rank, after which nothing has moved."""
    passes = RANDOM[option].get("backward_passes_per_step", 1)
    tolerance = TOLERANCES.get(option, 1e-5)
    options, size = dict(RANDOM[option]), hvd.size()
    if option == "own set":
        options["process_set"] = [hvd.add_process_set([rank]) for rank in range(size)][hvd.rank()]
    names = OF_SPARSE if "sparse" in option else sorted(CHANGES)

    def seen(own: list[list[np.ndarray]], rank: int) -> list[np.ndarray]:
        """What a rank's gradients are when backward() has ended."""
        if option in ("adasum", "own set", "quorum"):
            return own[rank]
        mean = _mean(own)
        return [mean[0], own[rank][1] / size] if "local" in option else mean

    def used(changed: list[list[np.ndarray]], rank: int) -> list[np.ndarray]:
        if option == "adasum":  # which is of the steps that the ranks would make alone
            return [_adasum(*grads) for grads in zip(*changed, strict=True)]
        return _mean(changed) if option == "quorum" else changed[rank]

    def refuses(changes: list[str], changed: list[list[np.ndarray]]) -> bool:
        if option == "cross_barrier":
            return not UNSEEN.issuperset(changes)
        return "local" in option and not np.allclose(changed[0][0], changed[1][0], rtol=1e-6)

    @drawn_by_all(int(os.environ.get("HOROCLONE_TEST_EXAMPLES", "8")))
    @given(
        st.lists(st.lists(st.sampled_from(names), max_size=2), min_size=3, max_size=5),
        st.booleans(),
    )
    def check(steps: list[list[str]], to_none: bool) -> None:
        torch.manual_seed(0)
        model = Rows() if "sparse" in option else torch.nn.Linear(3, 2)
        apart = {"local_parameters": model.bias} if "local" in option else {}
        apart = {"cross_barrier": model} if option == "cross_barrier" else apart
        twins = [Twin(model, 0.1) for _ in range(size)]
        optimizer = wrapped(model, 0.1, **options, **apart)
        for number, changes in enumerate(steps):
            optimizer.zero_grad(set_to_none=to_none)
            inputs = _batch(option, number, (size, passes, 4, 3))
            own = [_loss_gradients(twins[rank].values, inputs[rank]) for rank in range(size)]
            changed = [seen(own, rank) for rank in range(size)]
            for part in inputs[hvd.rank()]:
                x = torch.from_numpy(part)
                model(x if part.ndim == 1 else x.to(model.weight.dtype)).square().mean().backward()
            for change in changes:
                act, said = CHANGES[change]
                act(model)
                changed = [said(grads) for grads in changed]
            if refuses(changes, changed):
                with pytest.raises(RuntimeError, match="'(weight|bias)' was"):
                    optimizer.step()
            else:
                optimizer.step()
                for rank, twin in enumerate(twins):
                    twin.grads = used(changed, rank)
                    twin.step()
            if option == "cross_barrier":
                optimizer.synchronize()
            locals_ = (model.bias,) if "local" in option else ()
            assert option == "own set" or same(model, locals_), (steps, number)
            for mine, want in zip(model.parameters(), twins[hvd.rank()].values, strict=True):
                assert np.allclose(mine.detach().double().numpy(), want, atol=tolerance), (steps, number)
        if option == "quorum":
            optimizer.join()

    check()
