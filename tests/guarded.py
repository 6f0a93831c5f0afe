"""Costly tests that `make test` runs only where something that they guard has changed since they last passed.

`@pytest.mark.guards("csrc/device", packages=("torch",))` names files or folders, from the root, and installed packages whose
version matters. tests/guarded.json is part of the repository: it has a digest of all that for each such test, as it was when
the test passed. A clone without history knows it as well, and what has changed in any way runs (decision 0047).

.ci/cpp asks here, too, whether a sanitizer has to run: `python tests/guarded.py unchanged KEY WITH NAME...` succeeds if the
files and folders NAME... are what they were when KEY passed with the compiler WITH; `passed` in its place notes that.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import platform
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest  # .ci/cpp asks before it is installed

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "guarded.json"
NOT_SOURCES = {".pyc", ".so"}


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
            if path.is_file() and path.suffix not in NOT_SOURCES:
                content = path.read_bytes()
                whole.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        whole.update(f"{package} {version}\n".encode())
    whole.update(f"{compiler or '.'.join(platform.python_version_tuple()[:2])} {platform.machine()}".encode())
    return whole.hexdigest()[:32]


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
            item.add_marker(pytest.mark.skip(reason="unchanged since it passed: `make test-all` runs it"))


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


def main(arguments: list[str]) -> int:
    """For .ci/cpp, see above."""
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
