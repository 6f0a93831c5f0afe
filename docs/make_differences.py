"""Writes the lists of docs/from_horovod.md from the list of what differs on purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "from_horovod.md"
LIST = ROOT / "tests" / "horovod_results" / "deliberate.yaml"
TABLES = ("deliberate", "missing", "better")


def rows(table: str, entries: dict[str, dict[str, Any]]) -> str:
    """One list in Markdown; a line instead of it where it has no entry."""
    chosen = [each for each in entries.values() if each["table"] == table]
    if not chosen:
        return "Nothing that the recorded results show.\n"
    if table == "better":  # the page says of all that they do not work there, and here do
        said = [each["what"] + (f": {each['ours']}" if each["ours"] != "works" else "") for each in chosen]
        return "".join(f"- {one}\n" for one in said)
    return "".join(f"- *{each['what']}*: {each['there']}. **Here:** {each['ours']}\n" for each in chosen)


def page() -> str:
    """The whole page: what stands between the marks of a list is replaced."""
    text = PAGE.read_text()
    entries = yaml.safe_load(LIST.read_text())
    unknown = {each["table"] for each in entries.values()} - set(TABLES)
    if unknown:
        raise ValueError(f"{LIST.name}: no such table: {sorted(unknown)}; use one of {TABLES}")
    for table in TABLES:
        begin, end = f"<!-- {table}: written by `make docs` -->\n", f"<!-- end of {table} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{PAGE.name} has no place for the table {table!r}")
        text = before + begin + "\n" + rows(table, entries) + "\n" + end + after
    return text


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
