"""Writes the list of docs/torch_ecosystem.md from the rows that tests/torch/ecosystem.py runs."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "torch_ecosystem.md"
BEGIN, END = "<!-- written by `make docs` -->\n\n", "<!-- end of the list -->\n"


def page() -> str:
    """The whole page: what stands between the two marks is replaced."""
    sys.path.insert(0, str(ROOT / "tests" / "torch"))
    import ecosystem

    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE.name} lacks the line {END.strip()}")
    return f"{before}{BEGIN}{ecosystem.listed()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
