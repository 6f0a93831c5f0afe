"""CUDA tensors on real GPUs. Skipped where torch sees none: tests/torch/test_gpu_double.py then stands alone."""

from __future__ import annotations

import pytest
import torch
from world import ranks

import horoclone.torch as hvd
from horoclone.errors import Mismatch

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU here: torch.cuda.is_available() is False"
    ),
    pytest.mark.timeout(600),
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def device() -> torch.device:
    """A GPU for each rank where there are enough; else they share, and the data goes through host memory."""
    index = hvd.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def values(dtype: torch.dtype, rank: int, count: int) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


@ranks(2)
def test_every_operation_and_dtype() -> None:
    where, rank, size = device(), hvd.rank(), hvd.size()
    for dtype in [*FLOATS, *INTEGERS]:
        for count in (1, 1000, 300_001):
            ours = [values(dtype, r, count) for r in range(size)]
            wide = torch.stack([one.double() for one in ours])
            for op, expected in (
                (hvd.Sum, wide.sum(0)),
                (hvd.Min, wide.amin(0)),
                (hvd.Average, wide.mean(0)),
            ):
                if op == hvd.Average and not dtype.is_floating_point:
                    expected = (wide.sum(0) / size).trunc()
                result = hvd.allreduce(ours[rank].to(where), op=op)
                assert result.device == where and result.dtype == dtype
                tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
                torch.testing.assert_close(result.cpu().double(), expected, rtol=tolerance, atol=0)
            rows = hvd.allgather(ours[rank][: count - rank].to(where))
            assert torch.equal(rows.cpu(), torch.cat([ours[r][: count - r] for r in range(size)]))
            assert torch.equal(hvd.broadcast(ours[rank].to(where), 1).cpu(), ours[1])
    flags = torch.tensor([rank == 0, False, True], device=where)
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, False, True]
    sent, received = hvd.alltoall(torch.arange(3, device=where), torch.tensor([1, 2], dtype=torch.int32))
    assert sent.tolist() == ([0, 0] if rank == 0 else [1, 2, 1, 2]) and received.tolist() == [1 + rank] * 2
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
    group = [torch.full((n,), rank + 1.0, device=where) for n in (1, 5, 200_000)]
    assert [one[-1].item() for one in hvd.grouped_allreduce(group, op=hvd.Sum)] == [3.0] * 3
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
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
        )
        for step in range(5):
            torch.manual_seed(100 * step + hvd.rank())
            batch = torch.randn(16, 32).to(place)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        trained.append([parameter.detach().cpu() for parameter in model.parameters()])
    for on_host, on_gpu in zip(*trained, strict=True):
        torch.testing.assert_close(on_gpu, on_host, rtol=1e-3, atol=1e-5)


@ranks(2)
def test_lives_follow_each_other_without_a_leak_of_device_memory() -> None:
    tensor = torch.ones(1 << 20, device=device())
    hvd.allreduce(tensor)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        hvd.shutdown()
        hvd.init()
        assert hvd.allreduce(tensor, op=hvd.Average)[0].item() == 1.0
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] > before - (64 << 20)
