"""Sharded optimizer state (ZeRO-1) against the same training with whole state on every rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from world import alike, ranks, wrapped_sgd

import horoclone.torch as hvd

Model = torch.nn.Module
OVER_TCP = {"HOROCLONE_SHARED_MEMORY": "0"}
ELEMENT_WISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "sgd-stateless": partial(torch.optim.SGD, lr=0.05),
    "adam-amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
}


def network(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 40), torch.nn.Tanh(),
        torch.nn.Linear(40, 5),
    ).to(dtype).to(memory_format=torch.channels_last)  # fmt: skip


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(7919 * step + (hvd.rank() if rank is None else rank))
    return torch.randn(6, 1, 8, 8, generator=chance), torch.randint(5, (6,), generator=chance)


def loss_of(model: Model, step: int, rank: int | None = None) -> torch.Tensor:
    images, labels = batch(step, rank)
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(images.to(dtype)).float(), labels)


def wrap(make: Any, model: Model, **options: Any) -> Any:
    return hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)


def train(model: Model, optimizer: Any, first: int = 0, steps: int = 5) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_parameters(a: Model, b: Model, tolerance: float = 0.0) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        close = torch.equal(p, q) if tolerance == 0 else torch.allclose(p, q, rtol=tolerance, atol=tolerance)
        assert close, (name, float((p - q).abs().max()))


def same_state(a: Any, b: Any, tolerance: float = 0.0) -> None:
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for index, entry in a["state"].items():
        other = b["state"][index]
        assert entry.keys() == other.keys()
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert value.shape == other[key].shape and value.dtype == other[key].dtype, (index, key)
                assert torch.allclose(value, other[key], rtol=tolerance, atol=tolerance), (index, key)
            else:
                assert value == other[key], (index, key)


def elements_of_state(optimizer: Any) -> int:
    return sum(
        v.numel()
        for e in optimizer.state.values()
        for v in e.values()
        if isinstance(v, torch.Tensor) and v.dim()
    )


def compare(
    make: Any, tolerance: float = 0.0, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any]:
    """Trains both ways; the losses and parameters are the same, and so is the state once it is collected."""
    shard = options.pop("shard", True)
    models = [network(dtype), network(dtype)]
    whole = wrap(make, models[0], **options)
    sharded = wrap(make, models[1], shard_optimizer_state=shard, **options)
    losses = [train(models[0], whole), train(models[1], sharded)]
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=tolerance, atol=0), losses
    same_parameters(*models, tolerance)
    assert alike(models[1].parameters())
    sharded.consolidate_state_dict()
    same_state(sharded.state_dict(), whole.state_dict(), tolerance)
    return whole, sharded


@pytest.mark.parametrize("which", sorted(ELEMENT_WISE))
@ranks(3)
def test_sharded_by_elements_gives_the_same_bits(which: str) -> None:
    whole, sharded = compare(ELEMENT_WISE[which])
    if elements_of_state(whole):
        share = elements_of_state(sharded) / elements_of_state(whole)
        assert share < 1 / hvd.size() + 0.02, share


@ranks(4, env=OVER_TCP)
def test_sharded_over_tcp_by_reducescatter() -> None:
    for which in ("sgd", "adam-amsgrad"):
        _, sharded = compare(ELEMENT_WISE[which], 1e-4)
        assert sharded._reducer._scatter
    compare(ELEMENT_WISE["sgd"], 2e-2, compression=hvd.Compression.bf16)
    compare(ELEMENT_WISE["sgd"], 2e-2, dtype=torch.bfloat16)


@ranks(3)
def test_sharded_by_parameters_works_for_optimizers_that_see_matrices() -> None:
    for name in ("Adafactor", "Muon"):
        if hasattr(torch.optim, name):
            torch.manual_seed(0)
            models = [
                torch.nn.Sequential(*(torch.nn.Linear(12, 12, bias=False) for _ in range(5)))
                for _ in range(2)
            ]
            models[1].load_state_dict(models[0].state_dict())
            make = partial(getattr(torch.optim, name), lr=0.01)
            optimizers = [wrap(make, models[0]), wrap(make, models[1], shard_optimizer_state=True)]
            for step in range(4):
                x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
            same_parameters(*models)
            assert elements_of_state(optimizers[1]) < elements_of_state(optimizers[0])
            optimizers[1].consolidate_state_dict()
            same_state(optimizers[1].state_dict(), optimizers[0].state_dict())
    compare(ELEMENT_WISE["adam-amsgrad"], shard="parameters")


@ranks(2)
def test_dtypes_compression_and_passes() -> None:
    compare(ELEMENT_WISE["adamw-fused"], dtype=torch.bfloat16)
    compare(ELEMENT_WISE["sgd"], dtype=torch.float64)
    compare(ELEMENT_WISE["sgd"], compression=hvd.Compression.fp16)
    compare(ELEMENT_WISE["sgd"], compression=hvd.Compression.int8)
    compare(ELEMENT_WISE["sgd"], op=hvd.Sum, groups=2)
    models, optimizers = [network(), network()], []
    for model, shard in zip(models, (False, True), strict=True):
        optimizers.append(
            wrap(ELEMENT_WISE["sgd"], model, backward_passes_per_step=2, shard_optimizer_state=shard)
        )
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(2):
                (loss_of(model, 2 * step + part) / 2).backward()
            optimizer.step()
    same_parameters(*models)


def both(
    build: Callable[[bool], tuple[Model, Callable[[int], None]]], steps: int = 5, tolerance: float = 0.0
) -> None:
    (model, step_whole), (sharded, step_sharded) = build(False), build(True)
    for step in range(steps):
        step_whole(step)
        step_sharded(step)
    same_parameters(model, sharded, tolerance)
    assert alike(sharded.parameters())


def grouped_and_scheduled(shard: bool) -> tuple[Model, Callable[[int], None]]:
    model = network()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "lr": 0.02, "weight_decay": 0.1}, {"params": parameters[3:]}]
    plain = torch.optim.AdamW(groups, lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), shard_optimizer_state=shard)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        schedule.step()
        assert [p for g in optimizer.param_groups for p in g["params"]] == parameters

    return model, step


def scaled(shard: bool) -> tuple[Model, Callable[[int], None]]:
    model = network()
    optimizer = wrap(ELEMENT_WISE["adamw-foreach"], model, shard_optimizer_state=shard)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        if number == 2 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if number < 2 else 512.0)

    return model, step


def with_closure(shard: bool) -> tuple[Model, Callable[[int], None]]:
    model = network()
    optimizer = wrap(ELEMENT_WISE["sgd"], model, shard_optimizer_state=shard)

    def step(number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0

    return model, step


def hooked_frozen_and_by_hand(shard: bool) -> tuple[Model, Callable[[int], None]]:
    model = network()
    model[0].requires_grad_(False)
    optimizer = wrap(ELEMENT_WISE["sgd"], model, shard_optimizer_state=shard, unused_as_none=True)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        if number == 3:
            model[0].requires_grad_(True)  # a new layout: the state moves to new owners
        loss_of(model, number).backward()
        if number == 4:
            optimizer.synchronize()
            model[3].weight.grad = (model[3].weight.grad * 0.5).contiguous()
            model[5].bias.grad = None
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        assert len(seen) == number + 1

    return model, step


def grown(shard: bool) -> tuple[Model, Callable[[int], None]]:
    model, more = network(), torch.nn.Linear(5, 5)
    with torch.no_grad():
        more.weight.copy_(torch.eye(5))
        more.bias.zero_()
    optimizer = wrap(ELEMENT_WISE["adam-amsgrad"], model, shard_optimizer_state=shard)

    def step(number: int) -> None:
        if number == 2:
            optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.01})
        optimizer.zero_grad()
        images, labels = batch(number)
        F.cross_entropy(more(model(images)), labels).backward()
        if number < 2:
            more.zero_grad()
        optimizer.step()

    return torch.nn.ModuleList([model, more]), step


CASES = [grouped_and_scheduled, scaled, with_closure, hooked_frozen_and_by_hand, grown]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case.__name__ for case in CASES])
@ranks(3)
def test_in_the_training_loops_that_people_write(case: int) -> None:
    both(CASES[case])


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case.__name__ for case in CASES])
@ranks(2, env=OVER_TCP)
def test_in_the_same_loops_over_tcp(case: int) -> None:
    both(CASES[case], tolerance=1e-4)


@ranks(2)
def test_sparse_local_and_odd_parameters() -> None:
    def build(shard: bool) -> tuple[Model, Callable[[int], None]]:
        torch.manual_seed(0)
        model = torch.nn.ModuleDict(
            {"table": torch.nn.Embedding(30, 8, sparse=True), "body": torch.nn.Linear(8, 8)}
        )
        wide = torch.randn(8, 16)
        model["body"].weight = torch.nn.Parameter(wide[:, ::2])  # gaps between its elements
        model["own"] = torch.nn.Linear(8, 2)
        optimizer = wrapped_sgd(model, local_parameters=model["own"], shard_optimizer_state=shard)  # fmt: skip

        def step(number: int) -> None:
            words = torch.randint(30, (5,), generator=torch.Generator().manual_seed(10 * number + hvd.rank()))
            optimizer.zero_grad()
            model["own"](model["body"](model["table"](words))).square().mean().backward()
            optimizer.step()

        return model, step

    (model, step_whole), (sharded, step_sharded) = build(False), build(True)
    for number in range(4):
        step_whole(number)
        step_sharded(number)
    same_parameters(model, sharded)
    assert alike([*sharded["table"].parameters(), *sharded["body"].parameters()])


# --- state ---------------------------------------------------------------------------------------------------------


@ranks(3)
def test_state_is_read_after_consolidating_it_and_on_request_on_one_rank() -> None:
    model = network()
    optimizer = wrap(ELEMENT_WISE["adam-amsgrad"], model, shard_optimizer_state=True)
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer)
    for read in (optimizer.state_dict, lambda: pickle.dumps(optimizer), lambda: copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            read()
    last = hvd.size() - 1
    optimizer.consolidate_state_dict(to=last)
    if hvd.rank() == last:
        state = optimizer.state_dict()
        assert len(state["state"]) == len(list(model.parameters()))
        revived = pickle.loads(pickle.dumps(optimizer))
        assert isinstance(revived, torch.optim.Adam)
        same_state(revived.state_dict(), state)
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    train(model, optimizer, 5, 1)
    with pytest.raises(RuntimeError, match="after the last step"):  # what was collected is out of date
        optimizer.state_dict()
    with pytest.raises(ValueError, match="to=99"):
        optimizer.consolidate_state_dict(to=99)


@ranks(2)
def test_a_checkpoint_goes_on_in_a_plain_in_a_whole_and_in_a_sharded_optimizer() -> None:
    for which in ("sgd", "adam-amsgrad", "asgd"):
        make = ELEMENT_WISE[which]
        model = network()
        optimizer = wrap(make, model, shard_optimizer_state=True)
        train(model, optimizer)
        optimizer.consolidate_state_dict()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = train(model, optimizer, 5)
        for shard in (False, True, "parameters"):
            fresh = network()
            other = wrap(make, fresh, shard_optimizer_state=shard)
            train(fresh, other, 50, 2)  # has state of its own, that must go
            fresh.load_state_dict(saved[0])
            other.load_state_dict(copy.deepcopy(saved[1]))
            assert train(fresh, other, 5) == expected, (which, shard)
            same_parameters(fresh, model)
        plain = make(network().parameters())
        plain.load_state_dict(saved[1])


@ranks(4, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_in_a_process_set_and_from_two_ranks_to_four() -> None:
    pair = hvd.add_process_set([1, 3])
    make = ELEMENT_WISE["adam-amsgrad"]
    model = network()
    optimizer = wrap(make, model, process_set=pair, shard_optimizer_state=True)
    if pair.included():
        reference = network()
        whole = wrap(make, reference, process_set=pair)
        assert train(model, optimizer) == train(reference, whole)
        same_parameters(model, reference)
        assert elements_of_state(optimizer) < 0.52 * elements_of_state(whole)
        optimizer.consolidate_state_dict(to=3)
    state = hvd.broadcast_object(optimizer.state_dict() if hvd.rank() == 3 else None, root_rank=3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=3)
    model, twin = copy.deepcopy(model), copy.deepcopy(model)
    four, whole = wrap(make, model, shard_optimizer_state=True), wrap(make, twin)
    four.load_state_dict(copy.deepcopy(state))
    whole.load_state_dict(copy.deepcopy(state))
    assert train(model, four, 5) == train(twin, whole, 5)
    assert elements_of_state(four) < 0.27 * elements_of_state(whole)
    hvd.barrier()
    hvd.remove_process_set(pair)


@ranks(3)
def test_broadcast_optimizer_state_before_and_after_steps() -> None:
    model = network()
    make = ELEMENT_WISE["sgd"]
    optimizer = wrap(make, model, shard_optimizer_state=True)
    hvd.broadcast_optimizer_state(optimizer, 0)
    train(model, optimizer)
    optimizer.consolidate_state_dict()
    state = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 1)
    twin = copy.deepcopy(model)
    whole = wrap(make, twin)
    whole.load_state_dict(state)
    assert train(model, optimizer, 5) == train(twin, whole, 5)
    resumed = copy.deepcopy(twin)
    only_root = wrap(make, resumed, shard_optimizer_state=True)
    if hvd.rank() == 0:  # as scripts resume: rank 0 has read the checkpoint
        only_root.load_state_dict(copy.deepcopy(whole.state_dict()))
    hvd.broadcast_optimizer_state(only_root, 0)
    assert train(resumed, only_root, 10) == train(twin, whole, 10)


@ranks(2, init=False)
def test_training_goes_on_after_shutdown_and_init() -> None:
    hvd.init()
    model, reference = network(), network()
    optimizer = wrap(ELEMENT_WISE["sgd"], model, shard_optimizer_state=True)
    whole = wrap(ELEMENT_WISE["sgd"], reference)
    for life in range(2):
        assert train(model, optimizer, 5 * life) == train(reference, whole, 5 * life)
        hvd.shutdown()
        hvd.init()
    same_parameters(model, reference)


@ranks(1)
def test_what_cannot_be_sharded_is_refused() -> None:
    model = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="LBFGS"):
        wrap(torch.optim.LBFGS, model, shard_optimizer_state=True)
    with pytest.raises(ValueError, match="must be True, False"):
        wrap(ELEMENT_WISE["sgd"], model, shard_optimizer_state="rows")
    if hasattr(torch.optim, "Adafactor"):
        with pytest.raises(ValueError, match="whole parameters"):
            wrap(torch.optim.Adafactor, model, shard_optimizer_state="elements")
