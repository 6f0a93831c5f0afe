"""DistributedOptimizer against one process that sees everybody's batches: same losses, same parameters."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from world import alike, ranks, wrapped_sgd

import horoclone.torch as hvd

Model = torch.nn.Module


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 5),
    ).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(7919 * step + rank)
    images = torch.randn(6, 1, 8, 8, generator=chance).to(dtype)
    return images, torch.randint(5, (6,), generator=chance)


def close(model: Model, reference: Model, tolerance: float = 1e-5) -> None:
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), (name, (a - b).abs().max())


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int = 6,
    passes: int = 1,
    dtype: torch.dtype = torch.float32,
    zero: Callable[[Any, Model], None] = lambda optimizer, model: optimizer.zero_grad(),
    factor: float = 1.0,
    **options: Any,
) -> tuple[Model, Model, Any]:
    """Trains with DistributedOptimizer and, beside it, on all ranks' batches in this process; both models returned."""
    model, reference = network(dtype=dtype), network(dtype=dtype)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    plain = make(reference.parameters())
    for step in range(steps):
        zero(optimizer, model)
        plain.zero_grad()
        losses = []
        for part in range(passes):
            images, labels = batch(hvd.rank(), step * passes + part, dtype)
            loss = F.cross_entropy(model(images).float(), labels) / passes
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        whole = torch.zeros(())
        for rank in range(hvd.size()):
            for part in range(passes):
                images, labels = batch(rank, step * passes + part, dtype)
                loss = F.cross_entropy(reference(images).float(), labels) / passes / hvd.size() * factor
                loss.backward()
                whole += loss.detach()
        plain.step()
        mean = hvd.allreduce(sum(losses)) * factor
        assert torch.allclose(mean, whole, rtol=2e-2 if dtype != torch.float32 else 1e-3, atol=1e-4), (
            step,
            mean,
            whole,
        )
    assert alike(model.parameters())
    return model, reference, optimizer


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("which", ["sgd", "adamw-fused"])
@ranks(1, 3)
def test_equals_a_single_process_with_the_large_batch(which: str) -> None:
    model, reference, _ = train(MAKERS[which])
    close(model, reference)


@ranks(3)
def test_accumulation_over_several_backward_passes() -> None:
    model, reference, optimizer = train(MAKERS["sgd"], steps=4, passes=3)
    close(model, reference)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    F.cross_entropy(model(batch(hvd.rank(), 0)[0]), batch(hvd.rank(), 0)[1]).backward()
    optimizer.step()
    assert alike(model.parameters())


@ranks(2)
def test_a_compressor_of_the_users_own_sees_single_gradients() -> None:
    class Halving(hvd.Compression.none):
        shapes: list[tuple[int, ...]] = []

        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
            Halving.shapes.append(tuple(tensor.shape))
            return (tensor / 2).flatten(), tuple(tensor.shape)

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: tuple[int, ...]) -> torch.Tensor:
            return (tensor * 2).view(ctx)

    model, reference, _ = train(MAKERS["sgd"], steps=3, compression=Halving)
    close(model, reference)
    assert set(Halving.shapes) == {tuple(p.shape) for p in model.parameters()}


@ranks(2)
def test_groups_by_number_and_by_list() -> None:
    for options in ({"groups": 2}, {"groups": 100}, {"num_groups": 3}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, reference, _ = train(MAKERS["sgd"], steps=4, **options)
        assert bool([w for w in caught if "num_groups" in str(w.message)]) == ("num_groups" in options)
        close(model, reference)
    model = network()
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        model.named_parameters(),
        groups=[parameters[:2], [parameters[4]]],
    )
    for step in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(batch(hvd.rank(), step)[0]), batch(hvd.rank(), step)[1]).backward()
        optimizer.step()
    assert alike(model.parameters())
    # What scripts reach for.
    assert [optimizer._parameter_names[p] for p in parameters] == [
        name for name, _ in model.named_parameters()
    ]
    assert optimizer.backward_passes_per_step == 1
    optimizer.add_param_group({"params": list(network(seed=3).parameters())})
    assert len(set(optimizer._parameter_names.values())) == 2 * len(parameters)


@ranks(2)
def test_models_in_sixteen_bits_and_of_mixed_dtypes() -> None:
    train(MAKERS["sgd"], steps=4, dtype=torch.bfloat16)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4).bfloat16()
    )
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for step in range(4):
        x = torch.full((2, 4), float(hvd.rank() + step))
        optimizer.zero_grad()
        model[2](model[1](model[0](x).double()).bfloat16()).float().square().mean().backward()
        optimizer.step()
    assert alike(model.parameters())


@ranks(2)
def test_a_model_of_many_buckets() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(16)), torch.nn.Linear(60, 800))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-2), model.named_parameters())
    optimizer._reducer.bucket_bytes = 50_000
    with mock.patch("horoclone.torch.optimizer.buckets.FIRST_BUCKET_BYTES", 4096):
        for step in range(3):
            x = torch.randn(2, 60, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.synchronize()
            gradient = model[-1].weight.grad
            mine = hvd.allgather(gradient[:1, :7].contiguous())
            assert torch.equal(mine[0], mine[1])
            with optimizer.skip_synchronize():
                optimizer.step()
    assert len(optimizer._reducer.buckets) > 4 and alike(model.parameters())


# --- the class and its state ---------------------------------------------------------------------------------------


@ranks(2)
def test_the_class_has_the_wrapped_classs_name_and_derives_from_it() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    assert type(optimizer) is not torch.optim.Adam
    assert optimizer.defaults["lr"] == 1e-3 and "Adam" in repr(optimizer)

    class Mine(type(optimizer)):
        def step(self, closure: Any = None) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            return super().step(closure)

    optimizer.__class__ = Mine
    model(batch(hvd.rank(), 0)[0]).sum().backward()
    optimizer.step()
    assert optimizer.steps == 1 and alike(model.parameters())


COPIES = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "predivide": {"gradient_predivide_factor": 2.0},
    "fp16": {"compression": hvd.Compression.fp16},
    "int8": {"compression": hvd.Compression.int8},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "unused": {"unused_as_none": True},
    "adasum": {"op": hvd.Adasum},
}
COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "saved": lambda pair: _saved(pair),
}


def _saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@ranks(2)
def test_copies_of_an_optimizer_reduce_as_it_does() -> None:
    """A copy that trained alone would let the ranks drift apart without a word."""
    for which, options in COPIES.items():
        for how, copied in COPIERS.items() if which == "plain" else [*COPIERS.items()][:2]:
            model = network()
            hvd.broadcast_parameters(model.state_dict(), 0)
            inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
            passes = options.get("backward_passes_per_step", 1)
            _some_steps(model, optimizer, passes, 0, 2)
            other, its = copied((model, optimizer))
            assert its.param_groups[0]["params"][0] is next(other.parameters())
            assert type(its).__mro__[1] is type(optimizer).__mro__[1]
            _some_steps(model, optimizer, passes, 2, 5)
            _some_steps(other, its, passes, 2, 5)
            for a, b in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.allclose(a, b, rtol=0, atol=1e-6 if which != "int8" else 1e-2), (which, how)
            assert alike(other.parameters()), (which, how)


def _some_steps(model: torch.nn.Module, optimizer: Any, passes: int, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        for part in range(passes):
            images, labels = batch(hvd.rank(), 10 * step + part)
            F.cross_entropy(model(images), labels).backward()
        optimizer.step()


@ranks(2)
def test_a_copy_keeps_what_is_local_and_whose_it_is() -> None:
    model = network()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    last = list(model.parameters())[-1]
    optimizer.register_local(last)
    other, its = copy.deepcopy((model, optimizer))
    with pytest.raises(ValueError, match="already a DistributedOptimizer"):
        hvd.DistributedOptimizer(its)
    _some_steps(other, its, 1, 0, 2)
    rows = hvd.allgather(torch.cat([p.detach().flatten() for p in other.parameters()])[None])
    differ = (rows[0] != rows[1]).nonzero().flatten().tolist()
    size = sum(p.numel() for p in other.parameters())
    assert differ and min(differ) >= size - last.numel()


@ranks(1, init=False)
def test_a_copy_that_is_loaded_without_a_runtime_does_not_train_alone() -> None:
    hvd.init()
    saved = pickle.dumps(hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.5)))
    hvd.shutdown()
    kept = pickle.loads(saved)
    assert kept.state_dict()["param_groups"][0]["lr"] == 0.5
    with pytest.raises(hvd.NotInitialized, match=r"(?s)(?=.*hvd\.init\(\))(?=.*wrap it)"):
        kept.step()
    hvd.init()
    again = hvd.DistributedOptimizer(kept)
    (parameter,) = again.param_groups[0]["params"]
    parameter.sum().backward()
    again.step()
    assert parameter.tolist() == [0.5]
    pickle.dumps(again)


@ranks(2)
def test_learning_rate_schedulers_before_and_after_wrapping() -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    before = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(hvd.rank(), step)[0]).sum().backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after.step()
        before.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    # Of a checkpoint: the first scheduler has the same groups
    optimizer.load_state_dict(optimizer.state_dict())
    before.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert alike(model.parameters())


@ranks(2)
def test_optimizers_with_required_arguments_and_several_groups() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any, rate: float) -> None:
            super().__init__(params, {"rate": rate})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-group["rate"])

    model = network()
    parameters = list(model.parameters())
    plain = Plain([{"params": parameters[:2]}, {"params": parameters[2:], "rate": 0.5}], 0.1)
    optimizer = hvd.DistributedOptimizer(plain)  # names are made up
    for step in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(batch(hvd.rank(), step)[0]), batch(hvd.rank(), step)[1]).backward()
        optimizer.step()
    assert alike(model.parameters())


@ranks(2)
def test_two_optimizers_in_flight_at_once() -> None:
    models = [network(seed) for seed in (1, 2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1)) for m in models]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model in models if hvd.rank() else reversed(models):
            model(batch(hvd.rank(), step)[0]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all(alike(model.parameters()) for model in models)


@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}, {"shard_optimizer_state": True}], ids=str)
@ranks(2)
def test_optimizers_of_one_form_never_meet(options: dict[str, Any]) -> None:
    """Ranks begin with different ones, whose parameters have the same names and shapes."""
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    made = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1), **options) for m in models]
    before = [copy.deepcopy(m.weight) for m in models]
    for i in [0, 1] if hvd.rank() == 0 else [1, 0]:
        with pytest.raises(
            hvd.Mismatch, match=r"steps? of different optimizers.*'allreduce\.noname\.0'.*prefix="
        ):
            models[i](torch.ones(1, 2)).sum().backward()
            made[i].step()
        made[i].zero_grad()
    assert all(torch.equal(m.weight, w) for m, w in zip(models, before, strict=True))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2


@ranks(2)
def test_optimizers_of_one_form_are_told_apart_alike_on_every_rank() -> None:
    """Whichever begins; copies and what one rank makes later do not count."""
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(3)]
    made = [hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), 0.1)) for m in models[:2]]
    kept = [copy.deepcopy(made[0]) for _ in range(hvd.rank())]
    made.append(hvd.DistributedOptimizer(torch.optim.SGD(models[2].parameters(), 0.1)))
    for i in (1, 0, 2, 0, 1, 2):
        made[i].zero_grad()
        if hvd.rank():
            kept.append(hvd.DistributedOptimizer(torch.optim.SGD([copy.deepcopy(models[i].weight)], 0.1)))
        (models[i](torch.ones(1, 2)) * (1 + hvd.rank()) * 10**i).sum().backward()
        made[i].step()
        assert torch.allclose(models[i].weight.grad, torch.full((1, 2), 1.5 * 10**i))


@ranks(2)
def test_an_optimizer_has_begun_also_on_a_rank_without_a_first_batch() -> None:
    """Else the ranks would take the next one of its form for different ones."""
    for _ in range(3):
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        if hvd.rank() == 0:
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[0.5, 0.5]]


@ranks(2, init=False)
def test_training_goes_on_after_shutdown_and_init() -> None:
    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for life in range(3):
        for step in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(batch(hvd.rank(), step)[0]), batch(hvd.rank(), step)[1]).backward()
            optimizer.step()
        kept = model[0].weight.grad
        before = kept.clone()
        hvd.shutdown()
        assert torch.equal(kept, before)  # the view outlives the runtime
        kept.add_(1.0)
        hvd.init()
        assert torch.equal(kept, before + 1.0), life
    assert alike(model.parameters())


@ranks(2)
def test_a_dropped_optimizer_lets_go_of_its_model() -> None:
    model = network()
    for _ in range(2):
        optimizer = wrapped_sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(hvd.rank(), step)[0]).square().mean().backward()
            optimizer.step()
        del optimizer
    model(batch(hvd.rank(), 0)[0]).square().mean().backward()  # no hook may submit anything now
    assert alike(model.parameters())
