"""What real models do to gradients: unused, shared, checkpointed, frozen, sparse; hooks that raise; odd orders."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from world import ranks

import horoclone.torch as hvd

Model = torch.nn.Module


def wrapped(model: Model, rate: float = 0.1, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), rate), model.named_parameters(), **options
    )


def layers(count: int = 3, seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(count)))


def inputs(step: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (hvd.rank() if rank is None else rank)
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def same_on_every_rank(model: Model) -> bool:
    flat = torch.cat([p.detach().flatten().double() for p in model.parameters()]).unsqueeze(0)
    everybody = hvd.allgather(flat)
    return all(torch.equal(row, everybody[0]) for row in everybody)


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
    assert same_on_every_rank(model)
    return optimizer


@ranks(1, 3)
def test_unused_parameters_get_zeros() -> None:
    check_steps(layers(), lambda model, x: model[0](x).square().mean())


@ranks(3)
def test_parameters_used_on_some_ranks_only() -> None:
    model = layers(3)
    optimizer = wrapped(model)
    for step in range(4):
        optimizer.zero_grad()
        used = [layer for i, layer in enumerate(model) if i != (hvd.rank() + step) % 3]
        loss = sum(layer(inputs(step)).square().mean() for layer in used)
        loss.backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
    assert same_on_every_rank(model)


@ranks(2)
def test_shared_parameters() -> None:
    model = layers(2)
    model[1].weight = model[0].weight
    check_steps(model, lambda m, x: m(m(x)).square().mean())


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
def test_compiled_models() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 6))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = wrapped(model)
    plain = copy.deepcopy(model)
    for step in range(4):
        want = average_of(
            lambda x: list(torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))), step
        )
        optimizer.zero_grad()
        compiled(inputs(step)).square().mean().backward()
        optimizer.synchronize()
        for parameter, expected in zip(model.parameters(), want, strict=True):
            assert torch.allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.load_state_dict(model.state_dict())
    assert same_on_every_rank(model)


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
        try:
            model(inputs(9)).square().mean().backward()
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("the hook's error was swallowed")
        optimizer.synchronize()  # completes what was under way, on every rank
    handle.remove()
    for number in range(3):
        step(number)
    assert same_on_every_rank(model)


@ranks(2)
def test_parameters_frozen_and_unfrozen_later() -> None:
    model = layers(3)
    model[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1), model.named_parameters()
    )

    def steps(first: int, count: int = 3) -> None:
        for number in range(first, first + count):
            optimizer.zero_grad()
            model(inputs(number)).square().mean().backward()
            optimizer.step()

    steps(0)
    frozen = model[2].weight.clone()
    assert torch.equal(frozen, layers(3)[2].weight)
    model[0].requires_grad_(False)
    kept = model[0].weight.clone()
    steps(3)
    assert torch.equal(model[0].weight, kept), "a frozen parameter moved"
    model[2].requires_grad_(True)
    steps(6)
    assert not torch.equal(model[2].weight, frozen), "a parameter that was unfrozen did not learn"
    model[0].requires_grad_(True)
    steps(9)
    assert not torch.equal(model[0].weight, kept)
    assert same_on_every_rank(model)


class Words(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(20, 6, sparse=sparse)
        self.head = torch.nn.Linear(6, 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words)).square().mean()


@ranks(3)
def test_sparse_gradients_by_gathering_and_as_dense() -> None:
    results = []
    for sparse, options in ((False, {}), (True, {}), (True, {"sparse_as_dense": True})):
        model = Words(sparse)
        optimizer = wrapped(model, **options)
        for step in range(4):
            chance = torch.Generator().manual_seed(10 * step + hvd.rank())
            optimizer.zero_grad()
            model(torch.randint(20, (3, 5), generator=chance)).backward()
            optimizer.step()
            assert model.table.weight.grad.is_sparse == sparse
        assert same_on_every_rank(model)
        results.append(model.table.weight.detach().clone())
    assert torch.allclose(results[0], results[1], atol=1e-6) and torch.allclose(
        results[0], results[2], atol=1e-6
    )


@ranks(2)
def test_a_sparse_table_that_one_rank_does_not_use() -> None:
    model = Words(True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam([model.table.weight]), [("table", model.table.weight)]
    )
    for step in range(4):
        optimizer.zero_grad()
        if hvd.rank() != step % 2:
            F.embedding(torch.tensor([step, 7]), model.table.weight, sparse=True).sum().backward()
        optimizer.step()
    assert same_on_every_rank(model.table)


@ranks(2)
def test_gradients_set_by_hand() -> None:
    model = layers(1)
    optimizer = wrapped(model, rate=1.0)
    for _ in range(3):
        before = model[0].bias.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(hvd.rank()))
        optimizer.step()
        mean = sum(range(hvd.size())) / hvd.size()
        assert torch.allclose(model[0].bias, before - mean)


@ranks(2)
def test_gradients_lie_in_one_shared_bucket_after_the_first_steps() -> None:
    model = layers(3)
    optimizer = wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    grads = [p.grad for p in model.parameters()]
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1
    assert all(g.data_ptr() % 64 == 0 for g in grads)


# --- steps out of turn ---------------------------------------------------------------------------------------------


def raises(kind: type[BaseException], words: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


@ranks(2)
def test_too_many_backward_passes() -> None:
    model = layers(1)
    optimizer = wrapped(model)
    for step in range(4):  # the first step watches, the later ones use buckets: the same answer
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        raises(
            AssertionError,
            "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
            "backward_passes_per_step to accumulate gradients locally.",
            lambda step=step: model(inputs(step)).square().mean().backward(),
        )
        optimizer.step()  # on gradients that autograd wrote to while they were reduced: of no use, but no hang
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    assert same_on_every_rank(model)


@ranks(2)
def test_zero_grad_between_backward_and_step() -> None:
    model = layers(1)
    optimizer = wrapped(model, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        raises(AssertionError, "but before optimizer.step() or optimizer.synchronize()", optimizer.zero_grad)
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
    assert same_on_every_rank(model)


@ranks(2)
def test_clipping_between_synchronize_and_step() -> None:
    model = layers(2)
    optimizer = wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        (model(inputs(step)).square().mean() * 100).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert len(set(hvd.allgather(norm.view(1)).tolist())) == 1 and norm > 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
    assert same_on_every_rank(model)


@ranks(2)
def test_arguments_of_the_optimizer_are_checked() -> None:
    model = layers(2)
    named = list(model.named_parameters())
    make = lambda **options: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)  # noqa: E731
    raises(ValueError, "must be unique", lambda: make(named_parameters=[("same", p) for _, p in named]))
    raises(ValueError, "were not named", lambda: make(named_parameters=named[:1]))
    raises(ValueError, "sequence of tuples", lambda: make(named_parameters=[p for _, p in named]))
    raises(
        ValueError,
        "not supported with op != Average",
        lambda: make(gradient_predivide_factor=2.0, op=hvd.Sum),
    )
    raises(ValueError, "at least 1", lambda: make(backward_passes_per_step=0))
    raises(ValueError, "groups should be", lambda: make(groups="all"))
    raises(ValueError, "groups should be", lambda: make(groups=-1))
    raises(ValueError, "must consist of torch.Tensor", lambda: make(groups=[[1]]))
    raises(ValueError, "only appear once", lambda: make(groups=[[named[0][1]], [named[0][1]]]))
    raises(ValueError, "already", lambda: hvd.DistributedOptimizer(make()))


@ranks(2)
def test_different_models_are_named_by_parameter_and_rank() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4 + hvd.rank()))
    optimizer = wrapped(model)
    model(inputs(0)).square().mean().backward()
    raises(ValueError, "'0.bias'", optimizer.step)
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
    raises(
        AssertionError,
        "create_graph=True",
        lambda: model(inputs(5)).pow(3).mean().backward(create_graph=True),
    )
