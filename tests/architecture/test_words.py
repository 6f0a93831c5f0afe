"""One word, one meaning: the glossary stays short, and words that had several meanings do not come back."""

from __future__ import annotations

import re
from functools import cache
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


@cache
def lines() -> list[tuple[str, str]]:
    """(place, text) of each line of the package and the core; tests tell stories in words of their own."""
    return [
        (f"{name}:{number}", line)
        for name in sorted(checkout.files("horoclone", "csrc"))
        if Path(name).suffix in (".py", ".pyi", ".h", ".cc", ".cu") and "tests" not in Path(name).parts
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
    ]


def test_the_glossary_is_short_and_names_each_word_once() -> None:
    words = [word for entry in entries() for word in entry.split(", ")]
    assert 8 < len(entries()) <= ENTRIES
    assert len(words) == len(set(words))


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_does_not_come_back(word: str) -> None:
    found = [place for place, line in lines() if re.search(word, line, re.IGNORECASE)]
    assert not found, f"use {RETIRED[word]!r}: {found}"
