"""Saves as checkpoints of Orbax and back: to_orbax and from_orbax. Needs `pip install orbax-checkpoint`.

One process converts, and needs the memory of the whole state. Thread: any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import horoclone.checkpoint.jax  # noqa: F401 - arrays of JAX can be saved from here on
from horoclone.checkpoint.failures import CheckpointError
from horoclone.checkpoint.loading import Pieces, load
from horoclone.checkpoint.saving import save_alone

__all__ = ["from_orbax", "to_orbax"]

Path_ = str | os.PathLike[str]


def to_orbax(path: Path_, directory: Path_, number: int | None = None) -> None:
    """Writes the newest save below `path` (or that number) as a pytree checkpoint of Orbax, which makes `directory`.

    Keys that are integers become strings, as Orbax gives back strings only. CheckpointError for what is Owned: Orbax
    has no place for it.
    """
    state = _with_named_keys(load(path, number=number), "state")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(Path(os.path.abspath(directory)), state)


def from_orbax(directory: Path_, path: Path_, like: Any = None, keep: int = 3) -> Path:
    """Writes a pytree checkpoint of Orbax as a new save below `path` and returns its directory.

    like: a state of the same structure, whose tuples and integer keys the save then has. Without it tuples are lists
    and all keys strings, as Orbax gives them. ValueError that names the place where `like` has another structure.
    """
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        state = checkpointer.restore(Path(os.path.abspath(directory)))
    if like is not None:
        state = _formed(state, like, "state")
    return save_alone(Path(os.path.abspath(path)), state, keep)


def _with_named_keys(value: Any, where: str) -> Any:
    if isinstance(value, Pieces):
        raise CheckpointError(f"{where} is Owned: Orbax has no place for what each rank has of its own.")
    if isinstance(value, dict):
        if len({str(key) for key in value}) < len(value):
            raise CheckpointError(
                f"{where} has a key both as an integer and as a string: Orbax knows strings only."
            )
        return {str(key): _with_named_keys(one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_named_keys(one, f"{where}[{place}]") for place, one in enumerate(value))
    return value


def _formed(value: Any, like: Any, where: str) -> Any:
    """The value with the dicts, lists and tuples of `like`."""
    if isinstance(like, Mapping):
        names = {str(key): key for key in like}
        if not isinstance(value, Mapping) or set(names) != set(value):
            raise ValueError(
                f"{where} has the keys {sorted(names)} in `like` and is {_words(value)} in Orbax's"
            )
        return {key: _formed(value[name], like[key], f"{where}[{key!r}]") for name, key in names.items()}
    if isinstance(like, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(like):
            raise ValueError(f"{where} has {len(like)} values in `like` and is {_words(value)} in Orbax's")
        return (tuple if isinstance(like, tuple) else list)(
            _formed(one, other, f"{where}[{place}]")
            for place, (one, other) in enumerate(zip(value, like, strict=True))
        )
    return value


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {sorted(map(str, value))}"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
