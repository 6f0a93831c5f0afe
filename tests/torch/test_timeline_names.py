"""The names of tensors in a timeline of a PyTorch job: the operation's before the tensor's, as Horovod writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import horoclone.torch as hvd


def calls() -> None:
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
    worlds.run(2, calls, env={"HOROVOD_TIMELINE": str(path), **env})
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
