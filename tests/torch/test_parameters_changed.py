"""What changes on one rank only (a dtype, a layout, a parameter) is told at once on every rank, by the parameter's name;
what changes on all ranks alike goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from world import alike, ranks

import horoclone.torch as hvd

Net = torch.nn.Sequential


def network() -> Net:
    torch.manual_seed(0)
    return Net(torch.nn.Conv2d(2, 2, 2), torch.nn.Flatten(), torch.nn.Linear(8, 1))


# (what it does, what undoes it, the parameter that the text names)
CHANGES: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any], str]] = {
    "double": (lambda net: net.double(), lambda net: net.float(), "0.bias"),
    "half of it": (lambda net: net[2].bfloat16(), lambda net: net[2].float(), "2.bias"),
    "layout": (
        lambda net: net.to(memory_format=torch.channels_last),
        lambda net: net.to(memory_format=torch.contiguous_format),
        "0.weight",
    ),
}


class Plain(hvd.Compression.none):
    """A compressor of the user's own: each gradient is reduced alone."""


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "sum": {"op": hvd.Sum},
    "zero": {"shard_optimizer_state": True},
    "groups": {"groups": 2},
    "predivide": {"gradient_predivide_factor": 2.0},
    "fp16": {"compression": hvd.Compression.fp16},
    "unused": {"unused_as_none": True},
    "passes": {"backward_passes_per_step": 2},
    "int8": {"compression": hvd.Compression.int8},
    "topk": {"compression": hvd.Compression.topk(ratio=0.5)},
    "powersgd": {"compression": hvd.Compression.powersgd(rank=1)},
    "largest": {"op": hvd.Max},
    "smallest": {"op": hvd.Min},
    "product": {"op": hvd.Product},
    "adasum": {"op": hvd.Adasum},
    "own compressor": {"compression": Plain},
    "sparse": {},
    "cross_barrier": {},
    "cross_barrier, largest": {"op": hvd.Max},
}


class Training:
    def __init__(self, option: str, head_only: bool = False) -> None:
        self.net = network()
        self.rows = torch.nn.Embedding(3, 2, sparse=True) if option == "sparse" else None
        self.passes = OPTIONS[option].get("backward_passes_per_step", 1)
        trained = self.net[2] if head_only else self.net
        parameters = [*trained.parameters(), *(self.rows.parameters() if self.rows else ())]
        sgd = torch.optim.SGD(parameters, 0.01, momentum=0.0 if self.rows else 0.5)
        named = [*self.net.named_parameters(), *([("rows", self.rows.weight)] if self.rows else [])]
        barrier = "cross_barrier" in option
        options = {**OPTIONS[option], **({"cross_barrier": self.net} if barrier else {})}
        self.clips = not barrier and option != "sparse"
        self.optimizer = hvd.DistributedOptimizer(sgd, named, **options)

    def step(self, clips: bool = True) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            x = torch.ones(1, 2, 3, 3, dtype=self.net[0].weight.dtype)
            hidden = self.net[1](self.net[0](x))
            loss = self.net[2](hidden.to(self.net[2].weight.dtype)).sum()
            if self.rows is not None:
                loss = loss + self.rows(torch.tensor([hvd.rank()])).sum().to(loss.dtype)
            loss.mul(1 + hvd.rank()).backward()
        if clips and self.clips:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        if self.optimizer._options["cross_barrier"]:
            self.optimizer.synchronize()


@pytest.mark.parametrize("option", sorted(OPTIONS))
@ranks(2)
def test_on_one_rank_only(option: str) -> None:
    check_on_one_rank_only(option)


@pytest.mark.parametrize("option", ["zero", "int8", "sparse"])
@ranks(2, env={"HOROCLONE_SHARED_MEMORY": "0"})
def test_on_one_rank_only_between_machines(option: str) -> None:
    """Where a rank reads only its share of what is reduced."""
    check_on_one_rank_only(option, clips=False)


def check_on_one_rank_only(option: str, clips: bool = True) -> None:
    for change, undo, named in CHANGES.values():
        training = Training(option)
        for _ in range(3):
            training.step(clips)
        if hvd.rank() == 1:
            change(training.net)
        for _ in range(2):  # and again, as long as it is so
            begin = time.monotonic()
            with pytest.raises(
                (hvd.Mismatch, ValueError), match=f"'{named}' is .* on rank 0 and .* on rank 1"
            ):
                training.step(clips)
            assert time.monotonic() - begin < 20
            training.optimizer.zero_grad()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        if hvd.rank() == 1:
            undo(training.net)
        hvd.broadcast_parameters(training.net.state_dict(), root_rank=0)
        for _ in range(3):
            training.step(clips)
        assert alike(training.net.parameters())


@ranks(2)
def test_a_parameter_that_begins_to_train_on_one_rank_only() -> None:
    training = Training("none", head_only=True)
    for _ in range(3):
        training.step(clips=False)  # gradients of others are no part of it
    if hvd.rank() == 1:
        training.optimizer.add_param_group({"params": training.net[0].parameters()})
    with pytest.raises(hvd.Mismatch, match="'0.bias' is no such parameter on rank 0"):
        training.step(clips=False)
    training.optimizer.zero_grad()
    if hvd.rank() == 0:
        training.optimizer.add_param_group({"params": training.net[0].parameters()})
    for _ in range(3):
        training.step()
    assert alike(training.net.parameters())


@pytest.mark.parametrize("option", sorted(OPTIONS))
@ranks(2)
def test_on_all_ranks_alike(option: str) -> None:
    """Clipping in the very step works as well, and a rank that changes while others wait changes nothing."""
    for change, undo, _ in CHANGES.values():
        training = Training(option)
        for act in (None, None, change, None, undo, None):
            if act is not None:
                act(training.net)
            training.step()
            assert alike(training.net.parameters())


@pytest.mark.parametrize("option", ["none", "sum", "predivide"])
@ranks(2)
def test_gradients_that_are_zeroed_in_place_outlive_a_change(option: str) -> None:
    """With set_to_none=False a backward adds to the memory of the buckets, which the change ends."""
    for change in ("layout", "group"):
        training = Training(option)
        net, optimizer = training.net, training.optimizer
        more = torch.nn.Linear(8, 1)

        def backward(net: Net, factor: float, more: torch.nn.Module = more) -> None:
            hidden = net[1](net[0](torch.ones(1, 2, 3, 3)))
            (net[2](hidden).sum() + more(hidden.detach()).sum()).mul(factor).backward()

        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            backward(net, 1 + hvd.rank())
            optimizer.step()
        alone = network()
        alone.load_state_dict(net.state_dict())
        backward(alone, 3.0 if option == "sum" else 1.5)
        if change == "layout":
            net.to(memory_format=torch.channels_last)
        else:
            optimizer.add_param_group({"params": more.parameters()})
        optimizer.zero_grad(set_to_none=False)
        more.zero_grad()
        backward(net, 1 + hvd.rank())
        optimizer.synchronize()
        for (name, mine), right in zip(net.named_parameters(), alone.parameters(), strict=True):
            assert mine.grad is not None and right.grad is not None
            torch.testing.assert_close(mine.grad, right.grad, msg=lambda text, name=name: f"{name}: {text}")
        with optimizer.skip_synchronize():
            optimizer.step()
        assert alike(training.net.parameters())
