"""DistributedOptimizer(quorum=...): rounds that do not wait for late ranks, and are the same on all of them."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from typing import Any

import pytest
import torch
from world import alike, ranks, until

import horoclone.torch as hvd


def network() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def made(model: torch.nn.Module, **how: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return hvd.DistributedOptimizer(plain, model.named_parameters(), **how)


def one_step(model: torch.nn.Module, optimizer: Any, number: int) -> None:
    data = torch.randn(16, 12, generator=torch.Generator().manual_seed(100 * number + hvd.rank()))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(data[:, :8]), data[:, 8:]).backward()
    optimizer.step()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def rounds_until(optimizer: Any, wanted: int) -> int:
    """Those of the other ranks."""
    until(lambda: optimizer._agent.rounds >= wanted, 60, lambda: optimizer._agent.rounds)
    return int(optimizer._agent.rounds)


@ranks(2, 4)
def test_with_everybody_in_the_quorum_it_is_todays_step() -> None:
    ours, theirs = network(), network()
    first, second = made(ours, quorum=1.0), made(theirs)
    for number in range(6):
        one_step(ours, first, number)
        one_step(theirs, second, number)
    first.join()
    assert first.rounds == 6
    assert torch.equal(flat(ours), flat(theirs)), (flat(ours) - flat(theirs)).abs().max()


@ranks(4)
@pytest.mark.parametrize("late", ["drop", "carry"])
def test_parameters_are_equal_at_equal_rounds(late: str) -> None:
    """Whatever ranks are late: the sums of the parameters after each round, on all ranks."""
    model, chance, seen = network(), random.Random(hvd.rank()), {}
    optimizer = made(model, quorum=0.5, late=late, max_lag=5)
    optimizer.register_step_post_hook(
        lambda *_: seen.__setitem__(len(seen), flat(model).double().sum().item())
    )
    while optimizer.rounds < 50:
        if chance.random() < 0.1:
            time.sleep(0.01)
        one_step(model, optimizer, optimizer.rounds)
    optimizer.join()
    assert alike(model.parameters())
    every = hvd.allgather_object(seen)
    assert all(one == every[0] for one in every) and len(every[0]) >= 50


@ranks(4)
def test_a_slow_rank_does_not_hold_up_the_others() -> None:
    """Counted in rounds of the fast ranks while the slow one waits, not in seconds."""
    model = network()
    optimizer = made(model, quorum=0.75, max_lag=1000)
    if hvd.rank() == 3:
        missed = rounds_until(optimizer, 31)
        one_step(model, optimizer, 0)
        assert optimizer.rounds >= missed
    else:
        while optimizer.rounds < 60:
            one_step(model, optimizer, optimizer.rounds)
    optimizer.join()
    assert alike(model.parameters())


@ranks(3)
def test_nobody_is_further_behind_than_max_lag() -> None:
    model = network()
    optimizer = made(model, quorum="solo", late="carry", max_lag=4)
    if hvd.rank() == 2:
        rounds_until(optimizer, 4)
        time.sleep(0.5)
        assert optimizer._agent.rounds == 4
    for number in range(5):
        one_step(model, optimizer, number)
    optimizer.join()
    assert alike(model.parameters())


@ranks(3)
def test_a_rank_without_data_leaves_the_quorum() -> None:
    model = network()
    optimizer = made(model, quorum=1.0)
    for number in range(3 + 2 * hvd.rank()):
        one_step(model, optimizer, number)
    optimizer.join()
    assert optimizer.rounds == 7 and alike(model.parameters())


@ranks(2)
def test_ranks_that_list_parameters_in_another_order_mean_the_same_ones() -> None:
    model = network()
    named = list(model.named_parameters())
    mine = named if hvd.rank() == 0 else named[::-1]
    plain = torch.optim.SGD([p for _, p in mine], lr=0.05)
    optimizer = hvd.DistributedOptimizer(plain, mine, quorum=1.0)
    for number in range(3):
        one_step(model, optimizer, number)
    model[0].bias.requires_grad_(False)  # frozen: it has no share in any round
    frozen = model[0].bias.clone()
    one_step(model, optimizer, 4)
    optimizer.join()
    assert alike(model.parameters()) and torch.equal(frozen, model[0].bias)


@ranks(2)
def test_what_one_rank_freezes_is_updated_on_all_or_none() -> None:
    model = network()
    optimizer = made(model, quorum=1.0)
    one_step(model, optimizer, 0)
    if hvd.rank() == 1:
        model[0].bias.requires_grad_(False)
    before = model[0].bias.detach().clone()
    for number in range(3):
        one_step(model, optimizer, number)
    assert not torch.equal(before, model[0].bias) and alike(model.parameters())
    model[0].bias.requires_grad_(False)
    one_step(model, optimizer, 4)
    before = model[0].bias.detach().clone()
    one_step(model, optimizer, 5)
    optimizer.join()
    assert torch.equal(before, model[0].bias) and alike(model.parameters())


@ranks(2)
def test_another_dtype_on_one_rank_is_named_and_on_all_ranks_it_is_used() -> None:
    """In float64 a step rounds in another way than in float32."""
    model = network()
    for both in (True, False):
        optimizer = made(model, quorum=1.0)
        for number in range(3):
            one_step(model, optimizer, number)
        if both or hvd.rank() == 1:
            model.double()
        optimizer.zero_grad()
        model(torch.ones(1, 8, dtype=model[0].bias.dtype)).sum().backward()
        if both:
            optimizer.step()
            optimizer.join()
        else:
            with pytest.raises(hvd.Mismatch, match="rank 1 has changed dtypes, that of '0.bias' first"):
                optimizer.step()
        model.float()
        assert alike(model.parameters())


@ranks(2)
def test_ranks_with_different_parameters_and_what_begins_to_train_later_are_named() -> None:
    model = torch.nn.Linear(2, 2 + hvd.rank())
    optimizer = made(model, quorum=1.0)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="'bias' is .* on rank 0 and .* on rank 1"):
        optimizer.step()
    model = network()
    model[2].requires_grad_(False)
    optimizer = made(model, quorum=1.0)
    model[2].requires_grad_(True)
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(ValueError, match="'2.weight' was not trained when the optimizer was made"):
        optimizer.step()
    model[2].requires_grad_(False)
    for number in range(3):
        one_step(model, optimizer, number)
    optimizer.join()
    assert optimizer.rounds == 3 and alike(model.parameters())


@ranks(2)
def test_several_optimizers_with_a_quorum_do_not_hear_each_other() -> None:
    """Alike, of another form, and one after the other."""
    for _ in range(2):
        models = [network(), network(), torch.nn.Sequential(torch.nn.Linear(8, 4))]
        reference = network()
        optimizers = [made(model, quorum=1.0) for model in models]
        plain = made(reference)
        for number in range(4):
            for i in range(3):
                one_step(models[i], optimizers[i], number + i)
            one_step(reference, plain, number + 1)
        for optimizer in optimizers:
            optimizer.join()
        assert [optimizer.rounds for optimizer in optimizers] == [4, 4, 4]
        assert torch.equal(flat(models[1]), flat(reference))
        assert all(alike(model.parameters()) for model in models)


@ranks(2)
def test_hooks_of_the_step_see_averages() -> None:
    model, seen = network(), []
    optimizer = made(model, quorum=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.clone()))
    one_step(model, optimizer, 0)
    optimizer.join()
    assert len(seen) == 1 and alike(seen)


def trained_until_death() -> None:
    from worker_pool import say

    hvd.init()
    model = network()
    optimizer = made(model, quorum=0.5)
    for number in range(100_000):
        if number == 20 and hvd.rank() == 1:
            say(dies=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            one_step(model, optimizer, number)
        except hvd.PeerLost as error:
            say(error=str(error))
            return


def test_a_lost_rank_is_an_error_on_the_others(torch_worker_pool: Any) -> None:
    team = torch_worker_pool(trained_until_death, 3)
    codes = team.wait(30)
    assert codes == [0, -signal.SIGKILL, 0], team.outputs()
    died = team.said(1, "dies")[0]["at"]
    for rank in (0, 2):
        (told,) = team.said(rank, "error")
        assert "rank 1" in told["error"] and told["at"] - died < 10, told


@ranks(2)
def test_what_cannot_be_is_refused() -> None:
    def refused(*words: str, **how: Any) -> None:
        with pytest.raises(ValueError) as info:
            made(network(), **how)
        assert all(word in str(info.value) for word in words), info.value

    refused("quorum", quorum=0)
    refused("quorum", quorum="most")
    refused("late", quorum=1.0, late="never")
    refused("max_lag", quorum=1.0, max_lag=0)
    model = network()
    refused("quorum", "cross_barrier", quorum=1.0, cross_barrier=model)
    refused("quorum", "shard_optimizer_state", quorum=1.0, shard_optimizer_state=True)
    refused("quorum", "Average", quorum=1.0, op=hvd.Adasum)
    refused("quorum", "compression", quorum=1.0, compression=hvd.Compression.int8)
    refused("quorum", "backward_passes_per_step", quorum=1.0, backward_passes_per_step=2)
    with pytest.warns(UserWarning, match="two thirds") as warned:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), quorum="solo")
    assert warned[0].filename == __file__, "it names the line that calls DistributedOptimizer"
    with pytest.raises(ValueError, match=r"elastic.*quorum"):
        hvd.elastic.TorchState(model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"DiLoCo.*DistributedOptimizer"):
        hvd.DiLoCo([model], optimizer, torch.optim.SGD(model.parameters(), lr=1.0), 4)
    optimizer.join()
