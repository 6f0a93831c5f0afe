"""The size of the core's classes, by clang's parser: files that define one, fields, friends, tables of callbacks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
READER = Path(__file__).with_name("native_classes.py")
PROCESSES = 2
pytestmark = [
    pytest.mark.guards("csrc", packages=("libclang",)),
    pytest.mark.timeout(600),  # the first test waits for the parser, which takes 25 s of processor time
]

# Each limit has exceptions, class -> (number, why). The number may only fall, and who brings it down to the limit takes
# the entry out.
FILES = 3
IN_MORE_FILES: dict[str, tuple[int, str]] = {}
FIELDS = 25
MORE_FIELDS: dict[str, tuple[int, str]] = {}
# Classes that are a table, with one row for each field.
TABLES = {
    "Config": "the settings, each once",
    "CudaApi": "the functions of CUDA's driver that are used",
    "NcclApi": "the functions of NCCL that are used",
    "PageLayout": "the words of the page of measurements, each once",
}
FRIENDS = 0  # a test may be one: class ...Test
MORE_FRIENDS: dict[str, tuple[int, str]] = {}
CALLBACKS = 1  # std::function fields of a class in engine/; a part knows the parts that it calls
MORE_CALLBACKS: dict[str, tuple[int, str]] = {}
# Headers by name, wherever they lie -> (most lines, (lines today, why) or None).
HEADERS: dict[str, tuple[int, tuple[int, str] | None]] = {
    "engine.h": (150, None),
    "horoclone.h": (240, None),
}


@pytest.fixture(scope="module")
def classes() -> dict[str, dict[str, Any]]:
    if importlib.util.find_spec("clang.cindex") is None:
        pytest.skip("libclang is not installed (pip install libclang)")
    running = [
        subprocess.Popen(
            [sys.executable, str(READER), str(part), str(PROCESSES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(PROCESSES)
    ]
    ended = [process.communicate() for process in running]
    found: dict[str, dict[str, Any]] = {}
    for process, (output, said) in zip(running, ended, strict=True):
        if process.returncode != 0 and str(CSRC) not in said:
            pytest.skip(f"this clang cannot read this compiler's headers: {said}")
        assert process.returncode == 0, said
        for name, one in json.loads(output).items():
            kept = found.setdefault(name, one)
            kept["members_in"] = sorted({*kept["members_in"], *one["members_in"]})
    return found


def compare(measured: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """What is wrong, by name: above the limit or above its exception, or an exception that nobody needs."""
    wrong = []
    for name, number in sorted(measured.items()):
        allowed = exceptions[name][0] if name in exceptions else limit
        if number > allowed:
            wrong.append(f"{name}: {number}, at most {allowed}")
    for name in exceptions:
        if measured.get(name, 0) <= limit:
            wrong.append(f"{name} needs no exception any more: take it out")
    return wrong


def most(classes: dict[str, dict[str, Any]], key: str, below: str = "") -> dict[str, int]:
    """Name without the file in parentheses -> the largest number of `key` of a class of this name."""
    numbers: dict[str, int] = {}
    for name, one in classes.items():
        if one["file"].startswith(below):
            short = name.split(" (")[0]
            numbers[short] = max(numbers.get(short, 0), len(one[key]))
    return numbers


def test_the_parser_sees_the_classes_of_every_layer(classes: dict[str, dict[str, Any]]) -> None:
    layers = {path.parent.relative_to(CSRC).parts[0] for path in CSRC.rglob("*.h") if path.parent != CSRC}
    seen = {one["file"].split("/")[0] for one in classes.values()}
    assert layers - {"include", "python", "tests"} <= seen
    assert {"Engine", "ProcessSet", "Mesh", "Status"} & set(classes) and len(classes) > 250
    assert len(classes["Status"]["fields"]) >= 1 and classes["Mesh"]["members_in"]


def test_a_class_is_defined_in_few_files(classes: dict[str, dict[str, Any]]) -> None:
    assert not compare(most(classes, "members_in"), FILES, IN_MORE_FILES)


def test_a_class_has_few_fields(classes: dict[str, dict[str, Any]]) -> None:
    numbers = most(classes, "fields")
    tables = {name: numbers.pop(name, 0) for name in TABLES}
    assert not compare(numbers, FIELDS, MORE_FIELDS)
    stale = [name for name, number in tables.items() if number <= FIELDS]
    assert not stale, f"tables that are small, or gone: {stale}"


def test_a_class_has_no_friends_but_tests(classes: dict[str, dict[str, Any]]) -> None:
    for one in classes.values():
        one["others"] = [friend for friend in one["friends"] if not friend.endswith("Test")]
    assert not compare(most(classes, "others"), FRIENDS, MORE_FRIENDS)


def test_parts_of_the_engine_know_each_other_and_need_no_table_of_callbacks(
    classes: dict[str, dict[str, Any]],
) -> None:
    assert not compare(most(classes, "callbacks", "engine/"), CALLBACKS, MORE_CALLBACKS)


def test_the_two_headers_that_everybody_reads_are_short() -> None:
    for name, (limit, exception) in HEADERS.items():
        (path,) = (path for path in CSRC.rglob(name) if "tests" not in path.parts)
        lines = {name: len(path.read_text().splitlines())}
        assert not compare(lines, limit, {name: exception} if exception else {})


def test_numbers_may_shrink_and_may_not_grow() -> None:
    exceptions = {"A": (5, "why")}
    assert not compare({"A": 5, "B": 3}, 3, exceptions)
    assert not compare({"A": 4, "B": 3}, 3, exceptions)
    assert compare({"A": 6}, 3, exceptions) == ["A: 6, at most 5"]
    assert compare({"A": 5, "B": 4}, 3, exceptions) == ["B: 4, at most 3"]
    assert compare({"A": 3}, 3, exceptions) == ["A needs no exception any more: take it out"]
    assert compare({}, 3, exceptions) == ["A needs no exception any more: take it out"]
