"""Prints what CHANGELOG.md says of the version that a tag names: python .github/release_notes.py v1.2.3.

Fails where the tag is not the version in horoclone/__init__.py, or where the changelog calls that version unreleased.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, root: Path = ROOT) -> str:
    """SystemExit with the reason where there is nothing to release."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "horoclone" / "__init__.py").read_text(), re.M)
    version = found[1] if found else ""
    if tag != f"v{version}":
        raise SystemExit(
            f"the tag is {tag}, and horoclone/__init__.py says {version}: the tag must be v{version}"
        )
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    mine = [section for section in sections if section.split()[0] == version]
    if not mine:
        raise SystemExit(f"CHANGELOG.md has no section '## {version}': write down what users will notice")
    heading, _, text = mine[0].partition("\n")
    if "not released" in heading:
        raise SystemExit(f"CHANGELOG.md calls it '{heading}': write the date of the release there")
    return text.strip()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(notes(sys.argv[1]))
