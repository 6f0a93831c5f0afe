"""Modules of tests/ that benchmarks use, by their path: that folder must not be on sys.path, since those in it have the
frameworks' names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parent.parent / "tests"


def load(path: str) -> ModuleType:
    """tests/PATH, imported once, under its own name."""
    file = TESTS / path
    if file.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file.stem])
    return sys.modules[file.stem]
