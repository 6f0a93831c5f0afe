"""setup.py: for whoever calls it, the build of pyproject.toml; test_packaging.py builds the wheel that it tests by it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="setup.py needs setuptools")
pytest.importorskip("scikit_build_core", reason="the build backend is not installed: make installs it")
ROOT = Path(__file__).resolve().parents[2]


def setup(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "setup.py", *words]
    env = {**os.environ, "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_it_tells_what_the_package_tells(tmp_path: Path) -> None:
    import horoclone

    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for option, value in (("name", "horoclone"), ("version", horoclone.__version__)):
        done = setup(f"--{option}")
        assert done.stdout == f"{value}\n", done
    done = setup("-q", "egg_info", "--egg-base", tmp_path)
    assert done.returncode == 0, done.stderr
    needs = (tmp_path / "horoclone.egg-info" / "requires.txt").read_text()
    unconditional, *extras = re.split(r"\n\[", needs)
    assert sorted(unconditional.split()) == sorted(project["dependencies"])
    assert {extra.partition("]")[0] for extra in extras} == set(project["optional-dependencies"])
    commands = (tmp_path / "horoclone.egg-info" / "entry_points.txt").read_text()
    assert all(f"{name} = {place}" in commands for name, place in project["scripts"].items())


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("words", "editable"),
    [(("develop", "--no-deps"), True), (("install", "--no-deps", "--root=/nowhere"), False)],
    ids=["develop", "install"],
)
def test_develop_and_install_are_pips(words: tuple[str, ...], editable: bool) -> None:
    done = setup(*words, PIP_DRY_RUN="1")
    assert done.returncode == 0 and "Would install horoclone-" in done.stdout, done.stdout + done.stderr
    assert ("editable" in done.stdout) == editable
    failed = setup(*words, PIP_DRY_RUN="1", PIP_CONSTRAINT="/nowhere/constraints.txt")
    assert failed.returncode != 0 and "Would install" not in failed.stdout, "pip's failure is its own"


def test_the_source_package_is_the_backends(tmp_path: Path) -> None:
    done = setup("sdist", "--dist-dir", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path / 'b')!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60, capture_output=True)
    names = []
    for folder in ("a", "b"):
        (archive,) = (tmp_path / folder).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            names.append(sorted(opened.getnames()))
    assert names[0] == names[1] and any(name.endswith("/setup.py") for name in names[0])


@pytest.mark.parametrize("words", [("build",), ("build_ext", "--inplace"), ("bdist_egg",)], ids=" ".join)
def test_a_command_that_would_leave_the_native_part_out_is_refused(words: tuple[str, ...]) -> None:
    done = setup(*words)
    assert done.returncode != 0 and "`bdist_wheel` makes a wheel" in done.stderr, done
