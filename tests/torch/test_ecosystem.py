"""torch's own tools on the backend `horoclone` compute what one process computes; docs/torch_ecosystem.md has the list."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horoclone._core", reason="the native module is not built")

sys.path.insert(0, str(Path(__file__).parent))
import ecosystem  # noqa: E402
from worker_pool import say  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "torch_ecosystem.md"
PROGRAM = ROOT / "tests" / "torch" / "ecosystem.py"
CASES = [
    pytest.param(name, size, id=f"{name}-{size}ranks")
    for name, row in ecosystem.ROWS.items()
    if not row.package
    for size in row.ranks
    if size <= 4
]


@pytest.mark.in_turn("size")
@pytest.mark.parametrize(("name", "size"), CASES)
def test_it_computes_what_one_process_computes(name: str, size: int, worlds: Any) -> None:
    assert max(worlds.run(size, ecosystem.run_row, name=name)) <= ecosystem.ROWS[name].at_most


def three_ways(folder: str) -> None:
    sys.path.insert(0, folder)
    import ecosystem

    say(apart=ecosystem.run_row("three_ways"))


@pytest.mark.long(60)
def test_shards_of_tensors_and_stages_on_eight_ranks(torch_worker_pool: Any) -> None:
    team = torch_worker_pool(three_ways, 8, folder=str(PROGRAM.parent))
    assert team.wait(120) == [0] * 8, team.outputs()
    for rank in range(8):
        assert team.said(rank, "apart")[0]["apart"] <= ecosystem.ROWS["three_ways"].at_most


def all_apart(launch: Any, python: Path | str, size: int, names: Sequence[str]) -> None:
    done = launch([python, PROGRAM, size, *names], env={"OMP_NUM_THREADS": "1"}, timeout_s=300)
    assert done.returncode == 0, done.output
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert list(found) == list(names), done.output
    assert all(apart <= ecosystem.ROWS[name].at_most for name, apart in found.items()), found


@pytest.mark.long(40)
def test_processes_that_torch_spawns(launch: Any) -> None:
    all_apart(launch, sys.executable, 2, ["ddp", "fsdp"])


@pytest.mark.timeout(1200)
@pytest.mark.long(120)
@pytest.mark.parametrize("size", [2, 4])
def test_packages_that_are_built_on_torch(size: int, ecosystem_python: Path, launch: Any) -> None:
    all_apart(launch, ecosystem_python, size, [name for name, row in ecosystem.ROWS.items() if row.package])


def test_the_page_has_the_rows() -> None:
    assert ecosystem.listed() in PAGE.read_text(), "write it with `make docs`"
