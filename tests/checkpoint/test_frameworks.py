"""Tensors of PyTorch and arrays of JAX in a save, and the example."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import printed_by, ranks

import horoclone as hvd


@pytest.fixture
def place(tmp_path: Path) -> str:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    return str(tmp_path)


@ranks(2)
def test_a_model_and_its_optimizer_come_back(place):
    import torch

    import horoclone.torch as hvd

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1).bfloat16()
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    hvd.checkpoint.save(place, state)
    optimizer.step()
    hvd.checkpoint.wait()
    for found in (hvd.checkpoint.load(place), hvd.checkpoint.load(place, like=state)):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        for name, value in expected.items():
            assert torch.equal(found["model"][name], value) and found["model"][name].dtype == value.dtype, (
                name
            )
        assert found["optimizer"]["state"][0]["step"] == 1 and torch.equal(
            found["rng"], torch.get_rng_state()
        )


@ranks(2)
def test_an_elastic_state_of_torch_goes_to_the_disk_and_comes_back(place):
    import torch

    import horoclone.torch as hvd

    def a_state(seed):
        torch.manual_seed(seed + hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        sampler = hvd.elastic.ElasticSampler(range(100))
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[])
        state.checkpoint(place, every=3)
        return state

    @hvd.elastic.run
    def train(state):
        for _ in range(5):  # sync has made commit 1, so commit 3 goes to the disk and commit 6 as well
            state.optimizer.zero_grad()
            state.model(torch.randn(8, 4)).square().mean().backward()
            state.optimizer.step()
            state.sampler.record_batch(0, 4)
            state.epoch += 1
            state.seen.append(state.epoch)
            state.commit()
        return {name: value.clone() for name, value in state.model.state_dict().items()}

    @hvd.elastic.run
    def look(state):
        return state.model.state_dict()

    expected = train(a_state(1))
    assert hvd.elastic.last_recovery().source == "start" and hvd.checkpoint.saves(place) == [1, 2]
    state = a_state(7)
    found = look(state)
    assert hvd.elastic.last_recovery().source == "disk"
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (state.epoch, state.seen, state.sampler.processed_num) == (5, [1, 2, 3, 4, 5], 5 * 4 * hvd.size())
    assert state.optimizer.state_dict()["state"][0]["step"] == 5

    other = hvd.elastic.TorchState(torch.nn.Linear(2, 2), epoch=0, more=1)
    other.checkpoint(place)
    try:
        look(other)
    except hvd.checkpoint.CheckpointError as error:
        assert "rank 0 could not go on from the disk: the save has the attributes ['epoch', 'seen'" in str(
            error
        ), error
    else:
        raise AssertionError("the save of another state was taken")


def test_an_elastic_state_of_jax_goes_to_the_disk_and_comes_back(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from horoclone.checkpoint import load
    from horoclone.checkpoint.saving import save_alone
    from horoclone.jax.elastic import JaxState

    def a_state(value: float) -> Any:
        params = {"w": jax.numpy.full((2, 3), value, jax.numpy.bfloat16), "key": jax.random.key(int(value))}
        return JaxState(params=params, epoch=int(value))

    save_alone(tmp_path, a_state(3)._on_disk(), 1)
    state = a_state(1)
    state._from_disk(load(tmp_path))
    assert (
        (state.params["w"] == 3).all() and state.params["w"].dtype == jax.numpy.bfloat16 and state.epoch == 3
    )
    assert (jax.random.key_data(state.params["key"]) == jax.random.key_data(jax.random.key(3))).all()
    other = JaxState(params={"w": jax.numpy.ones((2, 2)), "key": jax.random.key(1)}, epoch=1)
    with pytest.raises(
        ValueError, match=r"variable params\['w'\] is bfloat16\[2, 3\] in the save and float32"
    ):
        other._from_disk(load(tmp_path))
    other.params = {"w": jax.numpy.full((2, 3), 7, jax.numpy.bfloat16), "k": jax.random.key(7)}
    other.save()
    with pytest.raises(ValueError, match=r"only in the save are .*'key'.*only in this state .*'k'"):
        other._from_disk(load(tmp_path))
    state.params = {**state.params, "more": jax.numpy.ones(2)}
    state.restore()
    assert set(state.params) == {"w", "key"}, "with the form of what was saved"
    found = load(tmp_path)
    found["variables"] = {str(place): one for place, one in enumerate(found["variables"].values())}
    state._from_disk(found)
    assert (state.params["w"] == 3).all(), "as saves once were"


def test_arrays_of_jax(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from horoclone.checkpoint.leaves import kind_named
    from horoclone.jax import checkpoint

    kind, array = kind_named("jax"), jax.numpy.arange(6, dtype=jax.numpy.bfloat16).reshape(2, 3)
    assert kind.name == "jax" and kind.owns(array) and callable(checkpoint.load)
    data = np.empty(kind.form(array).nbytes, np.uint8)
    kind.copy(array, data)
    for like in (None, array):
        made = kind.made(kind.form(array), data, like)
        assert isinstance(made, jax.Array) and made.dtype == array.dtype and (made == array).all()
    with pytest.raises(TypeError, match="jax.random.key_data"):
        kind.form(jax.random.key(1))


@ranks(2, init=False)
def test_the_example_goes_on_where_it_ended(place):
    pytest.importorskip("torch")
    example = Path(__file__).resolve().parents[2] / "examples" / "torch_checkpoint.py"
    for first in (0, 30):
        said = printed_by(example, "--path", place, "--steps", "30", "--steps-per-save", "10")
        is_told = re.search(rf"steps {first} to {first + 30}: loss [\d.]+; saves \[", said)
        assert bool(is_told) == (os.environ["HOROCLONE_RANK"] == "0"), said
        hvd.shutdown()
