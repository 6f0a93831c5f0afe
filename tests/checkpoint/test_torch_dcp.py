"""torch.distributed.checkpoint writes and reads our saves, with whole and with sharded tensors, on our backend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import later, ranks

from horoclone import checkpoint
from horoclone.checkpoint.saving import save_alone

torch = pytest.importorskip("torch")
dist, dcp = later("torch.distributed"), later("torch.distributed.checkpoint")


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3).bfloat16())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def a_state(seed: int = 0) -> dict[str, Any]:
    model, optimizer = trained(seed)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": seed, "names": ["a", "b"],
        "random": np.arange(seed, seed + 4),
    }  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


def named(value: Any) -> Any:
    """torch makes strings of keys that are integers."""
    if isinstance(value, dict):
        return {str(key): named(one) for key, one in value.items()}
    return type(value)(map(named, value)) if isinstance(value, (list, tuple)) else value


def test_dcp_writes_what_load_reads(tmp_path: Path) -> None:
    from horoclone.checkpoint.torch.dcp import Writer

    for seed in (1, 2, 3):
        dcp.save(a_state(seed), storage_writer=Writer(tmp_path, keep=2), no_dist=True)
    assert checkpoint.saves(tmp_path) == [2, 3]
    for number in (2, 3):
        assert same(checkpoint.load(tmp_path, number=number), named(a_state(number)))


def test_dcp_reads_what_save_wrote_and_what_dcp_wrote(tmp_path: Path) -> None:
    from horoclone.checkpoint.torch.dcp import Reader, Writer

    save_alone(tmp_path / "ours", a_state(4), 1)
    dcp.save(a_state(4), storage_writer=Writer(tmp_path / "theirs"), no_dist=True)
    for place in ("ours", "theirs"):
        state = a_state(9)
        dcp.load(state, storage_reader=Reader(tmp_path / place), no_dist=True)
        assert same(state, a_state(4)), place
    part = {"model": a_state(9)["model"]}
    dcp.load(part, storage_reader=Reader(tmp_path / "ours"), no_dist=True)
    assert same(part["model"], a_state(4)["model"])


def test_saves_are_converted_both_ways(tmp_path: Path) -> None:
    from horoclone.checkpoint.torch.dcp import from_dcp, to_dcp

    save_alone(tmp_path / "ours", a_state(5), 1)
    to_dcp(tmp_path / "ours", tmp_path / "dcp")
    state = a_state(9)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state, a_state(5))
    assert from_dcp(tmp_path / "dcp", tmp_path / "again").name == "save-00000001"
    assert same(checkpoint.load(tmp_path / "again"), named(a_state(5)))


def test_what_would_be_pickled_is_refused_and_damage_is_told(tmp_path: Path) -> None:
    from horoclone.checkpoint.torch.dcp import Reader, Writer

    with pytest.raises(
        BaseException, match=r"state\['f'\] is a builtins.*torch.distributed.checkpoint would pickle it"
    ):
        dcp.save({"w": torch.ones(2), "f": print}, storage_writer=Writer(tmp_path), no_dist=True)
    assert checkpoint.saves(tmp_path) == []
    dcp.save({"w": torch.ones(200)}, storage_writer=Writer(tmp_path), no_dist=True)
    (name,) = (tmp_path / "save-00000001").glob("*.safetensors")
    whole = name.read_bytes()
    name.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(BaseException, match="checksum"):
        dcp.load({"w": torch.zeros(200)}, storage_reader=Reader(tmp_path), no_dist=True)
    with pytest.raises(BaseException, match="no complete save"):
        dcp.load({"w": torch.zeros(200)}, storage_reader=Reader(tmp_path / "elsewhere"), no_dist=True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path)


@ranks(2)
def test_what_is_sharded_is_written_in_pieces_and_read_into_any_sharding(path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    import horoclone.torch  # noqa: F401 - the process group's backend
    from horoclone.checkpoint.torch.dcp import Reader, Writer

    dist.init_process_group("horoclone")

    def a_job(seed: int, shard: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        if shard:
            fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    def full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in model.named_parameters()}

    model, optimizer = a_job(1, shard=True)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": 3}, storage_writer=Writer(path))
    expected = full(model)
    other, other_optimizer = a_job(2, shard=False)
    for again, its_optimizer in (a_job(3, shard=True), (other, other_optimizer)):
        weights, moments = get_state_dict(again, its_optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, storage_reader=Reader(path))
        set_state_dict(
            again, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert state["step"] == 3
        assert all(torch.equal(value, expected[name]) for name, value in full(again).items())
    assert len([name for name in os.listdir(f"{path}/save-00000001") if name.startswith("rank-")]) == 2
    dist.destroy_process_group()
    found = checkpoint.load(path)
    assert torch.equal(found["model"]["0.weight"], expected["0.weight"]) and found["step"] == 3
