"""CUDA tensors on real GPUs. Skipped where torch sees none: test_gpu_fake_features.py runs their bodies on the fakes."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone.errors import HorovodInternalError, Mismatch

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU here: torch.cuda.is_available() is False"
    ),
    pytest.mark.timeout(600),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Each rank is a host of its own to NCCL, which then takes several on one GPU: by sockets, and in turns.
AS_HOSTS = "HC_RANKS_ARE_NCCL_HOSTS" in os.environ
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def device() -> torch.device:
    """A GPU for each rank where there are enough; else they share."""
    if AS_HOSTS:
        os.environ["NCCL_HOSTID"] = f"rank {hvd.rank()}"
    index = hvd.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def values(dtype: torch.dtype, rank: int, count: int) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


@ranks(1, 2)
def test_every_operation_and_dtype() -> None:
    where, rank, size = device(), hvd.rank(), hvd.size()
    for dtype in [*FLOATS, *INTEGERS]:
        for count in (1, 1000, 300_001):
            ours = [values(dtype, r, count) for r in range(size)]
            wide = torch.stack([one.double() for one in ours])
            for op, expected in (
                (hvd.Sum, wide.sum(0)),
                (hvd.Min, wide.amin(0)),
                (hvd.Max, wide.amax(0)),
                (hvd.Product, wide.prod(0)),
                (hvd.Average, wide.mean(0)),
            ):
                if op == hvd.Average and not dtype.is_floating_point:
                    expected = (wide.sum(0) / size).trunc()
                result = hvd.allreduce(ours[rank].to(where), op=op)
                assert result.device == where and result.dtype == dtype
                tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
                torch.testing.assert_close(result.cpu().double(), expected, rtol=tolerance, atol=0)
            share = hvd.reducescatter(ours[rank].to(where), op=hvd.Sum)
            assert torch.equal(share.cpu().double(), wide.sum(0).tensor_split(size)[rank])
            rows = hvd.allgather(ours[rank][: count - rank].to(where))
            assert torch.equal(rows.cpu(), torch.cat([ours[r][: count - r] for r in range(size)]))
            assert torch.equal(hvd.broadcast(ours[rank].to(where), size - 1).cpu(), ours[-1])
    flags = torch.tensor([rank == 0, False, True], device=where)
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, False, True]
    if size == 1:
        return
    sent, received = hvd.alltoall(torch.arange(3, device=where), torch.tensor([1, 2], dtype=torch.int32))
    assert sent.tolist() == ([0, 0] if rank == 0 else [1, 2, 1, 2]) and received.tolist() == [1 + rank] * 2
    splits = torch.tensor([1, 2], dtype=torch.int32, device=where)
    assert hvd.alltoall(torch.arange(3, device=where), splits)[1].device == where
    share = hvd.reducescatter(torch.arange(3.0, device=where), op=hvd.Sum)
    assert share.tolist() == ([0.0, 2.0] if rank == 0 else [4.0])


@ranks(2)
def test_what_one_rank_gets_messages_groups_and_join() -> None:
    where, rank = device(), hvd.rank()
    mine = torch.arange(4.0, device=where) + rank
    total = hvd.reduce(mine, 1, op=hvd.Sum)
    assert total.tolist() == ([1.0, 3.0, 5.0, 7.0] if rank == 1 else [])
    rows = hvd.gather(mine[: rank + 1], 0)
    assert rows.tolist() == ([0.0, 1.0, 2.0] if rank == 0 else [])
    share = hvd.scatter(mine if rank == 0 else torch.empty(0, device=where), 0)
    assert share.device == where and share.tolist() == [2.0 * rank, 2.0 * rank + 1]
    arrived = torch.empty(4, device=where)
    sent, got = hvd.isend(mine, 1 - rank), hvd.irecv(arrived, 1 - rank)
    assert hvd.synchronize(got).tolist() == [i + 1.0 - rank for i in range(4)]
    hvd.synchronize(sent)
    share = hvd.scatter(mine if rank == 0 else None, 0, splits=[1, 3])
    assert share.device == where and share.tolist() == ([0.0] if rank == 0 else [1.0, 2.0, 3.0])
    for count in (0, 1, 3_000_000):  # many in flight, of both directions, with collectives in between
        many = [torch.full((count,), 10.0 * rank + tag, device=where) for tag in range(8)]
        handles = [hvd.isend(one, 1 - rank, tag=tag) for tag, one in enumerate(many)]
        assert hvd.allreduce(mine, op=hvd.Sum, name=f"between {count}").tolist() == [1.0, 3.0, 5.0, 7.0]
        for tag in reversed(range(8)):
            came = hvd.recv(src=None, tag=tag)
            assert came.device == where and came.shape == (count,)
            assert torch.equal(came, torch.full_like(came, 10.0 * (1 - rank) + tag))
        for handle in handles:
            hvd.synchronize(handle)
    if mine.is_cuda:
        with pytest.raises(Mismatch, match="Both ends"):
            hvd.send(mine, 1) if rank == 0 else hvd.recv(torch.zeros(4), 0)
    group = [torch.full((n,), rank + 1.0, device=where) for n in (1, 5, 200_000)]
    assert [one[-1].item() for one in hvd.grouped_allreduce(group, op=hvd.Sum)] == [3.0] * 3
    if mine.is_cuda:
        with pytest.raises(Mismatch, match="GPU"):
            hvd.allreduce(mine if rank == 0 else mine.cpu(), name="here and there")
    if rank == 1:
        assert hvd.allreduce(mine, op=hvd.Sum, name="alone").tolist() == mine.tolist()
    assert hvd.join() == 1


@ranks(2)
def test_results_wait_for_the_producers_stream_and_readers_for_the_result() -> None:
    where = device()
    side = torch.cuda.Stream()
    for step in range(50):
        tensor = torch.zeros(1 << 20, device=where)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            tensor.fill_(step + hvd.rank())
            handle = hvd.allreduce_async_(tensor, name="late", op=hvd.Sum)
        hvd.synchronize(handle)
        assert tensor.sum().item() == (2 * step + 1) * (1 << 20)


@ranks(2)
def test_the_optimizer_takes_the_steps_that_it_takes_on_the_host() -> None:
    where = device()
    trained = []
    for place in ("cpu", where):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(
            place
        )
        optimizer = wrapped_sgd(model, 0.05)
        for step in range(5):
            torch.manual_seed(100 * step + hvd.rank())
            batch = torch.randn(16, 32).to(place)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        trained.append([parameter.detach().cpu() for parameter in model.parameters()])
    for on_host, on_gpu in zip(*trained, strict=True):
        torch.testing.assert_close(on_gpu, on_host, rtol=1e-3, atol=1e-5)


def distributed() -> str:
    """torch.distributed for DDP: NCCL where each rank has a GPU, else gloo, which copies through host memory."""
    backend = "nccl" if AS_HOSTS or torch.cuda.device_count() >= hvd.size() else "gloo"
    dist.init_process_group(backend)
    return backend


def ddp(model: torch.nn.Module, where: torch.device) -> Any:
    ids = [where.index] if where.type == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)


def batches(rank: int, where: torch.device, steps: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(16, 32, generator=chance).to(where) for _ in range(steps)]


def small_model(where: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(where)


optimized = functools.partial(wrapped_sgd, rate=0.05, momentum=0.9)


def losses_of(model: Any, optimizer: Any, inputs: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in inputs:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@ranks(2)
def test_losses_are_those_of_ddp() -> None:
    where = device()
    inputs = batches(hvd.rank(), where, 20)
    model = small_model(where)
    ours = losses_of(model, optimized(model), inputs)
    distributed()
    wrapped = ddp(small_model(where), where)
    theirs = losses_of(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9), inputs)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-6)
    torch.cuda.synchronize()
    # A gloo group that goes with DDP, or right behind its last operation, can wait for ever: it holds the GIL then
    # and joins its thread, which wants that lock to forget the operation.
    del wrapped
    time.sleep(0.2)
    dist.destroy_process_group()


@ranks(2)
def test_a_captured_step_trains_as_an_uncaptured_one() -> None:
    """Where NCCL does not move the data (two ranks on one GPU) the capture is refused with the reason, and training goes on."""
    where = device()
    warm, inputs = batches(hvd.rank(), where, 3), batches(10 + hvd.rank(), where, 10)
    expected_model, model = small_model(where), small_model(where)
    plain = optimized(expected_model)
    losses_of(expected_model, plain, warm)
    expected = losses_of(expected_model, plain, inputs)
    optimizer = optimized(model)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses_of(model, optimizer, warm)
    torch.cuda.current_stream().wait_stream(side)
    graph, static = torch.cuda.CUDAGraph(), inputs[0].clone()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(static).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    if torch.cuda.device_count() < hvd.size() and not AS_HOSTS:
        with pytest.raises(HorovodInternalError, match="NCCL does not move"), torch.cuda.graph(graph):
            step()
        optimizer.synchronize()  # what is left of that step, on every rank
        assert all(torch.isfinite(torch.tensor(losses_of(model, optimizer, inputs[:3]))))
        return
    with torch.cuda.graph(graph):
        loss = step()
    found = []
    for batch in inputs:
        static.copy_(batch)
        graph.replay()
        found.append(loss.item())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)
    torch.cuda.synchronize()
    del graph


@ranks(2)
def test_torch_distributed_on_cuda_tensors() -> None:
    where, rank = device(), hvd.rank()
    dist.init_process_group("horoclone")
    tensor = torch.arange(1 << 20, device=where, dtype=torch.float32) * (rank + 1)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor, torch.arange(1 << 20, device=where, dtype=torch.float32) * 3)
    whole = torch.empty(6, device=where)
    dist.all_gather_into_tensor(whole, torch.full((3,), rank + 1.0, device=where))
    assert whole.tolist() == [1.0] * 3 + [2.0] * 3
    share = torch.empty(2, device=where)
    dist.reduce_scatter_tensor(share, torch.arange(4.0, device=where))
    assert share.tolist() == [4.0 * rank, 4.0 * rank + 2]
    part = torch.sparse_coo_tensor([[rank, 2]], torch.ones(2, 3), (4, 3)).to(where)
    dist.all_reduce(part)
    assert part.device == where and part.to_dense()[:, 0].tolist() == [1.0, 1.0, 2.0, 0.0]
    inputs = batches(rank, where, 5)
    wrapped = ddp(small_model(where), where)
    theirs = losses_of(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9), inputs)
    model = small_model(where)
    torch.testing.assert_close(
        torch.tensor(losses_of(model, optimized(model), inputs)), torch.tensor(theirs), rtol=1e-4, atol=1e-6
    )
    torch.cuda.synchronize()
    dist.destroy_process_group()


@ranks(2)
def test_sharded_optimizer_state_gives_the_same_losses() -> None:
    where = device()
    inputs = batches(hvd.rank(), where, 6)
    found = []
    for options in ({}, {"shard_optimizer_state": True}):
        model = small_model(where)
        found.append(losses_of(model, optimized(model, **options), inputs))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-4, atol=1e-6)


@ranks(2)
def test_optimizer_state_goes_to_every_rank_and_from_shares_into_a_checkpoint() -> None:
    where, rank = device(), hvd.rank()
    inputs = batches(hvd.rank(), where, 3)
    model = small_model(where)
    alone = torch.optim.Adam(model.parameters(), lr=0.01)
    if rank == 0:
        losses_of(model, alone, inputs)
    hvd.broadcast_optimizer_state(alone, root_rank=0)
    moments = [entry["exp_avg"] for entry in alone.state.values()]
    assert len(moments) == 4 and all(moment.device == where for moment in moments)
    both = hvd.allgather(torch.cat([moment.flatten() for moment in moments]).unsqueeze(0))
    assert torch.equal(both[0], both[1]) and both.abs().max() > 0
    states = []
    for options in ({}, {"shard_optimizer_state": True}):
        model = small_model(where)
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(adam, model.named_parameters(), **options)
        losses_of(model, optimizer, inputs)
        if options:
            optimizer.consolidate_state_dict()
        states.append(optimizer.state_dict()["state"])
    for index, entry in states[0].items():
        for key, value in entry.items():
            torch.testing.assert_close(states[1][index][key], value, rtol=1e-4, atol=1e-6)
