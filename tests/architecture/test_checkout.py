"""tests/checkout.py tells what a commit would have, and unpacks what Debian 12's Python can; planted faults fit the tree."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path

import checkout
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_files_are_those_that_git_would_commit() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git here to compare with")
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-per-directory=.gitignore"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:
        pytest.skip(f"git cannot read this checkout: {listed.stderr.strip()}")
    assert checkout.files() == {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def test_what_is_ignored_is_left_out(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("# products\nbuild/\n*.so\n/out/\n")
    for name in (
        "a.py", "a.so", "build/x", "deep/build/y", "deep/b.py", "out/z", "deep/out/kept", ".git/config"
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert checkout.files(root=tmp_path) == {".gitignore", "a.py", "deep/b.py", "deep/out/kept"}
    assert checkout.files("deep", root=tmp_path) == {"deep/b.py", "deep/out/kept"}
    (tmp_path / ".gitignore").write_text("!kept\n")
    with pytest.raises(ValueError, match="!kept"):
        checkout.files(root=tmp_path)


def test_archives_are_unpacked_without_filters_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12 has Python 3.11.2, whose tarfile has none."""
    (tmp_path / "file").write_text("content")
    with tarfile.open(tmp_path / "one.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "file", "file")
    for number in range(2):
        checkout.unpack(tmp_path / "one.tar.gz", tmp_path / str(number))
        assert (tmp_path / str(number) / "file").read_text() == "content"
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


def test_each_planted_fault_is_a_line_of_the_sources_and_its_test_exists() -> None:
    faults = runpy.run_path(str(ROOT / "tests" / "planted_faults.py"))
    cases = "\n".join(path.read_text() for path in sorted((ROOT / "csrc" / "tests").rglob("*.cc")))
    for fault in faults["FAULTS"]:
        assert fault.before in (ROOT / fault.file).read_text(), f"{fault.file} has no line {fault.before!r}"
        if fault in faults["PYTHON"]:
            assert all((ROOT / word.split("::")[0]).exists() for word in fault.test.split() if "/" in word)
        else:
            folder, case = fault.test.split(" ", 1)
            assert (ROOT / "csrc" / "tests" / folder).is_dir()
            name = '"' + re.escape(case).replace(r"\*", ".*")
            assert re.search(name, cases), f"no case {case!r} of the C++ tests"
