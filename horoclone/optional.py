"""The optional parts of the package: a folder each, which nothing else imports and which may be absent.

Where the rest offers one of them, as `hvd.checkpoint`, `horoclone plan` or `--dashboard`, it asks for it here by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

PARTS = ("checkpoint", "lightning", "live.dashboard", "plan", "ps", "ray", "spark")


def is_there(part: str) -> bool:
    """Whether a part lies in this installation; what it needs of other packages may be missing all the same."""
    return importlib.util.find_spec(f"horoclone.{part}") is not None


def load(name: str) -> Any:
    """A part, or a module of one: "plan", "live.dashboard.server". ImportError that says so where it is absent."""
    part = next(part for part in PARTS if name == part or name.startswith(f"{part}."))
    if not is_there(part):
        raise ImportError(
            f"horoclone.{part} is not part of this installation of horoclone", name=f"horoclone.{part}"
        )
    return importlib.import_module(f"horoclone.{name}")
