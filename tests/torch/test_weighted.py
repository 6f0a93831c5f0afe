"""Weighted means of torch tensors and gradients: sum(w * x) / sum(w), as one process has on the whole batch.

What each binding has, is in tests/weighted.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world import load, ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone import metrics as observed
from horoclone.errors import InvalidArgument, Mismatch, Unsupported

shared = load(Path(__file__).parents[1] / "weighted.py", "weighted")


def _in_place(call: Callable[..., Any]) -> Callable[..., Any]:
    """What it gives back is the tensor that it was given."""

    def form(x: torch.Tensor, **more: Any) -> torch.Tensor:
        own = x.clone()
        assert call(own, **more) is own
        return own

    return form


def _taken_once(handle: int) -> Any:
    found = hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    return found


FORMS: list[Any] = [
    hvd.allreduce,
    lambda x, **more: hvd.grouped_allreduce([2 * x, x], **more)[1],
    lambda x, **more: _taken_once(hvd.allreduce_async(x, **more)),
    lambda x, **more: hvd.synchronize(hvd.grouped_allreduce_async([2 * x, x], **more))[1],
    _in_place(hvd.allreduce_),
    _in_place(lambda x, **more: hvd.grouped_allreduce_([x], **more)[0]),
    _in_place(lambda x, **more: _taken_once(hvd.allreduce_async_(x, **more))),
]


def _plain(tensor: torch.Tensor) -> np.ndarray:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tensor.detach().double().numpy().astype(dtype)


def _gradient(form: Any, x: torch.Tensor, scale: float, weight: float) -> torch.Tensor:
    x.requires_grad_()
    y = (form if form in FORMS[:2] else hvd.allreduce)(x, name="x", weight=weight)
    (found,) = torch.autograd.grad((y * scale).sum(), [x])
    return found


def _trained(**options: Any) -> Callable[..., list[np.ndarray]]:
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in [(5, 7), (7, 1)]]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), **options)
    passes = options.get("backward_passes_per_step", 1)

    def gradients(values: Any, x: np.ndarray, y: np.ndarray, weight: float) -> list[np.ndarray]:
        optimizer.zero_grad()
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(torch.as_tensor(value))
        optimizer.set_weight(weight)
        a, b = parameters
        for _ in range(passes):
            error = torch.tanh(torch.from_numpy(x) @ a) @ b - torch.from_numpy(y)
            (error.square().mean() / passes).backward()
        optimizer.step()
        return [parameter.grad.numpy() for parameter in parameters]

    return gradients


@pytest.mark.parametrize("question", shared.NAMES)
@ranks(3)
def test_as_any_binding(question: str) -> None:
    calls = shared.Calls(
        hvd, hvd.join, lambda values, dtype: torch.tensor(values, dtype=getattr(torch, dtype)), _plain, FORMS,
        _gradient, InvalidArgument, Mismatch, pairs=[hvd.grouped_allreduce],
        trained=[_trained(), _trained(groups=2), _trained(backward_passes_per_step=2)],
    )  # fmt: skip
    shared.ask(question, calls)


def _error(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@ranks(2)
def test_bfloat16_stays_bfloat16_under_compression() -> None:
    x = torch.full((4,), 1.0 + hvd.rank())
    found = hvd.allreduce(x, compression=hvd.Compression.bf16, weight=(1, 3)[hvd.rank()])
    assert found.dtype == torch.float32 and torch.equal(found, torch.full((4,), 1.75))
    for compression in (hvd.Compression.fp16,):
        with pytest.raises(ValueError, match="Compression.none and hvd.Compression.bf16"):
            hvd.allreduce(x, compression=compression, weight=1)


@ranks(3, init=False)
def test_process_sets_have_means_and_errors_of_their_own() -> None:
    hvd.init(process_sets="dynamic")
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        x = torch.tensor([1.0 + hvd.rank()])
        assert hvd.allreduce(x, weight=1 + hvd.rank(), process_set=pair).item() == (1 * 1 + 3 * 3) / 4
        call = lambda: hvd.allreduce(x, name="x", weight=1 - hvd.rank(), process_set=pair)  # noqa: E731
        assert "rank 2 gave the weight -1, which is negative" in _error(call, InvalidArgument)
    hvd.barrier()
    hvd.shutdown()


@ranks(2)
def test_a_wrong_weight_is_said_of_every_rank_that_gave_one_and_of_groups() -> None:
    x = torch.ones(3)
    for value, why in {1e300: "which is infinite", -math.inf: "which is negative"}.items():
        text = _error(lambda v=value: hvd.allreduce(x, weight=v if hvd.rank() == 1 else 1), InvalidArgument)
        assert "rank 1 gave the weight" in text and why in text and "0 where it has none" in text
    text = _error(lambda: hvd.allreduce(x, weight=math.nan), InvalidArgument)
    assert all(f"rank {r} gave" in text for r in range(hvd.size())) and "unnamed" in text
    text = _error(lambda: hvd.allreduce(x, name="big", weight=3e38), InvalidArgument)
    assert "infinite in float32" in text
    assert torch.equal(x, torch.ones(3))


@ranks(2)
def test_what_works_with_no_weight_is_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match="weight= "):
        hvd.allreduce(x, weight=1, postscale_factor=2.0)
    with pytest.raises(ValueError, match="priority"):
        hvd.allreduce_async(x, weight=1, priority=1)
    with pytest.raises(ValueError, match="has no gradient"):
        hvd.allreduce(x, weight=torch.tensor(1.0, requires_grad=True))


@ranks(2)
def test_the_weight_goes_with_the_tensor_in_one_operation_and_changes_from_call_to_call() -> None:
    x = torch.full((1000,), float(hvd.rank()))
    before = observed()["batches"]
    for step in range(20):
        mean = hvd.allreduce(x, name="x", weight=1 + step * hvd.rank())
        assert mean[0].item() == pytest.approx((1 + step) / (2 + step), rel=1e-6)
    assert observed()["batches"] - before == 20


# --- the optimizer ---


def _model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)


def _batches(step: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of all ranks: as many samples as nobody else has, and none at times."""
    random = torch.Generator().manual_seed(step)
    counts = [(step + 3 * r) % 5 if r else 2 + step % 3 for r in range(size)]
    return [
        (
            torch.randn(n, 6, generator=random, dtype=torch.float64),
            torch.randn(n, 1, generator=random, dtype=torch.float64),
        )
        for n in counts
    ]


_distributed = functools.partial(wrapped_sgd, rate=0.05, momentum=0.9)


@ranks(3)
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"backward_passes_per_step": 2}], ids=str)
def test_training_is_that_of_one_process_on_the_whole_batch(options: dict[str, Any]) -> None:
    model, alone = _model(), _model()
    optimizer, single = (
        _distributed(model, **options),
        torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9),
    )
    loss = torch.nn.MSELoss()  # the mean of no samples is NaN
    passes = options.get("backward_passes_per_step", 1)
    for step in range(12):
        batches = _batches(step, hvd.size())
        x, y = batches[hvd.rank()]
        optimizer.set_weight(len(x))
        for _ in range(passes):
            (loss(model(x), y) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        single.zero_grad()
        loss(alone(whole[0]), whole[1]).backward()
        single.step()
    for own, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(own, wanted, rtol=1e-13, atol=1e-14)
    assert all(p.abs().max() > 0 for p in model.parameters())


@ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_narrow_dtypes_have_the_mean_of_their_weights(dtype: torch.dtype) -> None:
    weights = (1000003.0, 999.0, 17.0)[: hvd.size()]
    wanted = sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)
    p = torch.nn.Parameter(torch.zeros(70, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), named_parameters=[("p", p)])
    for _ in range(4):
        optimizer.set_weight(weights[hvd.rank()])
        (p * (hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        assert torch.equal(p.grad, torch.full((70,), wanted).to(dtype))
        optimizer.zero_grad()


def _step(optimizer: Any, model: torch.nn.Module, weight: Any = "none") -> None:
    if weight != "none":
        optimizer.set_weight(weight)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(3)
def test_wrong_weights_of_a_step_are_errors_on_every_rank_and_training_goes_on() -> None:
    model = _model()
    optimizer = _distributed(model)
    for _ in range(4):  # the first step has no buckets yet
        wrong = {math.nan: "not a number", -1: "negative", math.inf: "infinite"}
        for value, why in wrong.items():
            text = _error(
                lambda v=value: _step(optimizer, model, v if hvd.rank() == 1 else 1), InvalidArgument
            )
            assert "rank 1 gave the weight" in text and why in text, text
            assert any(name in text for name, _ in model.named_parameters()), text
            optimizer.zero_grad()
        text = _error(lambda: _step(optimizer, model, *([1] if hvd.rank() != 1 else [])), InvalidArgument)
        assert "rank 1 gave no weight" in text and "set_weight() before the backward()" in text
        optimizer.zero_grad()
        assert "all ranks gave the weight 0" in _error(lambda: _step(optimizer, model, 0), InvalidArgument)
        optimizer.zero_grad()
        _step(optimizer, model, 1 + hvd.rank())
    same = hvd.allgather_object([p.sum().item() for p in model.parameters()])
    assert all(one == same[0] for one in same)


@ranks(3)
@pytest.mark.parametrize("before", [0, 3])
def test_weights_on_one_rank_only_are_a_mismatch_and_the_next_step_may_be_right(before: int) -> None:
    model = _model()
    optimizer = _distributed(model)
    for _ in range(before):
        _step(optimizer, model)
    text = _error(lambda: _step(optimizer, model, *([1] if hvd.rank() == 1 else [])), Mismatch)
    assert "set_weight() was called on rank 1, and not on rank 0" in text
    optimizer.zero_grad()
    for _ in range(3):
        _step(optimizer, model, 1 + hvd.rank())
    same = hvd.allgather_object([p.sum().item() for p in model.parameters()])
    assert all(one == same[0] for one in same)


@ranks(3)
def test_weights_may_begin_and_end_between_steps() -> None:
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), named_parameters=[("p", p)])
    size = hvd.size()
    plain, by_rank = (size - 1) / 2, sum(r * r for r in range(size)) / sum(range(size))
    for weighted in False, True, False, True:
        for _ in range(3):
            optimizer.set_weight(hvd.rank() if weighted else None)
            (p * hvd.rank()).sum().backward()
            optimizer.synchronize()
            assert p.grad[0].item() == pytest.approx(by_rank if weighted else plain, rel=1e-15)
            optimizer.zero_grad()


@ranks(2)
def test_weights_cost_no_operation_of_their_own() -> None:
    counts = []
    for weighted in False, True:
        model = _model()
        optimizer = _distributed(model)
        for step in range(6):
            if step == 3:
                before = observed()["batches"]
            _step(optimizer, model, *([1 + step] if weighted else []))
        counts.append(observed()["batches"] - before)
    assert counts[0] == counts[1]


@ranks(2)
def test_a_step_that_is_left_out_does_not_use_the_next_ones_weight() -> None:
    model = _model()
    optimizer = _distributed(model)
    for step in range(6):
        optimizer.set_weight(1 + step * hvd.rank())
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        if step % 2:
            model.zero_grad()  # past the optimizer, as scalers do
        else:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_a_weight_that_comes_too_late_is_refused() -> None:
    model = _model()
    optimizer = _distributed(model, backward_passes_per_step=2)
    for _ in range(3):
        optimizer.set_weight(1)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.set_weight(2)  # nothing has been sent
        with pytest.raises(RuntimeError, match="before the first backward"):
            optimizer.set_weight(None)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
def test_an_optimizer_says_what_weights_do_not_work_with() -> None:
    def refused(match: str, **options: Any) -> None:
        model = _model(torch.float32)
        with pytest.raises(ValueError, match=match):
            _distributed(model, **options).set_weight(1)

    refused("op other than Average", op=hvd.Sum)
    refused("Adasum", op=hvd.Adasum)
    refused("gradient_predivide_factor", gradient_predivide_factor=2.0)
    refused("compression", compression=hvd.Compression.fp16)
    refused("compression", compression=hvd.Compression.topk(ratio=0.5))
    refused("shard_optimizer_state", shard_optimizer_state=True)
    model = _model()
    refused("local parameters", local_parameters=[next(model.parameters())])
    optimizer = _distributed(model)
    optimizer.set_weight(1)
    with pytest.raises(ValueError, match="local parameters"):
        optimizer.register_local(next(model.parameters()))
    with pytest.raises(TypeError, match="weight"):
        optimizer.set_weight("3")


@ranks(2)
def test_sparse_gradients_are_weighed_when_they_are_made_dense() -> None:
    for dense in False, True:
        table = torch.nn.Embedding(4, 3, sparse=True)
        optimizer = wrapped_sgd(table, 1.0, sparse_as_dense=dense)
        for _ in range(3):
            optimizer.set_weight(1 + 2 * hvd.rank())
            loss = table(torch.tensor([hvd.rank()])).sum()
            if not dense:
                with pytest.raises(Unsupported, match="sparse_as_dense=True"):
                    loss.backward()
                    optimizer.step()
                break
            loss.backward()
            optimizer.synchronize()
            grad = table.weight.grad.to_dense()
            assert grad[:, 0].tolist() == [0.25, 0.75, 0.0, 0.0]
            optimizer.zero_grad()


@ranks(2)
def test_a_closure_of_lbfgs_sees_the_weighted_loss() -> None:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([p], max_iter=5), named_parameters=[("p", p)])
    weight = 1 + 2 * hvd.rank()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        optimizer.set_weight(weight)
        loss = ((p - hvd.rank()) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert torch.allclose(p, torch.full((2,), 0.75, dtype=torch.float64))


@ranks(3)
@pytest.mark.parametrize("first", [0, 2])
def test_weights_may_begin_and_end_while_a_rank_has_joined(first: int) -> None:
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), named_parameters=[("p", p)])
    for step in range(8 if hvd.rank() < 2 else first):
        weighted = step % 4 > 1
        optimizer.set_weight([1.0, 3.0][hvd.rank()] if weighted else None)
        (p * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        wanted = 2.0 if step < first else 7 / 4 if weighted else 1.0  # a plain mean is over all, as Horovod's
        assert p.grad is not None and p.grad[0].item() == pytest.approx(wanted, rel=1e-6)
        optimizer.zero_grad()
    hvd.join()


@ranks(3, init=False)
def test_an_optimizer_of_a_process_set_weighs_its_ranks() -> None:
    hvd.init(process_sets=[hvd.ProcessSet([0, 2])])
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=0.0), [("p", p)], process_set=hvd.ProcessSet([0, 2])
    )
    for _ in range(3):
        optimizer.set_weight(1 + hvd.rank())
        (p * (hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        assert p.grad is not None and p.grad[0].item() == (2.0 if hvd.rank() == 1 else 2.5)
        optimizer.zero_grad()
    if hvd.rank() != 1:
        with pytest.raises(InvalidArgument, match="rank 2 gave the weight -1"):
            optimizer.set_weight(1 - hvd.rank())
            p.sum().backward()
    hvd.shutdown()


@ranks(3)
@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_without_samples_may_leave_out_its_backward(first: int) -> None:
    p = torch.nn.Parameter(torch.zeros(5))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)])
    for step in range(6):
        idle = step >= first and step % 2 == first % 2 and hvd.rank() == 1
        optimizer.set_weight(0 if idle else 1 + hvd.rank())
        if not idle:
            (p * (hvd.rank() + 1.0)).sum().backward()
        before = p.detach().clone()
        optimizer.step()
        there = [r for r in range(hvd.size()) if not (r == 1 and step >= first and step % 2 == first % 2)]
        wanted = sum((1 + r) ** 2 for r in there) / sum(1 + r for r in there)
        assert (before - p)[0].item() == pytest.approx(wanted, rel=1e-5)
        optimizer.zero_grad()
