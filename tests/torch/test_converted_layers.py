"""What convert_sync_batchnorm keeps of a model, and what it refuses; when SyncBatchNorm talks to the other ranks."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from world import ranks

import horoclone.torch as hvd

convert = hvd.SyncBatchNorm.convert_sync_batchnorm


def batch(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) * (rank + 1)


def everybody(*shape: int) -> torch.Tensor:
    return torch.cat([batch(r, *shape) for r in range(hvd.size())])


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Activated(nn.BatchNorm2d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.slope = nn.Parameter(torch.tensor(0.1))
        self.register_buffer("calls", torch.tensor(0))
        self.inner = nn.Sequential(nn.BatchNorm2d(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = super().forward(x)
        return self.inner(torch.where(x > 0, x, self.slope * x))


class ByItself(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@ranks(2)
def test_a_subclass_keeps_its_forward_and_is_synchronised() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Activated(3))
    layers = convert(copy.deepcopy(plain))
    assert isinstance(layers[0], Activated) and isinstance(layers[0], hvd.SyncBatchNorm)
    assert type(layers[0].inner[0]) is hvd.SyncBatchNorm
    assert list(layers.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        whole = plain(everybody(4, 3, 2, 2))
        mine = layers(batch(hvd.rank(), 4, 3, 2, 2))
        assert torch.allclose(mine, whole.split(4)[hvd.rank()], atol=1e-5)
    assert layers[0].calls == 2
    for copied in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers)), saved_and_loaded(layers)):
        assert type(copied[0]) is type(layers[0]) and copied[0].calls == 2
        assert torch.equal(copied(batch(hvd.rank(), 4, 3, 2, 2)), layers(batch(hvd.rank(), 4, 3, 2, 2)))


@ranks(2)
def test_a_subclass_that_normalises_by_itself_is_refused() -> None:
    model = convert(nn.Sequential(ByItself(3)))
    model.eval()(torch.ones(2, 3))  # nothing is to be synchronised there
    with pytest.raises(hvd.Unsupported, match="ByItself has a forward.. of its own that does not call super"):
        model.train()(torch.ones(2, 3))
    assert hvd.allreduce(torch.tensor(1.0)) == 1


@ranks(2)
def test_hooks_and_attributes_stay() -> None:
    layer, seen = nn.BatchNorm1d(3), []
    layer.tag = "mine"
    handle = layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    layer.register_load_state_dict_post_hook(lambda *_: seen.append("load"))
    layer.weight.register_hook(lambda grad: seen.append("weight"))
    model = convert(nn.Sequential(layer))
    assert model[0].tag == "mine" and type(model[0]) is hvd.SyncBatchNorm
    model(batch(hvd.rank(), 4, 3).requires_grad_()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert seen == ["before", "forward", "weight", "backward", "state", "load"]
    handle.remove()
    model(batch(hvd.rank(), 4, 3))
    assert seen[6:] == ["before"]


@ranks(2)
def test_a_layer_with_two_names_has_one_replacement() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(3)
            self.second = self.first
            self.again = nn.ModuleList([nn.Sequential(self.first)])

    model = convert(Twice())
    assert type(model.first) is hvd.SyncBatchNorm
    assert model.first is model.second is model.again[0][0]
    tied = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    tied[1].weight = tied[0].weight
    assert convert(tied)[0].weight is tied[1].weight


@ranks(2)
def test_parametrizations_stay_and_can_be_removed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    plain = copy.deepcopy(model)
    convert(model)
    assert isinstance(model[0], hvd.SyncBatchNorm) and parametrize.is_parametrized(model[0], "weight")
    assert list(model.state_dict()) == list(plain.state_dict())
    x = everybody(4, 3)
    assert torch.allclose(model(batch(hvd.rank(), 4, 3)), plain(x).split(4)[hvd.rank()], atol=1e-5)
    assert torch.equal(copy.deepcopy(model)[0].weight, model[0].weight)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is hvd.SyncBatchNorm and torch.equal(model[0].weight, torch.full((3,), 2.0))
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    assert convert(nn.Sequential(layer))[0] is layer


@ranks(2)
def test_a_lazy_layer_becomes_one_at_its_first_input() -> None:
    for kind, shape in ((nn.LazyBatchNorm1d, (4, 3)), (nn.LazyBatchNorm2d, (4, 3, 2, 2))):
        plain, model = nn.Sequential(kind()), convert(nn.Sequential(kind()))
        model = pickle.loads(pickle.dumps(model))
        for _ in range(2):
            whole, mine = plain(everybody(*shape)), model(batch(hvd.rank(), *shape))
            assert torch.allclose(mine, whole.split(4)[hvd.rank()], atol=1e-5)
        assert type(model[0]) is hvd.SyncBatchNorm and model[0].num_features == 3
        assert torch.allclose(model[0].running_var, plain[0].running_var, atol=1e-5)


@ranks(2)
def test_options_and_state_of_each_layer_stay() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(3, affine=False), nn.BatchNorm2d(3, momentum=None, eps=0.5), nn.BatchNorm3d(3),
        nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm2d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3),
    )  # fmt: skip
    model[1].double().requires_grad_(False)
    model[2].eval()
    held = list(model)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert convert(model) is model
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys() and all(after[name] is t for name, t in before.items())
    assert isinstance(convert(nn.BatchNorm1d(4)), hvd.SyncBatchNorm)
    assert [type(layer) is hvd.SyncBatchNorm for layer in model] == [True] * 4 + [False] * 3
    assert all(new is old for new, old in zip(list(model)[4:], held[4:], strict=True))
    assert [layer.training for layer in model[:4]] == [True, True, False, True]
    assert model[0].weight is None and model[1].momentum is None and model[1].eps == 0.5
    assert model[1].weight.dtype == torch.float64 and not model[1].weight.requires_grad
    assert model[3].running_mean is None and not model[3].track_running_stats


@ranks(2, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_layers_that_synchronise_already() -> None:
    alone = hvd.add_process_set([0])
    model = convert(nn.Sequential(hvd.SyncBatchNorm(3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3)), alone)
    assert [type(layer) for layer in model] == [hvd.SyncBatchNorm] * 3
    assert [layer.process_set for layer in model] == [hvd.global_process_set, alone, alone]

    class Group:
        pass

    layer = nn.SyncBatchNorm(3)
    layer.process_group = Group()
    with pytest.raises(ValueError, match="process group of torch.distributed"):
        convert(nn.Sequential(layer))
    hvd.remove_process_set(alone)
    with pytest.raises(ValueError, match="not been registered"):
        model[1](torch.ones(2, 3))


@ranks(2)
def test_only_training_talks_to_the_other_ranks() -> None:
    bare = hvd.SyncBatchNorm(3, track_running_stats=False).eval()
    if hvd.rank() == 0:
        x = batch(0, 4, 3)
        assert torch.allclose(bare(x), nn.BatchNorm1d(3, track_running_stats=False).eval()(x), atol=1e-6)
    hvd.barrier()
    bare.train()
    whole = nn.BatchNorm1d(3)(everybody(4, 3))
    assert torch.allclose(bare(batch(hvd.rank(), 4, 3)), whole.split(4)[hvd.rank()], atol=1e-5)


@ranks(2)
def test_a_batch_with_one_row_or_none() -> None:
    layer = hvd.SyncBatchNorm(3)
    row = torch.ones(1 if hvd.rank() == 0 else 0, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(row)
    assert torch.equal(layer.running_mean, torch.zeros(3)) and layer.num_batches_tracked == 0
    assert layer(torch.ones(0, 3)).shape == (0, 3)  # as BatchNorm1d
    assert torch.equal(layer.running_mean, torch.zeros(3)) and torch.equal(layer.running_var, torch.ones(3))
    assert layer(batch(hvd.rank(), 1, 3)).shape == (1, 3)


@ranks(2)
def test_autocast_and_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, plain = hvd.SyncBatchNorm(3), nn.BatchNorm1d(3)
    x, whole = batch(hvd.rank(), 4, 3).requires_grad_(), everybody(4, 3).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = checkpoint(layer, x, use_reentrant=False)
        reference = plain(whole)
    assert mine.dtype == reference.dtype
    mine.pow(3).sum().backward()
    reference.pow(3).sum().backward()
    assert torch.allclose(x.grad, whole.grad.split(4)[hvd.rank()], atol=1e-3)
