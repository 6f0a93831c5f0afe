"""Sparse tensors in torch.distributed on the backend `horoclone`: sums, what is refused, and embeddings under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import distributed, ranks

import horoclone.torch as hvd


def part_of(rank: int, sparse_dims: int, dense: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """2 * rank entries, two of them in one place; rank 0 has none."""
    chance = torch.Generator().manual_seed(rank)
    count = 2 * rank
    places = torch.randint(0, 4, (sparse_dims, count), generator=chance)
    if count:
        places[:, 1] = places[:, 0]
    values = torch.randint(1, 9, (count, *dense), generator=chance).to(dtype)
    return torch.sparse_coo_tensor(places, values, (4,) * sparse_dims + dense)


@ranks(1, 3)
def test_a_sparse_tensor_is_summed_in_place() -> None:
    with distributed() as (rank, size):
        for sparse_dims, dense in ((1, ()), (1, (3,)), (2, ()), (2, (2, 5)), (3, (1,))):
            for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
                everybody = [part_of(r, sparse_dims, dense, dtype) for r in range(size)]
                wanted = sum(part.to_dense().double() for part in everybody)
                mine = everybody[rank].clone()
                dist.all_reduce(mine)
                assert mine.is_sparse and mine.is_coalesced() and mine.dtype is dtype
                assert torch.equal(mine.to_dense().double(), wanted), (sparse_dims, dense, dtype)
                if dtype is torch.float32:
                    mine = everybody[rank].clone()
                    dist.all_reduce(mine, dist.ReduceOp.AVG)
                    assert torch.allclose(mine.to_dense().double(), wanted / size)
                    mine = everybody[rank].clone()
                    dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5))
                    assert torch.equal(mine.to_dense().double(), wanted / 2)


@ranks(3)
def test_sparse_sums_are_asynchronous_and_have_futures() -> None:
    with distributed() as (rank, size):
        parts = [part_of(rank, 1, (3,), torch.float32) * (i + 1) for i in range(5)]
        wanted = sum(part_of(r, 1, (3,), torch.float32).to_dense() for r in range(size))
        works = [dist.all_reduce(part, async_op=True) for part in parts]
        (first,) = works[0].get_future().wait()
        assert torch.equal(first.to_dense(), wanted)
        for i, work in enumerate(works):
            work.wait()
            assert torch.equal(parts[i].to_dense(), wanted * (i + 1))


@ranks(2)
def test_what_sparse_tensors_cannot_do_is_said_and_the_group_goes_on() -> None:
    with distributed() as (rank, size):
        mine = part_of(1, 1, (), torch.float32)
        with pytest.raises(ValueError, match="SUM, AVG and PREMUL_SUM"):
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        with pytest.raises(ValueError, match="one by one"):
            dist.group.WORLD.allreduce([mine, torch.ones(2)])
        with pytest.raises(ValueError, match="floating-point"):
            dist.all_reduce(part_of(1, 1, (), torch.int64), dist.ReduceOp.AVG)
        with pytest.raises(ValueError, match=r"layout torch.sparse_csr.*to_dense"):
            dist.all_reduce(torch.eye(3).to_sparse_csr())
        with pytest.raises(ValueError, match=r"layout torch.sparse_coo.*to_dense"):
            dist.reduce(mine, 0)
        other = torch.sparse_coo_tensor([[0]], [1.0], (4 + rank,))
        with pytest.raises(hvd.Mismatch, match="differ in size"):
            dist.all_reduce(other)
        assert other.to_dense().tolist() == [1.0] + [0.0] * (3 + rank)
        with pytest.raises(hvd.Mismatch):
            dist.all_reduce(part_of(1, 1, (2 + rank,), torch.float32))
        dist.all_reduce(mine)
        assert torch.equal(mine.to_dense(), size * part_of(1, 1, (), torch.float32).to_dense())


# Freeing a DDP with its gloo group can deadlock with gloo's threads, in torch 2.13
never_freed: list[Any] = []


def embedding_gradients(backend: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Linear(4, 3))
    with distributed(backend) as (rank, _):
        never_freed.append(dist.group.WORLD if backend == "gloo" else None)
        trained = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for step in range(4):
            words = (torch.arange(6) * (rank + 2) + step) % 50
            optimizer.zero_grad()
            trained(words).square().sum().backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()
        gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
        return [p.detach().clone() for p in model.parameters()] + [g.clone() for g in gradients]


@ranks(3)
def test_an_embedding_with_sparse_gradients_trains_under_ddp_as_with_gloo() -> None:
    ours = embedding_gradients("horoclone")
    theirs = embedding_gradients("gloo")
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-6), (a, b)
