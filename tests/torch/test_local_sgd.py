"""LocalSGD and DiLoCo: equal to what is computed by hand, with movements under way, after a restart, and refused."""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import pytest
import torch
from world import alike, ranks

import horoclone.torch as hvd


def network() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        data = torch.randn(16, 12, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(data[:, :8]), data[:, 8:]).backward()
        optimizer.step()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def nesterov(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


@ranks(4)
def test_local_sgd_in_every_step_is_averaging_bit_by_bit() -> None:
    ours, theirs = network(), network()
    first, second = adam(ours), adam(theirs)
    with hvd.LocalSGD(ours, first, sync_every=1):
        train(ours, first, range(5))
    for step in range(5):
        train(theirs, second, range(step, step + 1))
        for i, p in enumerate(theirs.parameters()):
            p.data.copy_(hvd.allreduce(p.data, name=f"by hand {i}", op=hvd.Average))
    assert torch.equal(flat(ours), flat(theirs)) and alike(ours.parameters())


def by_hand(
    model: torch.nn.Sequential, fragments: Any, every: int, delay: int, alpha: float, steps: int
) -> None:
    """Streaming DiLoCo, written down once more, without anything under way."""
    inner, outers = adam(model), [nesterov(f) for f in fragments]
    originals = [flat(f) for f in fragments]
    apart, turn, sent = every // len(fragments), 0, None
    for step in range(1, steps + 1):
        train(model, inner, range(step - 1, step))
        fragment, original = fragments[turn], originals[turn]
        if step % apart == (apart - delay) % apart:
            sent = hvd.allreduce(original - flat(fragment), name="by hand", op=hvd.Average)
        if step % apart == 0:
            mine, grads = flat(fragment), [p.grad for p in fragment.parameters()]
            torch.nn.utils.vector_to_parameters(original.clone(), fragment.parameters())
            sizes = [p.numel() for p in fragment.parameters()]
            for p, part in zip(fragment.parameters(), sent.split(sizes), strict=True):
                p.grad = part.view_as(p).clone()
            outers[turn].step()
            originals[turn] = flat(fragment)
            for p, grad in zip(fragment.parameters(), grads, strict=True):
                p.grad = grad
            if alpha:
                mixed = originals[turn].lerp(mine, alpha)
                torch.nn.utils.vector_to_parameters(mixed, fragment.parameters())
            turn = (turn + 1) % len(fragments)


@ranks(2)
@pytest.mark.parametrize(
    ("parts", "every", "delay", "alpha"), [(1, 4, 0, 0.0), (2, 8, 2, 0.5), (2, 4, 1, 0.25)]
)
def test_diloco_is_what_its_paper_says(parts: int, every: int, delay: int, alpha: float) -> None:
    ours, theirs = network(), network()
    pieces = lambda m: [m] if parts == 1 else [m[0], m[2]]  # noqa: E731
    inner = adam(ours)
    how = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    with hvd.DiLoCo(pieces(ours), inner, nesterov(ours), every, **how):
        train(ours, inner, range(18))
    by_hand(theirs, pieces(theirs), every, delay, alpha, 18)
    assert torch.equal(flat(ours), flat(theirs)), (flat(ours) - flat(theirs)).abs().max()


@ranks(2)
@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
def test_a_restart_in_the_middle_changes_nothing(compression: str) -> None:
    """Also while a fragment is under way: step 7 of 8 with a delay of 2."""

    def made() -> tuple[Any, Any, Any]:
        model = network()
        inner = adam(model)
        chosen = getattr(hvd.Compression, compression)
        more = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5, "compression": chosen}
        return model, inner, hvd.DiLoCo([model[0], model[2]], inner, nesterov(model), 8, **more)

    first, inner, diloco = made()
    with diloco:
        train(first, inner, range(15))
        saved = copy.deepcopy([x.state_dict() for x in (first, inner, diloco)])
        assert saved[2]["fragments"][1]["arrived"] is not None
        train(first, inner, range(15, 24))
    second, inner, diloco = made()
    for x, state in zip((second, inner, diloco), saved, strict=True):
        x.load_state_dict(state)
    with diloco:
        train(second, inner, range(15, 24))
    assert torch.equal(flat(first), flat(second)), (flat(first) - flat(second)).abs().max()


@ranks(2)
def test_a_fragment_is_under_way_while_steps_go_on() -> None:
    """A late rank is waited for at the end of a fragment's delay, not at its beginning."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with hvd.DiLoCo([model], inner, nesterov(model), 4, fragment_sync_delay=3):
        if hvd.rank() == 1:
            hvd.recv(src=0)
            began = time.monotonic()
        train(model, inner, range(3))
        if hvd.rank() == 0:
            hvd.send(torch.ones(1), 1)  # the late rank begins its first step now
        train(model, inner, range(3, 4))
    if hvd.rank() == 1:
        hvd.send(torch.tensor(began, dtype=torch.float64), 0)
    else:
        assert time.monotonic() > hvd.recv(src=1).item(), "the last step waited for the late rank"


@ranks(2)
def test_ranks_begin_with_the_same_parameters() -> None:
    model = network()
    for p in model.parameters():
        p.data += hvd.rank()
    with hvd.DiLoCo([model], adam(model), nesterov(model), 4):
        assert alike(model.parameters())


@ranks(2)
def test_parameters_of_any_layout_and_those_that_are_unfrozen_later_are_averaged() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 3))
    model.to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = hvd.broadcast_object([p.detach().clone() for p in model.parameters()], 0)
    with torch.no_grad():
        for p, value in zip(model.parameters(), before, strict=True):
            p.copy_(value if not p.requires_grad or hvd.rank() == 0 else value + 9)
    with hvd.LocalSGD(model, optimizer, sync_every=2):
        for step in range(4):
            model[0].requires_grad_(step >= 2)
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + hvd.rank()) if p.requires_grad else None
            optimizer.step()
    for p, value, steps in zip(model.parameters(), before, (2, 2, 4, 4), strict=True):
        assert torch.allclose(p, value - 1.5 * steps)
    assert alike(model.parameters())


@ranks(2)
def test_what_cannot_be_is_refused() -> None:
    model = network()
    inner, outer = adam(model), nesterov(model)

    def refused(*words: str, call: Any) -> None:
        with pytest.raises(ValueError) as info:
            call()
        assert all(word in str(info.value) for word in words), info.value

    refused("sync_every", "fragments", call=lambda: hvd.DiLoCo([model[0], model[2]], inner, outer, 3))
    refused("fragment_sync_delay", call=lambda: hvd.DiLoCo([model], inner, outer, 4, fragment_sync_delay=4))
    refused("alpha", call=lambda: hvd.DiLoCo([model], inner, outer, 4, fragment_update_alpha=2))
    refused("in no fragment", call=lambda: hvd.DiLoCo([model[0]], inner, outer, 4))
    refused("two fragments", call=lambda: hvd.DiLoCo([model, model], inner, outer, 4))
    refused("outer optimizers", call=lambda: hvd.DiLoCo([model], inner, [outer, outer], 4))
    refused("sync_every", call=lambda: hvd.LocalSGD(model, inner, 0))

    def unfreeze() -> None:
        model[0].requires_grad_(False)
        with hvd.DiLoCo([model], inner, outer, 1):
            model[0].requires_grad_(True)
            train(model, inner, range(1))

    refused("in no fragment", "unfreezing", call=unfreeze)
    averaged = hvd.DistributedOptimizer(adam(model), model.named_parameters())
    refused("DiLoCo", "DistributedOptimizer", call=lambda: hvd.DiLoCo([model], averaged, outer, 4))
    refused("LocalSGD", "DistributedOptimizer", call=lambda: hvd.LocalSGD(model, averaged, 4))


@ranks(4, env={"HOROCLONE_DYNAMIC_PROCESS_SETS": "1"})
def test_averaged_gradients_within_hosts_and_rare_averages_between_them() -> None:
    """Two "hosts" of two ranks: gradients are averaged inside, movements between the ranks of the same number."""
    inside = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    across = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    model = network()
    own = inside[hvd.rank() // 2]
    inner = hvd.DistributedOptimizer(adam(model), model.named_parameters(), process_set=own)
    with hvd.DiLoCo([model], inner, nesterov(model), 3, process_set=across[hvd.rank() % 2]):
        train(model, inner, range(4))
        seen = hvd.allgather(flat(model)[None], name="seen")
        assert (
            torch.equal(seen[0], seen[1])
            and torch.equal(seen[2], seen[3])
            and not torch.equal(seen[0], seen[2])
        )
        train(model, inner, range(4, 6))
    assert alike(model.parameters())


def loads_it() -> None:
    from worker_pool import say

    say(before="horoclone.torch.local_sgd" in sys.modules, is_there=callable(hvd.DiLoCo))


def test_it_is_loaded_only_where_it_is_used(torch_worker_pool: Any) -> None:
    team = torch_worker_pool(loads_it, 1)
    assert team.wait(60) == [0], team.outputs()
    (fact,) = team.said(0, "before")
    assert fact["is_there"] and not fact["before"]
