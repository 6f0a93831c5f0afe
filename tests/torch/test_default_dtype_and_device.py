"""torch.set_default_dtype() and torch.set_default_device() are about the tensors that the user makes: what horoclone
sends and keeps stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from world import alike, ranks, wrapped_sgd

import horoclone.torch as hvd
from horoclone.torch.elastic import TorchState

HERE: Any = {"device": "cpu", "dtype": torch.float32}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_optimizer_state": True},
    "int8": {"compression": hvd.Compression.int8},
    "topk": {"compression": hvd.Compression.topk(ratio=0.5)},
    "powersgd": {"compression": hvd.Compression.powersgd(rank=1, start_step=0, min_ratio=0.5)},
    "adasum": {"op": hvd.Adasum},
    "quorum": {"quorum": 1.0},
}


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def trained(option: str) -> list[torch.Tensor]:
    """The parameters after some steps, of which two are made again from an elastic state."""
    model = torch.nn.Linear(6, 8, **HERE)
    for parameter in model.parameters():
        parameter.data = torch.linspace(-1, 1, parameter.numel(), **HERE).view(parameter.shape)
    optimizer: Any = wrapped_sgd(model, momentum=0.9, **OPTIONS[option])
    state = None if option == "quorum" else TorchState(model=model, optimizer=optimizer)

    def step(number: int) -> None:
        x = torch.linspace(-1, 1 + number + hvd.rank(), 24, **HERE).view(4, 6)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for number in range(7):
        if state is not None and number == 3:
            state.commit()
        if state is not None and number == 5:
            state.restore()
        step(number)
    if option == "quorum":
        optimizer.join()
    return [parameter.detach().clone() for parameter in model.parameters()]


@ranks(2)
def test_an_optimizer_trains_as_without_them() -> None:
    for option in OPTIONS:
        expected = trained(option)
        for dtype, device in ((torch.float64, "meta"), (torch.bfloat16, None)):
            with defaults(dtype, device):
                found = trained(option)
            assert alike(found)
            for mine, want in zip(found, expected, strict=True):
                assert torch.equal(mine, want), (option, dtype)


@ranks(2)
def test_results_are_in_the_memory_where_the_tensors_are() -> None:
    mine = torch.full((hvd.rank(), 2), 1.0, **HERE)
    with defaults(torch.float64, "meta"):
        assert hvd.allgather(mine).tolist() == [[1.0, 1.0]]
        assert hvd.allgather(mine[:0]).device.type == "cpu"
        places = torch.tensor([[hvd.rank()]], device="cpu")
        sparse = torch.sparse_coo_tensor(places, torch.ones(1, **HERE), (2,), device="cpu")
        total = hvd.synchronize(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum))
        assert total.to_dense().tolist() == [1.0, 1.0]
        ones = torch.ones(2, **HERE)
        rows, counts = hvd.alltoall(ones, splits=torch.tensor([1, 1], dtype=torch.int32, device="cpu"))
        assert rows.tolist() == [1.0, 1.0] and counts.tolist() == [1, 1]
        model = torch.nn.Linear(2, 2, **HERE)
        optimizer = torch.optim.Adam(model.parameters())
        if hvd.rank() == 0:
            model(ones).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(part.device.type == "cpu" for own in optimizer.state.values() for part in own.values())
