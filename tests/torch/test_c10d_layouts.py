"""torch.distributed on tensors of every layout and dtype: values, and what lies around them, as NumPy would have it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from world import distributed, ranks

import horoclone.torch  # noqa: F401  registers the backend

SHAPE = (2, 3, 4, 5)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


def offset(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(tensor[:1]), tensor])[1:]


def element(value: torch.Tensor) -> torch.Tensor:
    """Contiguous for torch whatever its stride, and its memory is not a row."""
    wide = torch.zeros(3, 4, dtype=value.dtype)
    wide[0, 1] = value
    return wide[0:1].t()[1]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "with gaps": every_second,
    "from the second row on": offset,
    "0-d": lambda t: t.flatten()[0].clone(),
    "empty": lambda t: t[:, :0].clone(),
    "a column": lambda t: t.reshape(6, 20).clone()[:, 3],
    "an element of a row": lambda t: element(t.flatten()[0]),
}
DTYPES = (
    torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits are values, but for bool; read as bytes, so that NaNs are equal."""
    chance = torch.Generator().manual_seed(rank)
    if dtype is torch.bool:
        return torch.randint(2, SHAPE, generator=chance).bool()
    size = dtype.itemsize
    bits = torch.randint(256, (*SHAPE[:-1], SHAPE[-1] * size), dtype=torch.uint8, generator=chance)
    return bits.view(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in (one, other)]
    bits = [t.view(torch.uint8) for t in flat]
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(*bits)


@ranks(3)
def test_what_moves_data_takes_every_layout_and_dtype() -> None:
    with distributed() as (rank, size):
        for dtype in DTYPES:
            for name, layout in LAYOUTS.items():
                everybody = [layout(values(r, dtype)) for r in range(size)]
                mine, where = everybody[rank], (dtype, name)
                strides = mine.stride()
                place = layout(values(rank + 7, dtype))
                place.copy_(mine)
                dist.broadcast(place, 1)
                assert same(place, everybody[1]) and place.stride() == strides, where
                outputs = [layout(values(9, dtype)) for _ in range(size)]
                dist.all_gather(outputs, mine)
                assert all(same(o, e) for o, e in zip(outputs, everybody, strict=True)), where
                outputs = [layout(values(9, dtype)) for _ in range(size)]
                dist.gather(mine, outputs if rank == 1 else None, 1)
                if rank == 1:
                    assert all(same(o, e) for o, e in zip(outputs, everybody, strict=True)), where
                place = layout(values(9, dtype))
                dist.scatter(place, everybody if rank == 1 else None, 1)
                assert same(place, everybody[rank]), where
                outputs = [layout(values(9, dtype)) for _ in range(size)]
                dist.all_to_all(outputs, [mine] * size)
                assert all(same(o, e) for o, e in zip(outputs, everybody, strict=True)), where
                place = layout(values(9, dtype))
                got = dist.irecv(place, (rank - 1) % size)
                dist.send(mine, (rank + 1) % size)
                got.wait()
                assert same(place, everybody[(rank - 1) % size]) and place.stride() == strides, where
                assert same(mine, everybody[rank]), where


@ranks(2)
def test_reductions_take_every_layout_and_leave_what_lies_between() -> None:
    with distributed() as (rank, size):
        for name, layout in LAYOUTS.items():
            plain = [torch.arange(120.0).view(SHAPE) * (r + 1) for r in range(size)]
            total = layout(plain[0] + plain[1])
            place = layout(plain[rank])
            strides = place.stride()
            dist.all_reduce(place)
            assert torch.equal(place, total) and place.stride() == strides, name
            place = layout(plain[rank])
            dist.reduce(place, 1)
            assert torch.equal(place, total if rank == 1 else layout(plain[rank])), name
        base = torch.zeros(4, 6)
        base[:, ::2] = rank + 1
        dist.all_reduce(base[:, ::2])
        assert torch.equal(base[:, ::2], torch.full((4, 3), 3.0)) and not base[:, 1::2].any()
        whole = torch.arange(24.0).view(4, 6)
        share = torch.zeros(6, 2).t()
        dist.reduce_scatter_tensor(share, whole.t().contiguous().t())
        assert torch.equal(share, 2 * whole[2 * rank : 2 * rank + 2])
        gathered = torch.zeros(6, 4).t()
        dist.all_gather_into_tensor(gathered, share)
        assert torch.equal(gathered, 2 * whole)


@ranks(2)
def test_ranks_may_have_layouts_of_their_own() -> None:
    with distributed() as (rank, _):
        plain = torch.arange(120.0).view(SHAPE)
        place = plain.clone() if rank == 0 else torch.zeros(SHAPE).to(memory_format=torch.channels_last)
        dist.broadcast(place, 0)
        assert torch.equal(place, plain) and place.is_contiguous() is (rank == 0)
        dist.all_reduce(place)
        assert torch.equal(place, 2 * plain)


@ranks(2)
def test_expanded_sources_are_read_as_values_and_expanded_targets_refused() -> None:
    with distributed() as (rank, size):
        source = torch.tensor([rank + 1.0]).expand(3)
        outputs = [torch.zeros(3) for _ in range(size)]
        dist.all_gather(outputs, source)
        assert outputs[0].tolist() == [1.0] * 3 and outputs[1].tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="single memory location"):
            dist.broadcast(torch.zeros(1).expand(3), 0)
