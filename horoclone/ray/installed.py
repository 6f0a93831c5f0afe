"""Finds out whether there is a Ray that can be used; imported before anything else of this package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

OLDEST = (2, 9)  # placement groups, node affinity and actor errors as they are used here


def check() -> None:
    """ImportError that says what to install."""
    wanted = f"ray>={'.'.join(map(str, OLDEST))}"
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(
            f"horoclone.ray needs Ray, which is not installed: pip install 'ray[default]' ({wanted})",
            name="ray",
        )
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return  # built from its sources, perhaps: nobody can say
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise ImportError(
            f"Ray {version} is installed and horoclone.ray needs {wanted}: pip install -U 'ray[default]'"
        )


check()
