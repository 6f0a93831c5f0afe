"""Random shapes, dtypes and operations; every rank draws the same cases, and NumPy says what is right."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from world import ranks

import horoclone.torch as hvd

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
SHAPES = st.lists(st.one_of(st.integers(0, 5), st.sampled_from([31, 64, 129])), max_size=3).map(tuple)


def everywhere_alike(examples: int) -> Any:
    """All ranks must draw the same examples: a fixed seed, no database, no shrinking (which would part them)."""
    from hypothesis import Phase

    def decorate(test: Any) -> Any:
        test = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(test)
        return seed(20260)(test)

    return decorate


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype, number: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(31 * number + rank)
    low, high = (0, 2) if dtype is torch.bool else (0, 5) if dtype is torch.uint8 else (-4, 5)
    return torch.randint(low, high, shape, generator=chance).to(dtype)


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64).numpy()


@ranks(2, 3)
def test_allreduce_agrees_with_numpy() -> None:
    @everywhere_alike(150)
    @given(
        SHAPES,
        st.sampled_from(DTYPES),
        st.sampled_from([hvd.Sum, hvd.Min, hvd.Max, hvd.Product]),
        st.integers(0, 999),
        st.booleans(),
    )
    def check(shape: tuple[int, ...], dtype: torch.dtype, op: int, number: int, named: bool) -> None:
        parts = [part(r, shape, dtype, number) for r in range(hvd.size())]
        fold = {hvd.Sum: np.add, hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}[op]
        expected = wide(parts[0])
        for other in parts[1:]:
            expected = fold(expected, wide(other))
        out = hvd.allreduce(parts[hvd.rank()], op=op, name=f"case.{number}" if named else None)
        as_seen = torch.from_numpy(np.atleast_1d(expected)).to(dtype).view(shape)
        assert torch.equal(out, as_seen), (shape, dtype, op, number)

    check()


@ranks(2, 3)
def test_average_of_floats_agrees_with_numpy_within_one_rounding() -> None:
    @everywhere_alike(80)
    @given(
        SHAPES, st.sampled_from(DTYPES[6:]), st.integers(0, 999), st.floats(0.25, 4.0), st.floats(0.25, 4.0)
    )
    def check(shape: tuple[int, ...], dtype: torch.dtype, number: int, pre: float, post: float) -> None:
        parts = []
        for r in range(hvd.size()):
            chance = torch.Generator().manual_seed(31 * number + r)
            parts.append(torch.rand(shape, generator=chance).add(0.5).to(dtype))
        expected = np.mean([wide(p) for p in parts], axis=0) * pre * post
        out = hvd.allreduce(parts[hvd.rank()], prescale_factor=pre, postscale_factor=post)
        eps = torch.finfo(dtype).eps
        np.testing.assert_allclose(wide(out), expected, rtol=4 * eps)

    check()


@ranks(2, 3)
def test_allgather_alltoall_and_reducescatter_agree_with_numpy() -> None:
    @everywhere_alike(80)
    @given(
        st.lists(st.integers(0, 4), min_size=3, max_size=3),
        SHAPES.filter(lambda s: len(s) < 3 and math.prod(s) < 500),
        st.sampled_from(DTYPES),
        st.integers(0, 999),
    )
    def check(rows: list[int], row: tuple[int, ...], dtype: torch.dtype, number: int) -> None:
        n, me = hvd.size(), hvd.rank()
        parts = [part(r, (rows[r], *row), dtype, number) for r in range(n)]
        assert torch.equal(hvd.allgather(parts[me]), torch.cat(parts))
        table = [[(number + 3 * r + s) % 4 for s in range(n)] for r in range(n)]
        parts = [part(r, (sum(table[r]), *row), dtype, number) for r in range(n)]
        out, received = hvd.alltoall(parts[me], splits=table[me])
        cuts = [parts[r][sum(table[r][:me]) : sum(table[r][: me + 1])] for r in range(n)]
        assert torch.equal(out, torch.cat(cuts)) and received.tolist() == [table[r][me] for r in range(n)]
        if dtype is not torch.bool:
            total = sum(rows)
            parts = [part(r, (total, *row), dtype, number) for r in range(n)]
            summed = torch.from_numpy(sum(wide(p) for p in parts)).to(dtype)
            share = [total // n + (r < total % n) for r in range(n)]
            mine = summed[sum(share[:me]) : sum(share[: me + 1])]
            assert torch.equal(hvd.reducescatter(parts[me], op=hvd.Sum), mine)

    check()


@ranks(2)
def test_random_models_train_alike() -> None:
    @everywhere_alike(15)
    @given(
        st.lists(st.integers(1, 40), min_size=2, max_size=6),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.integers(1, 3),
        st.sampled_from([hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16]),
        st.sampled_from([0, 1, 3]),
        st.booleans(),
    )
    def check(
        widths: list[int], dtype: torch.dtype, passes: int, compression: Any, groups: int, to_none: bool
    ) -> None:
        torch.manual_seed(0)
        pairs = pairwise(widths)
        model = torch.nn.Sequential(*(torch.nn.Linear(a, b, dtype=dtype) for a, b in pairs))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.01, momentum=0.5),
            model.named_parameters(),
            compression=compression,
            backward_passes_per_step=passes,
            groups=groups,
        )
        for step in range(3):
            for _ in range(passes):
                x = torch.randn(2, widths[0], generator=torch.Generator().manual_seed(9 * step + hvd.rank()))
                model(x.to(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        flat = torch.cat([p.detach().double().flatten() for p in model.parameters()]).unsqueeze(0)
        rows = hvd.allgather(flat)
        assert torch.equal(rows[0], rows[1])

    check()
