"""Which file of tests a worker runs next (side_by_side.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")
import importlib.util

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("side_by_side", ROOT / "tests" / "side_by_side.py")
assert spec is not None and spec.loader is not None
side_by_side = importlib.util.module_from_spec(spec)
spec.loader.exec_module(side_by_side)


def test_what_is_said_to_wait_exists() -> None:
    assert all((ROOT / name).exists() for name in side_by_side.WAITING)


def test_a_worker_stays_in_its_folder_and_leaves_those_of_others_alone() -> None:
    waiting = "tests/launch/test_a.py"
    queue = [
        "tests/core/test_a.py",
        waiting,
        "tests/jax/test_a.py",
        "tests/torch/test_a.py",
        "tests/core/test_b.py",
    ]

    def choice(mine: str | None, *others: str, waits: bool = False, left: list[str] = queue) -> str | None:
        found = side_by_side.next_file(left, waits, mine, set(others))
        return found and str(found)

    assert choice(None) == "tests/core/test_a.py"
    assert choice(None, "tests/core") == "tests/jax/test_a.py"
    assert choice("tests/torch", "tests/core") == "tests/torch/test_a.py"
    assert choice("tests/keras", "tests/core", "tests/jax") == "tests/torch/test_a.py"
    assert choice(None, "tests/core", "tests/jax", "tests/torch") == "tests/core/test_a.py"
    assert choice(None, waits=True) == waiting
    assert choice(None, waits=True, left=["tests/core/test_a.py"]) is None
    assert choice("tests/core", left=[waiting]) == waiting, "what waits is taken last by those who compute"
    assert choice(None, left=[]) is None


@pytest.mark.guards("tests/side_by_side.py", "tests/conftest.py", packages=("pytest", "pytest-xdist"))
@pytest.mark.parametrize("workers", [2, 3])
def test_every_test_runs_once(workers: int, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\nimport side_by_side\nsys.path.pop(0)\n"
        "def pytest_xdist_make_scheduler(config, log):\n    return side_by_side.Files(config, log)\n"
    )
    for folder in ("core", "launch", "torch"):
        place = tmp_path / "tests" / folder
        place.mkdir(parents=True)
        for name in ("a", "b", "c"):
            text = "def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n"
            (place / f"test_{folder}_{name}.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(workers),
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert "27 passed" in done.stdout, done.stdout + done.stderr
