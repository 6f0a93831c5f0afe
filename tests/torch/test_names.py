"""Names as ranks match them: whole, or refused on the rank that gives them; and as a timeline shows them, like Horovod's.

How long they may be: csrc/tests/engine/test_submit_limits.cc.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world import ranks

import horoclone
import horoclone.torch as hvd

KINDS = ["numpy", "torch"]
kinds = pytest.mark.parametrize("kind", KINDS)


def api(kind: str) -> tuple[Any, Callable[..., Any]]:
    if kind == "numpy":
        return horoclone, lambda *shape: np.ones(shape, np.float32)
    return hvd, lambda *shape: torch.ones(shape)


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


def every_kind() -> None:
    ones = torch.ones(3)
    hvd.allreduce(ones, name="layer.weight")
    hvd.synchronize(hvd.allreduce_async(ones))
    hvd.allgather(ones, name="rows")
    hvd.broadcast(ones, 0, name="layer.weight")
    hvd.alltoall(torch.ones(2), name="parts")
    hvd.reducescatter(torch.ones(2), op=hvd.Sum, name="share")
    hvd.synchronize(hvd.grouped_allreduce_async([ones, ones], name="group"))


def names_in(worlds: Any, tmp_path: Path, **env: str) -> set[str]:
    path = tmp_path / "timeline.json"
    worlds.run(2, every_kind, env={"HOROVOD_TIMELINE": str(path), **env})
    events = json.loads(path.read_text())
    return {event["args"]["name"] for event in events if event.get("name") == "process_name"}


def test_a_tensor_is_named_with_its_operation(worlds: Any, tmp_path: Path) -> None:
    names = names_in(worlds, tmp_path)
    assert names >= {
        "allreduce.layer.weight", "allgather.rows", "broadcast.layer.weight", "alltoall.parts",
        "reducescatter.share", "allreduce.group",
    }, names  # fmt: skip
    assert any(name.startswith("allreduce.noname.") for name in names), names
    assert "layer.weight" not in names


def test_the_environment_goes_before(worlds: Any, tmp_path: Path) -> None:
    names = names_in(worlds, tmp_path, HOROCLONE_TIMELINE_OPERATION_NAMES="0")
    assert names >= {"layer.weight", "rows", "allreduce (unnamed)"}, names
