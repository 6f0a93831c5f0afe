"""What is in p.grad after a reduction of sparse gradients, and after optimizer state has been broadcast: as in Horovod."""

from __future__ import annotations

from typing import Any

import pytest
from world import ranks, wrapped_sgd

torch = pytest.importorskip("torch")

import horoclone.torch as hvd  # noqa: E402


def embedding(rows: int = 4) -> torch.nn.Embedding:
    model = torch.nn.Embedding(rows, 2, sparse=True)
    with torch.no_grad():
        model.weight.copy_(torch.arange(2.0 * rows).reshape(rows, 2))
    return model


def backward(model: torch.nn.Embedding, rows: list[int], passes: int = 1) -> None:
    for _ in range(passes):
        (model(torch.tensor(rows)) * torch.ones(len(rows), 2)).sum().backward()


@ranks(2)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_as_dense_hands_out_sparse_gradients_in_every_step(compression: str, passes: int) -> None:
    model = embedding()
    optimizer = wrapped_sgd(
        model,
        0.0,
        sparse_as_dense=True,
        compression=getattr(hvd.Compression, compression),
        backward_passes_per_step=passes,
    )
    for step in range(3):  # learning, then in buckets
        rows = [hvd.rank(), hvd.rank() + 1]
        if step < 2 or hvd.rank() == 0:  # in the last step rank 1 has none
            backward(model, rows, passes)
        optimizer.step()
        grad = model.weight.grad
        assert grad.is_sparse and grad.dtype == torch.float32
        want = torch.tensor([[0.5] * 2, [1.0] * 2, [0.5] * 2, [0.0] * 2])
        if step == 2:
            want = torch.tensor([[0.5] * 2, [0.5] * 2, [0.0] * 2, [0.0] * 2])
        assert grad.to_dense().tolist() == (want * passes).tolist()
        assert 0.0 not in grad.coalesce().values().tolist()
        optimizer.zero_grad()


@ranks(2)
def test_sparse_adam_trains_with_sparse_as_dense_and_touches_only_the_rows_in_use() -> None:
    model = embedding(6)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        sparse_as_dense=True,
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model.weight.grad.is_sparse and model.weight.grad.to_dense().abs().sum() == 0
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, [hvd.rank()])
        optimizer.step()
    alone = embedding(6)
    reference = torch.optim.SparseAdam(alone.parameters(), lr=0.5)
    for _ in range(3):
        reference.zero_grad()
        (alone(torch.tensor([0, 1])) / 2).sum().backward()
        reference.step()
    assert torch.allclose(model.weight, alone.weight)
    assert model.weight[2:].tolist() == embedding(6).weight[2:].tolist()


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    return model


def grads(model: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.abs().sum().item() for p in model.parameters()]


@ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_gradients_are_zeros_after_broadcasting_to_ranks_without_state(kind: str, wrapped: bool) -> None:
    model = linear()
    options = {"lr": 0.5 * (hvd.rank() + 1), "weight_decay": 0.25}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert grads(model) == [0.0, 0.0]
    assert model.weight.tolist() == linear().weight.tolist(), "no step: nothing has decayed"
    assert not optimizer.state_dict()["state"] and optimizer.param_groups[0]["lr"] == 0.5
    model(torch.full((1, 3), 1.0 + hvd.rank())).sum().backward()
    optimizer.step()
    if wrapped:
        assert model.weight.grad.tolist() == [[1.5] * 3] * 2, "zeros take no part"


@ranks(2)
def test_gradients_of_a_rank_with_state_stay_and_frozen_parameters_get_none() -> None:
    model = linear()
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([model.weight, model.bias], lr=0.5)
    if hvd.rank() == 0:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert grads(model) == ([6.0, None] if hvd.rank() == 0 else [0.0, None])
    assert optimizer.state[model.weight]["step"].item() == 1


@ranks(2)
def test_with_unused_as_none_no_zeros_are_left_behind() -> None:
    model = linear()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters(), unused_as_none=True
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert grads(model) == [None, None]


@ranks(2)
def test_a_gradient_that_a_script_has_kept_stays_as_it_is() -> None:
    model = linear()
    optimizer = wrapped_sgd(model, 0.0)
    kept = []
    for step in range(5):
        model.zero_grad()
        if step != 3 or hvd.rank() == 0:  # else this rank's zeros come where the gradient before was
            model(torch.full((1, 3), 1.0 + step + hvd.rank())).sum().backward()
        optimizer.step()
        kept.append(model.weight.grad)
    means = [gradient.unique().tolist() for gradient in kept]
    assert means == [[1.5], [2.5], [3.5], [2.0], [5.5]]


@pytest.mark.parametrize("form", ["one memory", "parts of one memory", "expanded"])
@ranks(2)
def test_gradients_that_share_memory_are_reduced_once(form: str) -> None:
    """Also in a first step, where they lie in no buckets yet."""
    count = 300_000  # more than is reduced at once
    parameters = [torch.nn.Parameter(torch.zeros(count)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    for step in range(3):
        # As autograd gives them where a parameter and a view of one are added up
        if form == "parts of one memory":
            given = torch.full((count + 2,), 1.0 + hvd.rank())
            views = [given[i : count + i] for i in range(3)]
        else:
            one = torch.full((count,) if form == "one memory" else (1,), 1.0 + hvd.rank())
            views = [one.expand(count)] * 3
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view
        optimizer.step()
        for parameter in parameters:
            assert parameter.detach().unique().tolist() == [-3.0 * (step + 1)]
