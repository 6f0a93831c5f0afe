"""hvd.allreduce(op=hvd.Adasum) of torch tensors against a float64 model of the tree of pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from world import ranks

import horoclone.torch as hvd

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-13}


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a_dot_b, a_norm, b_norm = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    of_a = 1 - a_dot_b / (2 * a_norm) if a_norm else 1
    of_b = 1 - a_dot_b / (2 * b_norm) if b_norm else 1
    return of_a * a + of_b * b


def tree(vectors: list[np.ndarray]) -> np.ndarray:
    """Ranks beyond a power of two are folded in first, then neighbours combine."""
    extra = len(vectors) - 2 ** (len(vectors).bit_length() - 1)
    vectors = [pair(*vectors[2 * i : 2 * i + 2]) for i in range(extra)] + vectors[2 * extra :]
    while len(vectors) > 1:
        vectors = [pair(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
    return vectors[0]


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * seed + rank)
    return (0.3 + torch.randn(shape, generator=chance, dtype=torch.float64)).to(dtype)


def close(result: torch.Tensor, tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    expected = scale * tree([tensor.double().numpy() for tensor in tensors])
    assert result.dtype == tensors[0].dtype and result.shape == tensors[0].shape
    error = np.abs(result.double().numpy() - expected).max(initial=0)
    assert error <= TOLERANCE[result.dtype] * np.abs(expected).max(initial=1e-30), (result.dtype, error)


def check_among(members: list[int], process_set: hvd.ProcessSet) -> None:
    me = hvd.rank()
    for dtype in TOLERANCE:
        for shape in [(), (7,), (3, 0), (2, 5, 3), (30_011,)]:
            everybody = [data(rank, shape, dtype) for rank in members]
            mine = data(me, shape, dtype)
            result = hvd.allreduce(mine, op=hvd.Adasum, process_set=process_set)
            close(result, everybody)
            assert torch.equal(mine, data(me, shape, dtype))
            later = hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Adasum, process_set=process_set))
            place, other = mine.clone(), mine.clone()
            assert hvd.allreduce_(place, op=hvd.Adasum, process_set=process_set) is place
            handle = hvd.allreduce_async_(other, op=hvd.Adasum, name="n", process_set=process_set)
            assert hvd.synchronize(handle) is other
            for again in (later, place, other):
                assert torch.equal(again, result)
            everywhere = hvd.allgather(result.flatten().unsqueeze(0), process_set=process_set)
            assert all(torch.equal(row, everywhere[0]) for row in everywhere), "the same bits on every rank"
    shapes = [(100,), (), (3, 4), (20_000,)]
    kinds = [torch.float64, torch.float32, torch.float64, torch.bfloat16]
    groups = [[data(r, s, k, 1) for s, k in zip(shapes, kinds, strict=True)] for r in members]
    for group in groups:
        group[0] *= 1000.0  # each tensor of a group has coefficients of its own
    mine = groups[members.index(me)]
    for name in (None, "group"):
        for result, *vectors in zip(
            hvd.grouped_allreduce(mine, op=hvd.Adasum, name=name, process_set=process_set),
            *groups,
            strict=True,
        ):
            close(result, vectors)
    everybody = [data(r, (50,), torch.float64, 2) for r in members]
    result = hvd.allreduce(
        data(me, (50,), torch.float64, 2), op=hvd.Adasum, prescale_factor=4.0, postscale_factor=0.5,
        process_set=process_set,
    )  # fmt: skip
    close(result, everybody, 2.0)


@ranks(3, init=False)
def test_adasum_of_one_to_three_ranks_equals_the_model() -> None:
    """Up to eight: csrc/tests/collective/test_adasum.cc."""
    sets = [hvd.ProcessSet(ranks) for ranks in ([1], [0, 2])]
    hvd.init(process_sets=sets)
    for one in [*sets, hvd.global_process_set]:
        if hvd.rank() in one.ranks:
            check_among(list(one.ranks), one)


@ranks(2)
def test_what_adasum_does_not_take() -> None:
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises(ValueError, match="Adasum needs floating-point tensors"):
            hvd.allreduce(torch.ones(3, dtype=dtype), op=hvd.Adasum)
    with pytest.raises(ValueError, match="AVERAGE and SUM"):
        hvd.reducescatter(torch.ones(4), op=hvd.Adasum)
    weights = torch.ones(2, requires_grad=True)
    with pytest.raises(hvd.Unsupported, match="Adasum has no gradient"):
        hvd.allreduce(weights, op=hvd.Adasum).sum().backward()
    if hvd.rank() == 0:
        mine = data(0, (40,), torch.float32)
        alone = hvd.allreduce(mine, op=hvd.Adasum, name="alone")
        close(alone, [mine, torch.zeros(40)])  # a rank that has joined adds nothing
    assert hvd.join() == 0
