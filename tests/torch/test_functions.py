"""Making ranks alike: parameters, optimizer state, objects."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from world import alike, ranks

import horoclone.torch as hvd


@ranks(1, 3)
def test_broadcast_parameters_of_every_kind() -> None:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        torch.nn.BatchNorm2d(4),  # has a 0-d int64 buffer
        torch.nn.Linear(5, 5).bfloat16(),
    )
    model.register_buffer("empty", torch.zeros(0, 3))
    model[1].num_batches_tracked.fill_(hvd.rank() + 5)
    root = hvd.size() - 1
    if hvd.size() > 1:
        assert not alike([model[0].weight])
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert alike(model.state_dict().values()) and model[1].num_batches_tracked == root + 5
    torch.manual_seed(root)
    expected = torch.nn.Conv2d(3, 4, 3)
    assert torch.equal(model[0].weight, expected.weight)
    torch.manual_seed(10 + hvd.rank())
    torch.nn.init.normal_(model[2].weight)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    assert alike([model[2].weight])
    hvd.broadcast_parameters({"w": torch.ones(2, 3).t(), "note": "not a tensor"}, root_rank=0)
    rows = torch.arange(3.0).add(hvd.rank()).repeat(2)
    mask = rows[:3].expand(4, 3)
    hvd.broadcast_parameters({"mask": mask, "strided": rows[3:].view(3, 1).expand(3, 2)}, root_rank=root)
    assert rows.tolist() == [root, root + 1, root + 2] * 2
    for wrong in (17, [torch.ones(1)], "state"):
        with pytest.raises(ValueError, match="params"):
            hvd.broadcast_parameters(wrong, root_rank=0)


def optimizers() -> dict[str, Any]:
    lbfgs = lambda p: torch.optim.LBFGS(p, 0.3, max_iter=4)  # noqa: E731
    known = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, 0.1),
        "adamw-capturable": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
        "rprop": lambda p: torch.optim.Rprop(p, 0.1),
        "asgd": lambda p: torch.optim.ASGD(p, 0.1),
        "lbfgs": lbfgs,
    }
    for name in ("Adafactor", "Muon"):
        if hasattr(torch.optim, name):
            known[name.lower()] = partial(getattr(torch.optim, name), lr=0.1)
    return known


class Refusing(torch.optim.Optimizer):
    """Will not step with zero gradients, keeps float32 state for 16-bit parameters, nests and shares it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "schedule": (1, {"warm": [0.5]})})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None and p.grad.abs().sum() > 0, "a zero step"
                state = self.state[p]
                if not state:
                    state["deep"] = {
                        "history": [torch.zeros_like(p, dtype=torch.float32)],
                        "count": 0,
                        "who": "me",
                    }
                    state["same"] = state["deep"]["history"][0]
                state["same"].add_(p.grad.float())
                state["deep"]["count"] += 1
                p.sub_(state["deep"]["history"][0].to(p.dtype), alpha=group["lr"])


def steps(model: torch.nn.Module, optimizer: Any, count: int, seed: int) -> None:
    for i in range(count):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed + i))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for key in sorted(value, key=str) for t in tensors_in(value[key])]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_in(item)]
    return []


@ranks(3)
def test_state_of_any_optimizer_reaches_ranks_that_have_none() -> None:
    for name, make in {**optimizers(), "refusing": Refusing}.items():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3, bias=name != "muon")
        optimizer = make(model.parameters())
        root = hvd.size() - 1
        if hvd.rank() == root:
            steps(model, optimizer, 3, seed=0)
            optimizer.param_groups[0]["lr"] = 0.0625
        hvd.broadcast_parameters(model.state_dict(), root)
        before = copy.deepcopy(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer, root)
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items()), (
            f"{name}: parameters moved"
        )
        assert optimizer.param_groups[0]["lr"] == 0.0625, name
        found = tensors_in(optimizer.state_dict()["state"])
        counts = hvd.allgather_object([tuple(t.shape) for t in found])
        assert all(c == counts[0] for c in counts), (name, counts)
        assert alike(found), name
        steps(model, optimizer, 2, seed=50)  # the same inputs everywhere: the ranks must stay alike
        assert alike(model.parameters()), name


@ranks(2)
def test_state_keeps_its_precision_sharing_and_nesting() -> None:
    model = torch.nn.Linear(5, 3).bfloat16()
    optimizer = Refusing(model.parameters())
    if hvd.rank() == 0:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1 / 3)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    for p in model.parameters():
        state = optimizer.state[p]
        assert state["same"].dtype == torch.float32 and state["same"] is state["deep"]["history"][0]
        assert state["deep"]["who"] == "me" and state["deep"]["count"] == 1
        assert torch.equal(state["same"], torch.full_like(p, 1 / 3).float())
    assert optimizer.param_groups[0]["schedule"] == (1, {"warm": [0.5]})


@ranks(2)
def test_a_root_without_state_clears_it_everywhere() -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.1 * (hvd.rank() + 1))
    if hvd.rank() == 1:
        steps(model, optimizer, 2, seed=0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1


@ranks(2)
def test_state_of_a_wrapped_optimizer_and_of_groups_that_differ() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    wrapped = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    steps(model, wrapped, 2, seed=hvd.rank())
    if hvd.rank() == 1:
        wrapped.state.clear()
    hvd.broadcast_optimizer_state(wrapped, root_rank=0, model=model)
    assert alike(tensors_in(wrapped.state_dict()["state"]))
    steps(model, wrapped, 2, seed=hvd.rank())
    assert alike(model.parameters())
    uneven = torch.optim.SGD(list(model.parameters())[: 2 - hvd.rank()], 0.1)
    alike_in_shape = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    named = list(alike_in_shape.named_parameters())[:: 1 - 2 * hvd.rank()]  # as the elements of a set may be
    plain = torch.optim.SGD([p for _, p in named], 0.1, momentum=0.9)
    swapped = hvd.DistributedOptimizer(plain, named)
    hvd.broadcast_optimizer_state(swapped, 0)  # it has nothing yet
    resumed = torch.optim.SGD(alike_in_shape.named_parameters(), 0.1, momentum=0.9)
    if hvd.rank() == 0:  # from a checkpoint of a wrapped model
        for group in resumed.param_groups:
            group["param_names"] = [f"module.{name}" for name in group["param_names"]]
        for parameter in alike_in_shape.parameters():
            resumed.state[parameter]["momentum_buffer"] = torch.ones(3, 3)
    hvd.broadcast_optimizer_state(resumed, 0)
    assert all(torch.equal(one["momentum_buffer"], torch.ones(3, 3)) for one in resumed.state.values())
    for parameter in alike_in_shape.parameters():
        swapped.state[parameter]["momentum_buffer"] = torch.ones(3, 3)
    for optimizer, words in ((uneven, "have"), (swapped, "parameter 0 of the optimizer is '1.weight'")):
        try:
            hvd.broadcast_optimizer_state(optimizer, 0)
        except ValueError as error:
            assert (
                hvd.rank() == 1 and "rank 1" in str(error) and "rank 0" in str(error) and words in str(error)
            )
        else:
            assert hvd.rank() == 0
