"""What real models do to gradients: unused, checkpointed, sparse, set by hand; hooks that raise; odd orders."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from world import alike, ranks
from world import wrapped_sgd as wrapped

import horoclone.torch as hvd

Model = torch.nn.Module


def layers(count: int = 3, seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(count)))


def inputs(step: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (hvd.rank() if rank is None else rank)
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def average_of(gradient_of: Any, step: int) -> list[torch.Tensor]:
    """Mean over the ranks of gradient_of(inputs), computed here."""
    parts = [gradient_of(inputs(step, rank)) for rank in range(hvd.size())]
    return [torch.stack(each).mean(0) for each in zip(*parts, strict=True)]


def check_steps(model: Model, forward: Any, steps: int = 4, passes: int = 1, **options: Any) -> Any:
    """Steps of SGD; before each, the gradients are compared with the mean over all ranks' inputs."""
    optimizer = wrapped(model, backward_passes_per_step=passes, **options)
    for step in range(steps):
        twin = copy.deepcopy(model)

        def gradients(x: torch.Tensor, twin: Model = twin) -> list[torch.Tensor]:
            twin.zero_grad()
            for _ in range(passes):
                forward(twin, x).backward()
            return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in twin.parameters()]

        expected = average_of(gradients, step)
        optimizer.zero_grad()
        for _ in range(passes):
            forward(model, inputs(step)).backward()
        optimizer.synchronize()
        for (name, parameter), want in zip(model.named_parameters(), expected, strict=True):
            assert torch.allclose(parameter.grad, want, rtol=1e-5, atol=1e-6), (
                step,
                name,
                parameter.grad,
                want,
            )
        with optimizer.skip_synchronize():
            optimizer.step()
    assert alike(model.parameters())
    return optimizer


@ranks(1, 3)
def test_unused_parameters_get_zeros() -> None:
    check_steps(layers(), lambda model, x: model[0](x).square().mean())


@ranks(2)
def test_checkpointing_of_both_kinds_also_with_shared_layers() -> None:
    for reentrant in (False, True):

        def once(m: Model, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for layer in m:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.square().mean()

        def shared(m: Model, x: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for layer in (m[0], m[1], m[0], m[2], m[0]):
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.square().mean()

        check_steps(layers(), once)
        check_steps(layers(), shared)
        check_steps(layers(), shared, passes=2)


@ranks(2)
def test_a_hook_that_raises_can_be_survived() -> None:
    model = layers()
    optimizer = wrapped(model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(inputs(number)).square().mean().backward()
        optimizer.step()

    for number in range(3):
        step(number)

    def burst(_: torch.Tensor) -> None:
        raise ZeroDivisionError("in a user's hook")

    handle = model[0].weight.register_hook(burst)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(inputs(9)).square().mean().backward()
        optimizer.synchronize()  # completes what was under way, on every rank
    handle.remove()
    for number in range(3):
        step(number)
    assert alike(model.parameters())


@ranks(2)
def test_a_hook_that_returns_something_is_refused_in_torchs_words() -> None:
    model = layers()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1.0, 1.0))
    optimizer = wrapped(model)
    with pytest.raises(RuntimeError, match="should return None"):
        model(inputs(0)).square().mean().backward()
    optimizer.synchronize()
    handle.remove()
    optimizer.zero_grad()
    model(inputs(1)).square().mean().backward()
    optimizer.step()
    assert alike(model.parameters())


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"shard_optimizer_state": True}])
def test_what_a_later_hook_does_to_a_gradient_is_reduced(options: dict[str, Any]) -> None:
    def triple(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(3.0)

    model = layers()
    optimizer = wrapped(model, **options)
    handles = [p.register_post_accumulate_grad_hook(triple) for p in model.parameters()]
    for step in range(4):
        twin = copy.deepcopy(model)

        def gradients(x: torch.Tensor, twin: Model = twin) -> list[torch.Tensor]:
            return [*torch.autograd.grad(3.0 * twin(x).square().mean(), list(twin.parameters()))]

        expected = average_of(gradients, step)
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        for after, before, want in zip(model.parameters(), twin.parameters(), expected, strict=True):
            assert torch.allclose(before - after, 0.1 * want, rtol=1e-4, atol=1e-6), step
    for handle in handles:
        handle.remove()
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node, parameter in zip(nodes, model.parameters(), strict=True):
        node.register_hook(lambda *_, parameter=parameter: triple(parameter))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"weight' was changed by a hook while it was being reduced"):
        model(inputs(9)).square().mean().backward()


@ranks(2)
def test_a_sparse_table_that_one_rank_does_not_use() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(20, 6, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([table.weight]), table.named_parameters())
    for step in range(4):
        optimizer.zero_grad()
        if hvd.rank() != step % 2:
            table(torch.tensor([step, 7])).sum().backward()
        optimizer.step()
    assert alike(table.parameters())


# --- steps out of turn ---------------------------------------------------------------------------------------------


@ranks(2)
def test_too_many_backward_passes() -> None:
    model = layers(1)
    optimizer = wrapped(model)
    for step in range(4):  # the first step watches, the later ones use buckets: the same answer
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        told = (
            "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
            "backward_passes_per_step to accumulate gradients locally."
        )
        with pytest.raises(AssertionError, match=re.escape(told)):
            model(inputs(step)).square().mean().backward()
        optimizer.step()  # on gradients that autograd wrote to while they were reduced: of no use, but no hang
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    assert alike(model.parameters())


@ranks(2)
def test_zero_grad_between_backward_and_step() -> None:
    model = layers(1)
    optimizer = wrapped(model, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        with pytest.raises(
            AssertionError, match=r"but before optimizer\.step\(\) or optimizer\.synchronize\(\)"
        ):
            optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.synchronize()
        optimizer.zero_grad()  # allowed after synchronize
        optimizer.step()


@ranks(1, 2)
def test_step_after_synchronize_without_skip_warns_and_does_not_reduce_twice() -> None:
    model = layers(1)
    optimizer = wrapped(model, rate=1.0, op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        model(inputs(step)).square().mean().backward()
        optimizer.synchronize()
        gradient = model[0].weight.grad.clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert any(
            "optimizer.step() called without optimizer.skip_synchronize()" in str(w.message) for w in caught
        )
        assert torch.allclose(model[0].weight, before - gradient)
    assert alike(model.parameters())


@ranks(2)
def test_arguments_of_the_optimizer_are_checked() -> None:
    model = layers(2)
    named = list(model.named_parameters())
    weight = named[0][1]

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)

    for options, words in (
        ({"named_parameters": [("same", p) for _, p in named]}, "must be unique"),
        ({"named_parameters": named[:1]}, "were not named"),
        ({"named_parameters": [p for _, p in named]}, "sequence of tuples"),
        ({"named_parameters": list(enumerate(model.parameters()))}, "sequence of tuples"),
        ({"named_parameters": [(None, p) for _, p in named]}, "sequence of tuples"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": "all"}, "groups should be"),
        ({"groups": -1}, "groups should be"),
        ({"groups": [[1]]}, r"must consist of torch\.Tensor"),
        ({"groups": [[weight], [weight]]}, "only appear once"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**options)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(make())


@ranks(2)
def test_two_optimizers_do_not_sum_a_gradient_twice() -> None:
    def gradient(optimizer: Any, step: int) -> torch.Tensor:
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        return model[0].weight.grad.clone()

    for op in (hvd.Average, hvd.Sum):
        model = layers(1)
        first = wrapped(model, 0.0, op=op)
        once = [gradient(first, step) for step in range(3)]
        held = [first]  # by nobody but itself, once `first` is another one
        held.append(held)
        del held
        first = wrapped(model, 0.0, op=op)
        assert torch.allclose(gradient(first, 2), once[2])
        second = wrapped(model, 0.0, op=op)
        copied = copy.copy(second)
        assert all(torch.allclose(gradient(second, step), once[step]) for step in range(3))
        for other in (first, copied):
            with pytest.raises(
                ValueError, match=r"newer hvd\.DistributedOptimizer has taken over '0\.weight'"
            ):
                other.step()
        del second, copied, other
        assert all(torch.allclose(gradient(first, step), once[step]) for step in range(3))


@ranks(2)
def test_two_optimizers_take_turns_with_layers_that_are_frozen_for_the_other() -> None:
    """Of whom each knows parameters of the other, and of a lazy one that nobody trains; gradients go on being reduced
    while backward() runs."""
    model = layers(2)
    model.later = torch.nn.LazyLinear(3)
    for parameter in model.later.parameters():
        parameter.requires_grad = False
    optimizers = []
    for layer in (0, 1):
        model[layer].requires_grad_(True)
        model[1 - layer].requires_grad_(False)
        optimizers.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)))
    sent = []
    for step in range(6):
        turn = step % 2
        model[turn].requires_grad_(True)
        model[1 - turn].requires_grad_(False)
        weights = [model[layer].weight.detach().clone() for layer in (0, 1)]
        optimizers[turn].zero_grad()
        model[1](model[0](inputs(step))).square().mean().backward()
        sent += [state.arrived for state in optimizers[turn]._reducer.states if step > 3]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizers[turn].step()
        assert not torch.equal(model[turn].weight, weights[turn])
        assert torch.equal(model[1 - turn].weight, weights[1 - turn])
    assert alike([*model[0].parameters(), *model[1].parameters()]) and sent and all(sent)


@ranks(2)
def test_different_models_are_named_by_parameter_and_rank() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4 + hvd.rank()))
    optimizer = wrapped(model)
    model(inputs(0)).square().mean().backward()
    with pytest.raises(ValueError, match=r"'0\.bias'"):
        optimizer.step()
    hvd.barrier()  # the runtime is still usable


@ranks(2)
def test_create_graph_is_refused() -> None:
    model = layers(1)
    optimizer = wrapped(model)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match="create_graph=True"):
        model(inputs(5)).pow(3).mean().backward(create_graph=True)
