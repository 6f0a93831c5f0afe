"""Names as ranks match them: whole, whatever characters they have, or refused on the rank that gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from world import ranks

import horoclone
import horoclone.torch

KINDS = ["numpy", "torch"]
kinds = pytest.mark.parametrize("kind", KINDS)
LONGEST = 1 << 16  # bytes of a name


def api(kind: str) -> tuple[Any, Callable[..., Any]]:
    if kind == "numpy":
        return horoclone, lambda *shape: np.ones(shape, np.float32)
    return horoclone.torch, lambda *shape: torch.ones(shape)


def calls(hvd: Any, ones: Callable[..., Any], name: str) -> list[Callable[[], Any]]:
    return [
        lambda: hvd.allreduce(ones(3), op=hvd.Sum, name=name),
        lambda: hvd.allreduce_(ones(3), op=hvd.Sum, name=name),
        lambda: hvd.allreduce_async(ones(3), op=hvd.Sum, name=name),
        lambda: hvd.grouped_allreduce([ones(3)], op=hvd.Sum, name=name),
        lambda: hvd.grouped_allreduce_async_([ones(3)], op=hvd.Sum, name=name),
        lambda: hvd.allgather(ones(3), name=name),
        lambda: hvd.broadcast(ones(3), 0, name=name),
        lambda: hvd.alltoall(ones(hvd.size()), name=name),
        lambda: hvd.reducescatter(ones(4), op=hvd.Sum, name=name),
    ]


@kinds
@ranks(2)
def test_a_name_with_a_nul_character_is_refused_where_it_is_given(kind: str) -> None:
    hvd, ones = api(kind)
    for after in range(2):  # in the first round the fast path is not open yet
        mine = "bias\0one" if hvd.rank() == 0 else "bias\0two"
        for call in calls(hvd, ones, mine) + calls(hvd, ones, "\0"):
            with pytest.raises(ValueError, match="NUL"):
                call()
        assert hvd.allreduce(ones(2), op=hvd.Sum, name="bias").tolist() == [2, 2], after


@kinds
@ranks(2)
def test_the_longest_name_works_and_a_longer_one_is_refused_on_its_rank_alone(kind: str) -> None:
    hvd, ones = api(kind)
    longest = "ä" * (LONGEST // 2)  # two bytes each
    for _ in range(2):
        assert hvd.allreduce(ones(2), op=hvd.Sum, name=longest).tolist() == [2, 2]
    if hvd.rank() == 1:
        for call in calls(hvd, ones, longest + "x"):
            with pytest.raises(ValueError, match=f"{LONGEST + 1} bytes") as raised:
                call()
            assert len(str(raised.value)) < 500
    assert hvd.allreduce(ones(2), op=hvd.Sum, name="after").tolist() == [2, 2]


@kinds
@ranks(2)
def test_a_shape_that_no_message_can_tell_is_refused_on_its_rank_alone(kind: str) -> None:
    hvd, ones = api(kind)
    deep = ones(*[1] * 64)
    assert hvd.allreduce(deep, op=hvd.Sum).reshape(-1).tolist() == [2]
    if hvd.rank() == 0:
        native = horoclone.runtime.native()
        memory = np.ones(1, np.float32)
        at = memory.ctypes.data
        for shape in ([1] * 65, [1 << 59], [1 << 31, 1 << 31], [0, 1 << 62]):
            with pytest.raises(ValueError, match=r"dimensions|elements"):
                native.submit(0, "shaped", at, at, shape, 9)
    assert hvd.allreduce(ones(2), op=hvd.Sum, name="after").tolist() == [2, 2]
