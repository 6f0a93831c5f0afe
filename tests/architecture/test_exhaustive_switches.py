"""A switch over one of the core's lists names every entry, so that the compiler says where a new one is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LISTS = ("Reduce", "Identity", "Kind", "DType", "Op", "Algorithm", "Layout", "Knob", "Code")
C_LISTS = r"HC_(?:BOOL|U?INT\d+|B?FLOAT\d+|SUM|ALLREDUCE|OK|INVALID_ARGUMENT)"
OVER_A_LIST = re.compile(rf"\bcase (?:hc::)?(?:(?:{'|'.join(LISTS)})::k\w+|{C_LISTS}):")


def switches(text: str) -> Iterator[str]:
    """The body of each switch, without the bodies of switches inside it."""
    for begin in re.finditer(r"\bswitch \(", text):
        at = text.index("{", begin.end())
        depth, body = 0, ""
        for place in range(at, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                body = text[at:place]
                break
        inner = body.find("switch (")
        yield body if inner < 0 else body[:inner]


@pytest.mark.parametrize("suffix", [".h", ".cc", ".cu"])
def test_no_switch_over_a_list_of_the_core_has_a_default(suffix: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {OVER_A_LIST.search(body).group()}"  # type: ignore[union-attr]
        for path in sorted(CSRC.rglob(f"*{suffix}"))
        for body in switches(path.read_text())
        if OVER_A_LIST.search(body) and re.search(r"\bdefault:", body)
    ]
    assert not wrong, f"write the cases out instead of `default:`: {wrong}"


def test_the_compiler_refuses_a_switch_that_lacks_a_case() -> None:
    flags = re.findall(
        r"target_compile_options\((?:hc_flags|_core) [^)]*-Wall[^)]*\)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert len(flags) == 2 and all("-Werror=switch" in each for each in flags), flags


def test_the_numbers_of_the_reductions_are_the_same_everywhere() -> None:
    """One list in the core; the C interface and Python name the same things in the same order."""
    from horoclone import ops

    names = re.findall(
        r"^\s*X\((\w+), k\w+, kOf\w+\)", (CSRC / "base/reductions.h").read_text(), re.MULTILINE
    )
    header = (CSRC / "include/horoclone.h").read_text()
    declared = re.search(r"typedef enum hc_reduce \{(.*?)\} hc_reduce;", header, re.DOTALL)
    assert declared is not None
    assert [name.strip() for name in declared.group(1).split(",")] == [
        *(f"HC_{name.upper()}" for name in names),
        "HC_REDUCTIONS",
    ]
    assert list(ops.REDUCE_NAMES) == names
    assert [getattr(ops, name) for name in names] == list(range(len(names)))


def test_no_hash_of_the_standard_library_is_written_out() -> None:
    """Ranks compare hashes, and two standard libraries disagree: base/hash.h is the same everywhere."""
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in sorted(CSRC.rglob("*"))
        if path.suffix in (".h", ".cc", ".cu") and re.search(r"\bstd::_?hash\w*<", path.read_text())
    ]
    assert not wrong, wrong
