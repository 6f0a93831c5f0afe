"""One word, one meaning: the glossary stays short, and words that had several meanings do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import checkout
import pytest

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = 12
# What must not be part of a name or comment -> the word to use.
RETIRED = {
    "ballot": "request list",
    "combiner": "request aggregator",
    "guardian": "reaper",
    "heritage": "coordinator snapshot",
    "inquiry": "stack request",
    "lateness": "straggler statistics",
    "meeting": "rendezvous",
    "roster": "membership coordinator",
    "tensor_?door": "fast path",
    "testimony": "stack reply",
    "thaw": "invalidate",
}


def entries() -> list[str]:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.split("| word | meaning |\n|---|---|\n")[1].split("\n\n")[0]
    return [line.split("|")[1].strip() for line in table.splitlines()]


def sources() -> list[Path]:
    """Those of the package and the core; tests tell stories in words of their own."""
    paths = [ROOT / name for name in sorted(checkout.files("horoclone", "csrc"))]
    return [
        path
        for path in paths
        if path.suffix in (".py", ".pyi", ".h", ".cc", ".cu") and "tests" not in path.relative_to(ROOT).parts
    ]


def test_the_glossary_is_short_and_names_each_word_once() -> None:
    words = [word for entry in entries() for word in entry.split(", ")]
    assert 8 < len(entries()) <= ENTRIES
    assert len(words) == len(set(words))


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_does_not_come_back(word: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(word, line, re.IGNORECASE)
    ]
    assert not found, f"use {RETIRED[word]!r}: {found}"
