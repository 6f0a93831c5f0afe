"""SyncBatchNorm against BatchNorm over all ranks' batches in one process."""

from __future__ import annotations

import pytest
import torch
from world import alike, ranks

import horoclone.torch as hvd

SHAPES = [(6, 3), (4, 3, 5), (4, 3, 5, 2), (2, 3, 2, 2, 2)]


def share(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Rank r's batch, of a size of its own."""
    chance = torch.Generator().manual_seed(rank)
    return torch.randn((shape[0] + rank, *shape[1:]), generator=chance) * (rank + 1) + rank


def plain(dims: int) -> torch.nn.Module:
    kinds = {
        2: torch.nn.BatchNorm1d,
        3: torch.nn.BatchNorm1d,
        4: torch.nn.BatchNorm2d,
        5: torch.nn.BatchNorm3d,
    }
    return kinds[dims](3)


@ranks(1, 3)
def test_equals_batch_norm_over_everybodys_batch() -> None:
    for shape in SHAPES:
        sync, reference = hvd.SyncBatchNorm(3), plain(len(shape))
        with torch.no_grad():
            for layer in (sync, reference):
                layer.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
                layer.bias.copy_(torch.tensor([0.0, 1.0, 3.0]))
        for _ in range(2):
            batches = [share(shape, r) for r in range(hvd.size())]
            mine = batches[hvd.rank()].clone().requires_grad_()
            whole = torch.cat(batches).requires_grad_()
            out, expected = sync(mine), reference(whole)
            first = sum(len(b) for b in batches[: hvd.rank()])
            assert torch.allclose(out, expected[first : first + len(mine)], atol=1e-5)
            factor = torch.linspace(-1, 2, whole.numel()).view_as(whole)
            (out.square() * factor[first : first + len(mine)]).sum().backward()
            (expected.square() * factor).sum().backward()
            assert torch.allclose(mine.grad, whole.grad[first : first + len(mine)], atol=1e-3, rtol=1e-3)
            assert torch.allclose(sync.running_mean, reference.running_mean, atol=1e-6)
            assert torch.allclose(sync.running_var, reference.running_var, rtol=1e-5)
        total = hvd.allreduce(torch.stack([sync.weight.grad, sync.bias.grad]), op=hvd.Sum)
        assert torch.allclose(
            total, torch.stack([reference.weight.grad, reference.bias.grad]), rtol=1e-3, atol=1e-2
        )
        sync.eval()
        reference.eval()
        x = share(shape, 9)
        assert torch.allclose(sync(x), reference(x), atol=1e-5)  # no communication: rank 0 alone may do it


@ranks(2)
def test_options_dtypes_and_an_empty_batch() -> None:
    bare = hvd.SyncBatchNorm(3, affine=False, track_running_stats=False)
    x = share((6, 3), hvd.rank())
    whole = torch.cat([share((6, 3), r) for r in range(2)])
    expected = (x - whole.mean(0)) / (whole.var(0, unbiased=False) + 1e-5).sqrt()
    assert torch.allclose(bare(x), expected, atol=1e-5)
    half = hvd.SyncBatchNorm(3).bfloat16()
    x = share((6, 3), hvd.rank()).bfloat16().requires_grad_()
    out = half(x)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == half.weight.grad.dtype == torch.bfloat16
    cumulative = hvd.SyncBatchNorm(3, momentum=None)
    cumulative(share((6, 3), hvd.rank()))
    assert torch.allclose(cumulative.running_mean, whole.mean(0), atol=1e-5)
    layer = hvd.SyncBatchNorm(3)
    x = (torch.zeros(0, 3) if hvd.rank() == 1 else share((6, 3), 0)).requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert torch.allclose(layer.running_mean, 0.1 * share((6, 3), 0).mean(0), atol=1e-5)
    for wrong, words in (
        (torch.ones(3), "at least 2D"),
        (torch.ones(4, 3, dtype=torch.int64), "floating-point input, got torch.int64"),
        (torch.ones(4, 3, dtype=torch.complex64), "floating-point"),
        (torch.ones(4, 5), r"expected 3 channels, got input of shape \[4, 5\]"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(wrong)
    with pytest.raises(ValueError, match="expected 1 channels"):
        hvd.SyncBatchNorm(1, affine=False)(torch.ones(4, 5))


@ranks(2)
def test_inside_a_model_with_the_distributed_optimizer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), hvd.SyncBatchNorm(3), torch.nn.Flatten(), torch.nn.Linear(108, 2)
    )
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.05), model.named_parameters())
    for step in range(4):
        x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert alike(model.state_dict().values())


@ranks(4, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
def test_statistics_of_a_process_set_in_float64_and_float16() -> None:
    pair = hvd.add_process_set([1, 3])
    if pair.included():
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float16, 2e-2)):
            shape = (5, 3, 4, 4)
            sync, reference = hvd.SyncBatchNorm(3, process_set=pair).to(dtype), plain(4).double()
            mine = (share(shape, hvd.rank()) / 4).to(dtype).requires_grad_()
            whole = torch.cat([(share(shape, r) / 4).to(dtype) for r in (1, 3)]).double().requires_grad_()
            out, expected = sync(mine), reference(whole)
            first = 0 if hvd.rank() == 1 else len(share(shape, 1))
            here = slice(first, first + len(mine))
            assert out.dtype == dtype and torch.allclose(out.double(), expected[here], atol=tolerance)
            factor = torch.linspace(-1, 1, whole.numel()).double().view_as(whole)
            (out.double().square() * factor[here]).sum().backward()
            (expected.square() * factor).sum().backward()
            assert torch.allclose(mine.grad.double(), whole.grad[here], atol=tolerance, rtol=tolerance)
            assert torch.allclose(sync.running_mean.double(), reference.running_mean, rtol=0, atol=tolerance)
            assert torch.allclose(sync.running_var.double(), reference.running_var, rtol=tolerance)
    hvd.barrier()
    hvd.remove_process_set(pair)
