"""Saves become checkpoints of Orbax and come back, with the real library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horoclone.checkpoint import CheckpointError, Owned, load
from horoclone.checkpoint.saving import save_alone

ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed (pip install orbax-checkpoint)")
jax = pytest.importorskip("jax", reason="JAX is not installed")


def a_state() -> dict[str, Any]:
    params = {
        "w": jax.numpy.ones((2, 3), jax.numpy.bfloat16),
        "k": np.arange(3),
        "at": {0: np.ones(2), 1: np.zeros(1)},
    }
    return {"params": params, "step": 3, "lr": 0.5, "name": "run", "none": None, "pair": (1, jax.numpy.zeros(2)), "done": True}  # fmt: skip


def test_a_save_goes_to_orbax_and_comes_back(tmp_path: Path) -> None:
    from horoclone.checkpoint.jax.orbax import from_orbax, to_orbax

    save_alone(tmp_path / "ours", a_state(), 1)
    to_orbax(tmp_path / "ours", tmp_path / "theirs")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        theirs = checkpointer.restore(tmp_path / "theirs")
    assert theirs["step"] == 3 and theirs["name"] == "run" and theirs["none"] is None
    assert theirs["params"]["w"].dtype == jax.numpy.bfloat16 and (theirs["params"]["at"]["0"] == 1).all()
    assert from_orbax(tmp_path / "theirs", tmp_path / "again", like=a_state()).name == "save-00000001"
    found = load(tmp_path / "again", like=a_state())
    assert found["pair"][0] == 1 and isinstance(found["pair"], tuple) and found["lr"] == 0.5
    assert isinstance(found["params"]["w"], jax.Array) and (found["params"]["w"] == 1).all()
    assert (found["params"]["at"][1] == 0).all() and (found["params"]["k"] == np.arange(3)).all()
    from_orbax(tmp_path / "theirs", tmp_path / "plain")
    assert list(load(tmp_path / "plain")["params"]["at"]) == ["0", "1"]


def test_what_orbax_cannot_hold_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    from horoclone.checkpoint.jax.orbax import from_orbax, to_orbax

    save_alone(tmp_path / "ours", {"mine": Owned(1)}, 1)
    with pytest.raises(CheckpointError, match=r"state\['mine'\] is Owned"):
        to_orbax(tmp_path / "ours", tmp_path / "theirs")
    save_alone(tmp_path / "ours", {"a": {"x": 1}}, 1)
    to_orbax(tmp_path / "ours", tmp_path / "theirs")
    with pytest.raises(
        ValueError, match=r"state\['a'\] has the keys \['y'\] in `like` and is a dict with \['x'\]"
    ):
        from_orbax(tmp_path / "theirs", tmp_path / "again", like={"a": {"y": 1}})
