"""Costly tests that `make test` runs only where something that they guard has changed since they last passed.

`@pytest.mark.guards("csrc/device", packages=("torch",))` names files or folders, from the root, and installed packages whose
version matters. tests/guarded.json is part of the repository: it has a digest of all that for each such test, as it was when
the test passed. A clone without history knows it as well, and what has changed in any way runs (decision 0047).

.ci/cpp asks here, too, whether a sanitizer has to run: `python tests/guarded.py unchanged KEY WITH NAME...` succeeds if the
files and folders NAME... are what they were when KEY passed with the compiler WITH; `passed` in its place notes that.
The Makefile asks whether an environment has to be made: `wanted FOLDER...` succeeds if a marked test there would run;
`which NAME...` prints those of these folders, files and tests (FILE::TEST) of which that is so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest  # .ci/cpp asks before it is installed

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "guarded.json"
NOT_SOURCES = {".pyc", ".so"}
CPP_TESTS = "csrc/tests/"  # no Python test guards them: they count for the sanitizers only
UNCHANGED = "unchanged since it passed: `make test-all` runs it"


def version_of(package: str, makefile: Path = ROOT / "Makefile") -> str:
    """Of what is installed here, or what FOR_ENGINES in the Makefile pins for an environment of its own; else "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        listed = re.search(r"^FOR_ENGINES :=(.*)$", makefile.read_text(), re.MULTILINE)
        pinned = re.search(rf"(?:^|\s){re.escape(package)}(?:\[\w+\])?==(\S+)", listed[1]) if listed else None
        return pinned[1] if pinned else "absent"


@cache
def digest_of(
    root: Path, names: tuple[str, ...], packages: tuple[str, ...], compiler: str = ""
) -> str | None:
    """Of the names and contents of all files below `names`, the versions of `packages` and what else may matter.

    That is the processor, and Python's version, or the compiler's where that is given.

    None where a name does not exist: what guards it always runs.
    """
    whole = hashlib.sha256()
    for name in names:
        place = root / name
        if not place.exists():
            return None
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            relative = path.relative_to(root).as_posix()
            if relative.startswith(CPP_TESTS) and not compiler and not name.startswith(CPP_TESTS):
                continue
            if path.is_file() and path.suffix not in NOT_SOURCES:
                content = path.read_bytes()
                whole.update(f"{relative} {len(content)}\n".encode() + content)
    for package in packages:
        whole.update(f"{package} {version_of(package)}\n".encode())
    whole.update(f"{compiler or '.'.join(platform.python_version_tuple()[:2])} {platform.machine()}".encode())
    return whole.hexdigest()[:32]


def no_time_left(environ: Mapping[str, str] = os.environ, now_s: float | None = None) -> str:
    """Why a costly test does not begin any more: HC_COSTLY_UNTIL (seconds since 1970) has passed. Else empty."""
    until = environ.get("HC_COSTLY_UNTIL", "")
    if not until or (time.time() if now_s is None else now_s) < float(until):
        return ""
    return "the time for costly tests is used up: `make test-all` runs it"


def recorded(record: Path = RECORD) -> dict[str, str]:
    return json.loads(record.read_text()) if record.exists() else {}


def digest_of_test(item: pytest.Item, mark: pytest.Mark) -> str | None:
    own = item.path.relative_to(ROOT).as_posix()
    return digest_of(ROOT, (*mark.args, own), tuple(mark.kwargs.get("packages", ())))


def skip_unchanged(items: list[pytest.Item], how: str) -> None:
    """how: "run" every test, "changed" skips what has not changed, "renew" runs all and writes the record."""
    import pytest

    known = recorded()
    for item in items:
        mark = item.get_closest_marker("guards")
        if mark is None:
            continue
        digest = digest_of_test(item, mark)
        if digest is None:
            continue
        item.user_properties.append(("guarded", digest))
        if how == "changed" and known.get(item.nodeid) == digest:
            item.add_marker(pytest.mark.skip(reason=UNCHANGED))


class Renewal:
    """Writes the digests of the tests that passed into the record; in the process that hears all reports."""

    def __init__(self, record: Path = RECORD) -> None:
        self._record = record
        self._digests: dict[str, str] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        digest = dict(report.user_properties).get("guarded")
        if digest is None:
            return
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._digests[report.nodeid] = digest

    def pytest_sessionfinish(self) -> None:
        if self._digests or self._failed:
            write(self._record, self._digests, self._failed)


def write(record: Path, passed: dict[str, str], failed: set[str]) -> None:
    """Notes digests; those that failed, and those whose file is gone, are no longer in the record."""
    with (ROOT / "tests" / "guarded.py").open() as lock:  # two sanitizers may end at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = recorded(record)
        kept = {test: d for test, d in before.items() if (ROOT / test.split("::")[0]).exists()}
        now = {**kept, **passed}
        text = json.dumps({test: now[test] for test in sorted(now) if test not in failed}, indent=0)
        record.write_text(text + "\n")


class _Collected:
    """Hears which marked tests pytest has found, and which of them nothing would skip."""

    def __init__(self) -> None:
        self.wanted: list[str] = []
        self.is_whole = True  # no file failed while it was read

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.wanted = [
            item.nodeid
            for item in session.items
            if item.get_closest_marker("guards")
            and not any(mark.kwargs.get("reason") == UNCHANGED for mark in item.iter_markers("skip"))
        ]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.is_whole = self.is_whole and not report.failed


def which(names: list[str]) -> list[str]:
    """Those of these folders, files and tests (FILE::TEST) of which a marked test would run with --guarded=changed. What is
    absent has none; tests in a file that cannot be read run, and fail."""
    import pytest

    there = list(
        dict.fromkeys(file for file in (name.split("::")[0] for name in names) if (ROOT / file).exists())
    )
    if not there:
        return []
    collected = _Collected()
    sys.path.insert(0, str(ROOT))  # horoclone is there before it is installed
    how = ["--collect-only", "-q", "-p", "no:cacheprovider", "--guarded=changed", f"--rootdir={ROOT}"]
    with Path(os.devnull).open("w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            pytest.main([*how, *(str(ROOT / folder) for folder in there)], [collected])
    if not collected.is_whole:
        return [name for name in names if name.split("::")[0] in there]
    return [name for name in names if any(_is_in(test, name) for test in collected.wanted)]


def _is_in(test: str, name: str) -> bool:
    return test == name or test.startswith((f"{name}::", f"{name}[", f"{name.rstrip('/')}/"))


def main(arguments: list[str]) -> int:
    """For .ci/cpp and the Makefile, see above."""
    if arguments[:1] == ["wanted"]:
        return 0 if which(arguments[1:]) else 1
    if arguments[:1] == ["which"]:
        print("".join(f"{name}\n" for name in which(arguments[1:])), end="")
        return 0
    verb, key, compiler, *names = arguments
    digest = digest_of(ROOT, tuple(names), (), compiler)
    if verb == "unchanged":
        return 0 if digest is not None and recorded().get(key) == digest else 1
    if verb == "passed" and digest is not None:
        write(RECORD, {key: digest}, set())
        return 0
    print(f"{verb}: not `unchanged` or `passed`, or one of {names} does not exist", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
