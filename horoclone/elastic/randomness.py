"""Random numbers that go on where a commit was: RandomStates() as an attribute of an elastic state."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class RandomStates:
    """Holds the state of random generators, which differs between ranks; a rank that replaces a lost one continues its
    sequences.

    Without arguments those of the modules random, numpy.random and torch (also of its GPUs), of those that are
    imported when the object is made. generators: random.Random, numpy.random.Generator or torch.Generator instead.
    """

    def __init__(self, *generators: Any) -> None:
        self._generators = list(generators) if generators else [random.Random, *_modules()]
        for one in self._generators:
            _read(one)  # TypeError for what is no generator

    def own(self) -> list[Any]:
        """Returns the state of each generator of this rank."""
        return [_read(one) for one in self._generators]

    def set_own(self, values: Mapping[int, Any], mine: int | None, holders: Sequence[int]) -> None:
        """Sets the generators to what own() gave on the rank of the commit that this one continues."""
        if mine is not None:
            for one, state in zip(self._generators, values[mine], strict=True):
                _write(one, state)


def _modules() -> list[Any]:
    """numpy.random and torch, where they are imported."""
    return [sys.modules[name] for name in ("numpy.random", "torch") if name in sys.modules]


def _name(generator: Any) -> str:
    return getattr(generator, "__name__", "") or type(generator).__module__.partition(".")[0]


def _read(generator: Any) -> Any:
    if generator is random.Random:
        return random.getstate()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if _name(generator) == "torch":
        if not hasattr(generator, "cuda"):
            return generator.get_state().cpu().numpy().copy()
        gpus = generator.cuda.get_rng_state_all() if generator.cuda.is_available() else []
        return [generator.get_rng_state().numpy().copy(), *(one.numpy().copy() for one in gpus)]
    if hasattr(generator, "get_state") and hasattr(generator, "set_state"):
        return generator.get_state()
    raise TypeError(
        f"RandomStates({type(generator).__name__}): it takes random.Random, numpy.random.Generator or RandomState, "
        "numpy.random, torch and torch.Generator"
    )


def _write(generator: Any, state: Any) -> None:
    if generator is random.Random:
        random.setstate(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif _name(generator) == "torch":
        torch = sys.modules["torch"]
        if not hasattr(generator, "cuda"):
            generator.set_state(torch.from_numpy(state))
            return
        generator.set_rng_state(torch.from_numpy(state[0]))
        for number, one in enumerate(state[1:]):
            if number < generator.cuda.device_count():
                generator.cuda.set_rng_state(torch.from_numpy(one), number)
    else:
        generator.set_state(state)
