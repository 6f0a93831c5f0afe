"""torch's own tools on the backend `horoclone` compute what one process computes; docs/torch_ecosystem.md has the table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horoclone._core", reason="the native module is not built")

sys.path.insert(0, str(Path(__file__).parent))
import ecosystem  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GUARDED = pytest.mark.guards("horoclone/torch/c10d", "csrc/collective", "tests/torch/ecosystem.py", packages=("torch",))
CASES = [(name, size) for name, row in ecosystem.ROWS.items() for size in row.ranks if size <= 4]


@GUARDED
@pytest.mark.parametrize(("name", "size"), CASES, ids=[f"{name}-{size}ranks" for name, size in CASES])
def test_it_computes_what_one_process_computes(name: str, size: int, worlds: Any) -> None:
    assert max(worlds.run(size, ecosystem.run_row, name=name)) <= ecosystem.ROWS[name].at_most
