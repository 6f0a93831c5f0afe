"""Tests that are skipped while nothing that they guard changes (guarded.py): what counts as a change, and the record."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import guarded
import pytest

THIS = "tests/house/test_guarded.py"


def item(*names: str) -> Any:
    """A test that guards `names`, as pytest shows it; what was added to it is in `marks`."""
    mark = pytest.mark.guards(*names).mark
    marks: list[Any] = []
    return SimpleNamespace(
        nodeid=f"{THIS}::test", path=guarded.ROOT / THIS, user_properties=[], marks=marks, add_marker=marks.append,
        get_closest_marker=lambda name: mark if name == "guards" else None,
    )  # fmt: skip


def test_content_names_and_versions_are_changes_and_what_is_built_is_none(tmp_path: Path) -> None:
    def digest(*packages: str) -> str | None:
        guarded.digest_of.cache_clear()
        return guarded.digest_of(tmp_path, ("here",), packages)

    assert digest() is None, "what is absent cannot be unchanged"
    folder = tmp_path / "here" / "there"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("1")
    seen = {digest()}
    (folder / "a.so").write_text("built")
    (folder / "a.pyc").write_text("built")
    assert {digest()} == seen
    (folder / "a.py").write_text("2")
    seen.add(digest())
    (folder / "a.py").rename(folder / "b.py")
    seen |= {digest(), digest("pytest"), digest("no-such-package")}
    assert len(seen) == 5 and None not in seen


def test_tests_of_the_core_count_for_sanitizers_only(tmp_path: Path) -> None:
    def digests() -> tuple[str | None, str | None]:
        guarded.digest_of.cache_clear()
        return guarded.digest_of(tmp_path, ("csrc",), ()), guarded.digest_of(tmp_path, ("csrc",), (), "g++")

    folder = tmp_path / "csrc" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_a.cc").write_text("1")
    before = digests()
    (folder / "test_a.cc").write_text("2")
    after = digests()
    assert before[0] == after[0] and before[1] != after[1]


def test_only_what_has_not_changed_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    one = item("tests/doubles")
    guarded.skip_unchanged([one], "changed")
    assert not one.marks, "it is not in the record"
    ((_, digest),) = one.user_properties
    monkeypatch.setattr(guarded, "recorded", lambda: {one.nodeid: digest})
    for how, names, skipped in (
        ("changed", ("tests/doubles",), True),
        ("run", ("tests/doubles",), False),
        ("renew", ("tests/doubles",), False),
        ("changed", ("tests/world.py",), False),
        ("changed", ("tests/doubles", "no/such/file"), False),
    ):
        again = item(*names)
        guarded.skip_unchanged([again], how)
        assert bool(again.marks) == skipped, (how, names)


def test_the_record_keeps_what_passed_and_drops_what_failed_or_is_gone(tmp_path: Path) -> None:
    record = tmp_path / "guarded.json"

    def report(test: str, when: str, outcome: str, properties: list[tuple[str, str]]) -> Any:
        passed, failed = outcome == "passed", outcome == "failed"
        nodeid = f"{THIS}::{test}"
        return SimpleNamespace(
            nodeid=nodeid, when=when, passed=passed, failed=failed, user_properties=properties
        )

    def run(*reports: Any) -> dict[str, str]:
        renewal = guarded.Renewal(record)
        for one in reports:
            renewal.pytest_runtest_logreport(one)
        renewal.pytest_sessionfinish()
        return {name.split("::")[1]: digest for name, digest in guarded.recorded(record).items()}

    good, other = [("guarded", "g")], [("guarded", "h")]
    assert run(report("a", "call", "passed", [])) == {} and not record.exists()
    assert run(report("a", "call", "passed", good), report("b", "call", "passed", good)) == {
        "a": "g",
        "b": "g",
    }
    record.write_text(record.read_text().replace("{", '{"tests/gone.py::x": "g",'))
    assert run(report("a", "call", "passed", other)) == {"a": "h", "b": "g"}
    assert run(report("a", "call", "passed", other), report("a", "teardown", "failed", other)) == {"b": "g"}
    assert run(report("b", "setup", "skipped", other)) == {"b": "g"}


def test_every_name_that_a_test_guards_exists() -> None:
    missing = []
    for path in sorted(guarded.ROOT.glob("tests/*/test_*.py")):
        for names in re.findall(r"pytest\.mark\.guards\(([^)]*)\)", path.read_text()):
            files = re.findall(r'"([^"]+)"', names.partition("packages=")[0])
            missing += [f"{path.name}: {name}" for name in files if not (guarded.ROOT / name).exists()]
    assert not missing, f"these tests would run always: {missing}"


def test_a_sanitizer_is_left_out_only_with_the_same_files_and_the_same_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, key = tmp_path / "guarded.json", ".ci/cpp::thread"
    monkeypatch.setattr(guarded, "RECORD", record)
    monkeypatch.setattr(
        guarded, "recorded", lambda of=record: json.loads(of.read_text()) if of.exists() else {}
    )
    assert guarded.main(["unchanged", key, "g++ 12", ".ci/cpp"]) == 1
    assert guarded.main(["passed", key, "g++ 12", ".ci/cpp"]) == 0
    assert guarded.main(["unchanged", key, "g++ 12", ".ci/cpp"]) == 0
    assert guarded.main(["unchanged", key, "g++ 13", ".ci/cpp"]) == 1
    assert guarded.main(["unchanged", key, "g++ 12", ".ci/cpp", ".ci/run"]) == 1
    assert guarded.main(["unchanged", ".ci/cpp::address", "g++ 12", ".ci/cpp"]) == 1
    assert guarded.main(["passed", key, "g++ 12", "no/such/file"]) == 2
    assert guarded.main(["unchanged", key, "g++ 12", "no/such/file"]) == 1


@pytest.mark.guards("tests/guarded.py", "tests/conftest.py", "Makefile")
def test_an_environment_is_wanted_where_a_test_that_needs_it_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HC_COSTLY_UNTIL", raising=False)
    (tmp_path / "tests" / "here").mkdir(parents=True)
    for name in (
        "pyproject.toml",
        *(f"tests/{one}.py" for one in ("conftest", "guarded", "checkout", "world", "crew")),
    ):
        shutil.copy(guarded.ROOT / name, tmp_path / name)
    (tmp_path / "Makefile").write_text("FOR_ENGINES := first other[all]==1.0 last\n")
    (tmp_path / "guarded_file").write_text("1")
    (tmp_path / "another_file").write_text("1")
    test = tmp_path / "tests" / "here" / "test_it.py"
    test.write_text(
        "import pytest\n\ndef test_cheap(): pass\n\n"
        "@pytest.mark.guards('guarded_file', packages=('other',))\ndef test_costly(): pass\n\n"
        "@pytest.mark.guards('another_file')\n@pytest.mark.parametrize('n', [1, 2])\ndef test_two(n): pass\n"
    )

    def is_wanted(*folders: str) -> bool:
        command = [sys.executable, "tests/guarded.py", "wanted", *folders]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert done.returncode in (0, 1) and not done.stdout + done.stderr, done
        return done.returncode == 0

    def run() -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--guarded=renew", "tests/here"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=150)

    assert is_wanted("tests/here", "tests/absent") and not is_wanted("tests/absent")
    run()
    assert not is_wanted("tests/here", "tests/absent")
    (tmp_path / "guarded_file").write_text("2")
    names = [
        "tests/here",
        "tests/here/test_it.py",
        *(f"tests/here/test_it.py::test_{one}" for one in ("costly", "two")),
    ]
    command = [sys.executable, "tests/guarded.py", "which", *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == names[:3], done
    run()
    assert not is_wanted("tests/here")
    (tmp_path / "Makefile").write_text("FOR_ENGINES := first other[all]==1.1 last\n")
    assert is_wanted("tests/here")
    run()
    test.write_text(test.read_text().replace("import pytest", "import pytest, no_such_module"))
    assert is_wanted("tests/here"), "what cannot be read runs, and fails"


def test_costly_tests_do_not_begin_once_their_time_is_used_up() -> None:
    assert guarded.no_time_left({}, 100) == ""
    assert guarded.no_time_left({"HC_COSTLY_UNTIL": "101"}, 100) == ""
    assert "make test-all" in guarded.no_time_left({"HC_COSTLY_UNTIL": "100"}, 100)
