"""Writes docs/environment.md from the native module's table of settings; --check only says whether it is current."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from horoclone import settings

PAGE = Path(__file__).with_name("environment.md")
HEAD = """# Environment variables

<!-- `make docs` writes this page from csrc/base/settings_table.cc (docs/make_environment.py). -->

Every setting is read once, by `init()`. `HOROCLONE_X` is looked up first, then the Horovod name
where the meaning is the same; an empty value counts as unset. A value that is not accepted makes
`init()` raise `ValueError` with the variable, the value and what is accepted.
"""
CORE = """
## Read by the runtime

| variable | Horovod name | default | accepted | meaning |
|---|---|---|---|---|
"""
LAUNCHER = """
## Read by the launcher and the bootstrap

`horoclonerun` sets most of these for the processes that it starts; under another launcher only the
secret may be needed.

| variable | Horovod name | default | type | meaning |
|---|---|---|---|---|
"""


UNREAD = """
## Horovod's variables that nothing here reads

Where one of these is set to something else than Horovod's default, rank 0 says so at its first
`init()`.

| variable | Horovod's default | instead |
|---|---|---|
"""
BUILD_TIME = """
## Horovod's variables at build time

{names}
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def page(knobs: list[dict[str, str]]) -> str:
    """The whole page, from the rows of _core.knobs()."""
    parts = [HEAD]
    for read_by, head, third in (("core", CORE, "accepts"), ("launcher", LAUNCHER, "type")):
        rows = [
            "| "
            + " | ".join(
                [*(code(k[c]) for c in ("name", "horovod", "default")), cell(k[third]), cell(k["help"])]
            )
            + " |"
            for k in knobs
            if k["read_by"] == read_by
        ]
        parts.append(head + "\n".join(rows) + "\n")
    parts.append(
        UNREAD + "".join(f"{line(code(n), code(d), cell(text))}\n" for n, d, text in settings.UNREAD)
    )
    names = (
        f"{settings.BUILD_TIME_INSTEAD} So nothing reads these, at build time or later, and nothing is said when they "
        f"are set: {', '.join(map(code, settings.BUILD_TIME))}."
    )
    parts.append(BUILD_TIME.format(names=textwrap.fill(names, 100, break_on_hyphens=False)))
    return "".join(parts)


def main() -> int:
    from horoclone import _core

    text = page(json.loads(_core.knobs()))
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
