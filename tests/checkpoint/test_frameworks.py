"""Tensors of PyTorch and arrays of JAX in a save, and the example."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import ranks


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


@ranks(1)
def test_every_form_of_tensor(place):
    import torch

    import horoclone.torch as hvd

    state = {
        "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "turned": torch.arange(6).reshape(2, 3).T,
        "half": torch.ones(3, dtype=torch.float16), "complex": torch.ones(2, dtype=torch.complex64).conj() * 1j,
        "leaf": torch.nn.Parameter(torch.ones(2)), "bool": torch.tensor([True, False]), "view": torch.arange(9)[2:5],
        "eight": torch.ones(5).to(torch.float8_e5m2),
    }  # fmt: skip
    hvd.checkpoint.save(place, state, async_=False)
    for found in (hvd.checkpoint.load(place), hvd.checkpoint.load(place, like=state)):
        for name, value in state.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
            assert torch.equal(found[name].to(torch.complex64), value.detach().to(torch.complex64)), name
    as_arrays = hvd.checkpoint.load(place, like={**state, "half": np.ones(3, np.float16)})
    assert isinstance(as_arrays["half"], np.ndarray)
    try:
        hvd.checkpoint.save(place, {"x": torch.eye(3).to_sparse()})
    except TypeError as error:
        assert "state['x']: tensors of torch.float32, torch.sparse_coo" in str(error)
    else:
        raise AssertionError("a sparse tensor was saved")


def test_arrays_of_jax(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from horoclone.checkpoint.leaves import kind_named
    from horoclone.jax import checkpoint

    kind, array = kind_named("jax"), jax.numpy.arange(6, dtype=jax.numpy.bfloat16).reshape(2, 3)
    assert kind.name == "jax" and kind.owns(array) and callable(checkpoint.load)
    data = kind.copied(array)
    for like in (None, array):
        made = kind.made(kind.form(array), data, like)
        assert isinstance(made, jax.Array) and made.dtype == array.dtype and (made == array).all()
    with pytest.raises(TypeError, match="jax.random.key_data"):
        kind.form(jax.random.key(1))


def test_the_example_goes_on_where_it_ended(launch: Any, examples: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    program = [sys.executable, examples / "torch_checkpoint.py", "--path", tmp_path, "--steps", "30"]
    for size, first in ((2, 0), (1, 30)):  # and on another number of ranks
        command = [
            sys.executable,
            "-m",
            "horoclone.launch",
            "-np",
            str(size),
            *program,
            "--steps-per-save",
            "10",
        ]
        done = launch(command, timeout_s=120, env={"OMP_NUM_THREADS": "1"})
        assert re.search(rf"steps {first} to {first + 30}: loss [\d.]+; saves \[", done.stdout), done.output
