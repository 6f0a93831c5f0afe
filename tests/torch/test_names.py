"""Names as ranks match them: whole, or refused on the rank that gives them; how long: csrc/tests/engine/test_submit_limits.cc."""

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
