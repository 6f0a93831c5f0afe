"""What is optional can be deleted: in a copy of the package without a part, everything else is imported and works."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from world import ran, run_python

from horoclone import optional

ROOT = Path(__file__).resolve().parents[2]
# Whose package this machine need not have, or whose import takes seconds; test_without_all_of_them has them all.
BINDINGS = ("torch", "tensorflow", "keras", "jax", "cupy", "_keras", "lightning", "spark", "ray")

IMPORT_ALL = """
import importlib, pathlib, sys
without, absent, count = sys.argv[2].split(), [], 0
for path in sorted(pathlib.Path(sys.argv[1], "horoclone").rglob("*.py")):
    parts = path.relative_to(sys.argv[1]).with_suffix("").parts
    if (parts[1:2] or [""])[0] in without or parts[-1] == "__main__":
        continue
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    try:
        found = importlib.import_module(name)
        count += 1
        assert name.startswith("horoclone.common") or found.__file__.startswith(sys.argv[1]), found
    except ModuleNotFoundError as error:  # of a framework that is not installed
        assert error.name and error.name.partition(".")[0] != "horoclone", (name, error)
        absent.append(error.name)
print(count, sorted(set(absent)))
from horoclone.launch import cli, tool
assert tool.main(["--help"]) == 0
cli.main(["--help"])
"""
TWO_RANKS = """
import numpy as np
import horoclone as hvd
hvd.init()
print("sum", hvd.allreduce(np.ones(3, np.float32), op=hvd.Sum)[0], hasattr(hvd, "checkpoint"))
"""


def copy_without(folder: Path, *parts: str) -> Path:
    """The tree with links to the files of this one."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "horoclone", folder / "horoclone", ignore=ignored, copy_function=os.symlink)
    for part in parts:
        shutil.rmtree(folder / "horoclone" / part.replace(".", "/"))
    return folder


def run(tree: Path, *command: str, timeout_s: float = 170) -> str:
    env = {**os.environ, "PYTHONPATH": str(tree), "KERAS_BACKEND": "torch"}
    done = ran(sys.executable, *command, cwd=tree, env=env, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_part_is_a_folder() -> None:
    for part in optional.PARTS:
        assert (ROOT / "horoclone" / part.replace(".", "/") / "__init__.py").exists()


@pytest.mark.in_turn
@pytest.mark.parametrize("part", optional.PARTS)
def test_without_one_of_them_the_rest_is_imported(tmp_path: Path, part: str) -> None:
    said = run(copy_without(tmp_path, part), "-c", IMPORT_ALL, str(tmp_path), " ".join(BINDINGS))
    assert int(said.split()[0]) > 100 and "usage: horoclonerun" in said, said
    assert "show a running job" in said and ("measure a model" in said) == (part != "plan"), said


def test_without_all_of_them_two_ranks_work_and_what_is_asked_for_is_named(tmp_path: Path) -> None:
    tree = copy_without(tmp_path, *optional.PARTS)
    (tree / "two.py").write_text(TWO_RANKS)
    said = run(tree, "-m", "horoclone.launch.cli", "-np", "2", sys.executable, "two.py")
    assert said.count("sum 2.0 False") == 2, said
    command = [sys.executable, "-m", "horoclone.launch.cli", "-np", "1", "--dashboard", "true"]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = ran(*command, cwd=tree, env=env)
    assert done.returncode == 1 and "has no dashboard (horoclone.live.dashboard)" in done.stderr, done.stderr
    code = "from horoclone.elastic.disk import Disk; Disk('saves', 1, 1, 1.0)"
    done = run_python(code, cwd=tree, env=env)
    assert "ImportError: horoclone.checkpoint is not part of this installation" in done.stderr, done.stderr


@pytest.mark.long(150)
@pytest.mark.timeout(600)
def test_without_all_of_them_every_binding_is_imported_and_every_other_test_is_collected(
    tmp_path: Path,
) -> None:
    tree = copy_without(tmp_path, *optional.PARTS)
    run(tree, "-c", IMPORT_ALL, str(tree), "", timeout_s=300)
    for entry in ROOT.iterdir():
        if entry.name not in ("horoclone", "tests", "build", "dist") and not entry.name.startswith("."):
            (tree / entry.name).symlink_to(entry)
    shutil.copytree(
        ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__", "architecture")
    )
    for part in optional.PARTS:
        shutil.rmtree(tree / "tests" / part, ignore_errors=True)
    said = run(tree, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", timeout_s=280)
    assert "error" not in said.splitlines()[-1], said[-2000:]
