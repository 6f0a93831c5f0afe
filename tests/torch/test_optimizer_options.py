"""Options of DistributedOptimizer: local and unused parameters, threads, orders, layouts; against one float64 process."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from world import alike, ranks, wrapped_sgd

import horoclone.torch as hvd

Model = torch.nn.Module


def layers(count: int = 3, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(count))).to(dtype)


def inputs(step: int, rank: int | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    seed = 100 * step + (hvd.rank() if rank is None else rank)
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


sgd = functools.partial(wrapped_sgd, momentum=0.9)


# --- local parameters ----------------------------------------------------------------------------------------------


class Routed(torch.nn.Module):
    """A trunk that all ranks share and a head of this rank's own, of a shape of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = layers(2)
        torch.manual_seed(50 + hvd.rank())
        self.head = torch.nn.Linear(6, 2 + hvd.rank()).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x)).square().mean()


def check_local(build: Callable[[Routed], Any], factor: float) -> None:
    model = Routed()
    optimizer = build(model)
    for step in range(4):
        twin = copy.deepcopy(model)
        twin(inputs(step)).backward()
        optimizer.zero_grad()
        model(inputs(step)).backward()
        optimizer.synchronize()
        for mine, plain in zip(model.head.parameters(), twin.head.parameters(), strict=True):
            assert torch.allclose(mine.grad, plain.grad * factor, rtol=1e-12)
        for mine, plain in zip(model.trunk.parameters(), twin.trunk.parameters(), strict=True):
            mean = hvd.allreduce(plain.grad)
            assert torch.allclose(mine.grad, mean, rtol=1e-12)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert alike(model.trunk.parameters())


@ranks(3)
def test_local_parameters_are_not_reduced_and_are_divided_by_the_size() -> None:
    check_local(lambda model: sgd(model, local_parameters=model.head), 1 / hvd.size())
    check_local(
        lambda model: sgd(model, local_parameters=list(model.head.parameters()), scale_local_gradients=False),
        1.0,
    )


@ranks(2)
def test_parameters_can_be_made_local_later() -> None:
    def build(model: Routed) -> Any:
        optimizer = sgd(model)
        optimizer.register_local(model.head)
        return optimizer

    check_local(build, 1 / hvd.size())
    model = layers(2)
    optimizer = sgd(model)
    for step in range(6):
        if step == 3:  # after the buckets have been formed
            optimizer.register_local(model[1])
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        if step == 4:
            with pytest.raises(RuntimeError, match="between backward"):
                optimizer.register_local(model[0])
        optimizer.step()
    assert alike(model[0].parameters()) and not alike(model[1].parameters())
    with pytest.raises(ValueError, match="not str"):
        optimizer.register_local("head")


@ranks(2)
def test_a_step_on_local_gradients_alone() -> None:
    model = layers(2)
    optimizer = sgd(model, local_parameters=[model[1]])
    for step in range(3):
        optimizer.zero_grad()
        x = inputs(step)
        model[1](x).square().mean().backward()
        expected = torch.autograd.grad(model[1](x).square().mean(), list(model[1].parameters()))
        optimizer.step()
        for parameter, gradient in zip(model[1].parameters(), expected, strict=True):
            assert torch.allclose(parameter.grad, gradient / hvd.size(), rtol=1e-12)


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_local_parameters_beside_a_scalar_one_a_scaler_and_a_rank_outside_of_the_process_set() -> None:
    """After a step that was left out, too, when a gradient on one rank was not finite."""

    class Scaled(torch.nn.Sequential):
        def __init__(self, *layers: torch.nn.Module) -> None:
            super().__init__(*layers)
            self.factor = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * super().forward(x)

    model = Scaled(*layers(3))
    optimizer = sgd(model, local_parameters=model[2], process_set=hvd.add_process_set([0, 1]))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=100)
    for step in range(4):
        if step == 2:
            optimizer.register_local(model[1])
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        bad = float("inf") if step == 1 and hvd.rank() == 1 else 1.0
        scaler.scale(model(inputs(step)).square().mean() * bad).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model[0].weight) == (step == 1 and hvd.rank() < 2)
    weights = [hvd.allgather(model[layer].weight.detach()[None].contiguous()) for layer in range(3)]
    assert torch.equal(weights[0][0], weights[0][1]) and not torch.equal(weights[0][0], weights[0][2])
    assert not any(torch.equal(weight[0], weight[1]) for weight in weights[1:])


# --- unused parameters ---------------------------------------------------------------------------------------------


@ranks(1, 3)
def test_gradients_that_no_rank_has_stay_none_on_request() -> None:
    model = layers(4)
    optimizer = sgd(model, unused_as_none=True)
    for step in range(6):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        used = [0, 1 + step % 2] + ([3] if hvd.rank() == 0 and step == 4 else [])  # 3: on one rank, once
        sum(model[i](inputs(step)).square().mean() for i in used).backward()
        optimizer.step()
        everywhere = {0, 1 + step % 2} | ({3} if step == 4 else set())
        for i, layer in enumerate(model):
            for parameter in layer.parameters():
                assert (parameter.grad is not None) == (i in everywhere), (step, i)
        # A parameter without a gradient does not move, though it has momentum.
        moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
        assert moved == [i in everywhere for i in range(4) for _ in range(2)], (step, moved)
    assert alike(model.parameters())


# --- orders and threads --------------------------------------------------------------------------------------------


@ranks(3)
def test_hooks_that_fire_in_another_order_on_every_rank_and_step() -> None:
    model = layers(5)
    reference = copy.deepcopy(model)
    optimizer, plain = sgd(model, groups=3), torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    for step in range(6):
        order = torch.randperm(5, generator=torch.Generator().manual_seed(31 * step + hvd.rank())).tolist()
        optimizer.zero_grad()
        for i in order:
            model[i](inputs(step)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(hvd.size()):
            (sum(l(inputs(step, rank)).square().mean() for l in reference) / hvd.size()).backward()  # noqa: E741
        plain.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-10)
    assert alike(model.parameters())


@ranks(2)
def test_backward_in_several_threads_of_one_optimizer() -> None:
    model = layers(12)
    reference = copy.deepcopy(model)
    optimizer, plain = sgd(model), torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)

    def backward(part: int, step: int) -> None:
        for layer in model[3 * part : 3 * part + 3]:
            layer(inputs(step)).square().mean().backward()

    for step in range(20):
        optimizer.zero_grad()
        threads = [threading.Thread(target=backward, args=(part, step)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
        plain.zero_grad()
        for rank in range(hvd.size()):
            (sum(l(inputs(step, rank)).square().mean() for l in reference) / hvd.size()).backward()  # noqa: E741
        plain.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-8)
    assert alike(model.parameters())


@ranks(2)
def test_post_accumulate_hooks_of_the_users_run_before_ours_when_they_were_first() -> None:
    model = layers(2)

    def clip(parameter: torch.Tensor) -> None:  # each gradient as it comes
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    optimizer = sgd(model)
    for step in range(4):
        twin = layers(2)
        twin.load_state_dict(model.state_dict())
        twin(inputs(step)).square().mean().backward()
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.synchronize()
        for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
            mean = hvd.allreduce(plain.grad.clamp(-0.01, 0.01))
            assert torch.allclose(mine.grad, mean, rtol=1e-12)
        with optimizer.skip_synchronize():
            optimizer.step()


# --- layouts and sparse gradients ----------------------------------------------------------------------------------


@ranks(2)
def test_channels_last_gradients_keep_their_layout_and_values() -> None:
    for format_of_gradient in (torch.channels_last, torch.contiguous_format):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        optimizer = sgd(model)
        for step in range(3):
            chance = torch.Generator().manual_seed(10 * step + hvd.rank())
            gradient = torch.randn(4, 3, 3, 3, generator=chance).double()
            optimizer.zero_grad()
            model.weight.grad = gradient.contiguous(memory_format=format_of_gradient)
            model.bias.grad = torch.zeros(4).double()
            optimizer.synchronize()
            assert torch.allclose(model.weight.grad, hvd.allreduce(gradient), rtol=1e-12)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        assert alike(model.parameters())


@ranks(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_sparse_gradients_in_a_process_set_equal_one_process_with_all_words() -> None:
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        for sparse, options in ((True, {}), (True, {"sparse_as_dense": True}), (False, {})):
            torch.manual_seed(0)
            table = torch.nn.Embedding(20, 4, sparse=sparse).double()
            reference = copy.deepcopy(table)
            optimizer = wrapped_sgd(table, 0.5, process_set=pair, **options)
            for step in range(4):
                optimizer.zero_grad()
                reference.zero_grad()
                words = {
                    r: torch.randint(20, (7,), generator=torch.Generator().manual_seed(step * 10 + r))
                    for r in (0, 2)
                }
                table(words[hvd.rank()]).square().sum().backward()
                optimizer.step()
                assert table.weight.grad.is_sparse == sparse
                (sum(F.embedding(w, reference.weight).square().sum() for w in words.values()) / 2).backward()
                with torch.no_grad():
                    reference.weight -= (
                        0.5 * reference.weight.grad.to_dense()
                        if reference.weight.grad.is_sparse
                        else 0.5 * reference.weight.grad
                    )
            assert torch.allclose(table.weight, reference.weight, rtol=1e-10)
    hvd.barrier()
    hvd.remove_process_set(pair)


@ranks(2)
def test_a_group_is_one_reduction_and_the_rest_fills_buckets() -> None:
    model = layers(4)
    parameters = list(model.parameters())
    groups = [[parameters[0], parameters[5]], [parameters[6]]]
    optimizer = sgd(model, groups=groups)
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    place = {p: p.grad.untyped_storage().data_ptr() for p in parameters}  # a bucket's memory
    rest = [p for p in parameters if not any(p is q for group in groups for q in group)]
    buckets = [{place[p] for p in part} for part in (*groups, rest)]
    assert all(p.grad.data_ptr() % 64 == 0 for p in parameters)
    assert [len(bucket) for bucket in buckets] == [1, 1, 1] and len(set.union(*buckets)) == 3
    assert alike(model.parameters())
