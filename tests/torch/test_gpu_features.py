"""Torch's features over CUDA tensors on real GPUs; skipped where torch sees none. Two ranks may share a GPU.

tests/torch/test_gpu_fake_features.py runs their bodies on the fakes.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone.torch.compressors.blocks import decode, encode

sys.path.insert(0, str(Path(__file__).parent))
from test_gpu import batches, ddp, device, losses_of, optimized, pytestmark, small_model  # noqa: F401


@pytest.fixture(autouse=True)
def _nothing_is_left_of_torchs_groups() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@ranks(2)
def test_mixed_precision_with_a_scaler() -> None:
    where = device()
    model = small_model(where)
    optimizer, scaler = optimized(model), torch.amp.GradScaler(where.type, init_scale=2.0**30)
    scales = []
    for batch in batches(hvd.rank(), where, 24):
        optimizer.zero_grad()
        with torch.autocast(where.type, torch.float16):
            loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales[-1] < 2.0**30, "the first steps overflow, on both ranks"
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = hvd.allgather(torch.cat([flat, torch.tensor(scales, device=where)]).unsqueeze(0))
    assert torch.isfinite(flat).all() and torch.equal(both[0], both[1])


@ranks(2)
def test_sync_batch_norm_is_batch_norm_over_all_ranks() -> None:
    where, rank = device(), hvd.rank()
    torch.manual_seed(3)
    whole = torch.randn(8, 5, 4, 4).to(where)
    alone, ours = torch.nn.BatchNorm2d(5).to(where), hvd.SyncBatchNorm(5).to(where)
    everything, part = whole.clone().requires_grad_(), whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    alone(everything).square().sum().backward()
    ours(part).square().sum().backward()
    assert everything.grad is not None
    torch.testing.assert_close(part.grad, everything.grad[4 * rank : 4 * rank + 4], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.running_var, alone.running_var, rtol=1e-3, atol=1e-4)


@ranks(2)
def test_gradient_compressors() -> None:
    """What has a state of its own must keep it on the GPU; int8 has the bits that it has on the host."""
    where = device()
    inputs = batches(hvd.rank(), where, 4)
    for compression in (
        hvd.Compression.fp16,
        hvd.Compression.bf16,
        hvd.Compression.int8,
        hvd.Compression.topk(ratio=0.5),
        hvd.Compression.powersgd(rank=2, start_step=0),
    ):
        model = small_model(where)
        assert all(
            math.isfinite(x) for x in losses_of(model, optimized(model, compression=compression), inputs)
        )
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        both = hvd.allgather(flat.unsqueeze(0))
        torch.testing.assert_close(both[0], both[1], rtol=1e-5, atol=1e-6)
        if compression is hvd.Compression.int8:
            assert torch.equal(both[0], both[1]), "all decode the same bytes"


@ranks(2)
def test_sparse_gradients() -> None:
    where, rank = device(), hvd.rank()
    tables = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = torch.nn.Embedding(50, 4, sparse=sparse).to(where)
        optimizer = wrapped_sgd(table, 0.5)
        for step in range(4):
            optimizer.zero_grad()
            table(torch.tensor([3 * rank + step, 7], device=where)).square().sum().backward()
            optimizer.step()
        tables.append(table.weight.detach().cpu())
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-4, atol=1e-6)


@ranks(1)
def test_blocks_of_integers_have_the_bits_that_they_have_on_the_host() -> None:
    where, rows = device(), torch.randn(3, 1024) * torch.logspace(-30, 30, 1024)
    rows[1, 0], rows[2, 5] = float("inf"), float("nan")
    for block in (1, 16, 256):
        there, here = encode(rows.to(where), block), encode(rows, block)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here, strict=True))
        assert torch.equal(
            decode(there[0], 1024, block).cpu().nan_to_num(), decode(here[0], 1024, block).nan_to_num()
        )


def meshed() -> Any:
    dist.init_process_group("horoclone")
    return torch.distributed.device_mesh.init_device_mesh(
        device().type, (hvd.size(),), mesh_dim_names=("data",)
    )


def trained_alone(where: torch.device, steps: int) -> torch.nn.Module:
    """All ranks' batches as one."""
    model = small_model(where)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    every = [batches(rank, where, steps) for rank in range(hvd.size())]
    losses_of(model, sgd, [torch.cat(parts) for parts in zip(*every, strict=True)])
    return model


@ranks(2)
def test_fsdp2_trains_as_one_process() -> None:
    from torch.distributed.fsdp import fully_shard

    where = device()
    expected = trained_alone(where, 4)
    model = small_model(where)
    fully_shard(model, mesh=meshed())
    losses_of(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches(hvd.rank(), where, 4)
    )
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-6)
    torch.cuda.synchronize()


@ranks(2)
def test_ddp_and_its_hooks_train_as_one_process() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    where = device()
    expected = trained_alone(where, 4)
    dist.init_process_group("horoclone")
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
    for hook, its_state, apart in (
        (None, None, 1e-4),
        (default_hooks.fp16_compress_hook, None, 1e-2),
        (powerSGD_hook.powerSGD_hook, state, 1e-1),
    ):
        wrapped = ddp(small_model(where), where)
        if hook is not None:
            wrapped.register_comm_hook(its_state, hook)
        sgd = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        losses_of(wrapped, sgd, batches(hvd.rank(), where, 4))
        for ours, theirs in zip(wrapped.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=apart, atol=apart / 10)
    torch.cuda.synchronize()


@ranks(2)
def test_dtensor_and_tensor_parallel() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    where, mesh = device(), meshed()
    torch.manual_seed(1)
    whole = torch.randn(8, 6, device=where)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(cut.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local(), whole)
    model, alone = small_model(where), small_model(where)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for each in (model, alone):
        each(batches(0, where, 1)[0]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)
    torch.cuda.synchronize()


@ranks(2)
def test_memory_of_an_operation_that_nobody_waits_for_is_not_given_away_too_early() -> None:
    where = device()
    dist.init_process_group("horoclone")
    for step in range(20):
        torch.cuda._sleep(2_000_000)  # the operation begins behind it
        tensor = torch.full((1 << 20,), float(step), device=where)
        kept = tensor.view(-1)[:1].clone()
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            pass
        del work, tensor
        others = [torch.full((1 << 20,), -1.0, device=where) for _ in range(3)]  # might get that memory
        torch.cuda.synchronize()
        assert all(bool((other == -1.0).all()) for other in others) and kept.item() == step
