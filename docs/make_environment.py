"""Writes the two pages of settings from the native module's table; --check only says whether they are current."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from itertools import groupby
from pathlib import Path

from horoclone import settings

FOLDER = Path(__file__).parent
# What people set; all others are for experts.
OFTEN = [
    "FUSION_THRESHOLD", "CYCLE_TIME", "SHARED_MEMORY", "HIERARCHICAL_ALLREDUCE", "CPU_OPERATIONS",
    "GPU_OPERATIONS", "NETWORK_INTERFACES", "START_TIMEOUT", "STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS",
    "STALL_SHUTDOWN_TIME_SECONDS", "DEADLOCK_TIME_SECONDS", "LIVENESS_ERROR_S", "WHY", "THREAD_AFFINITY",
    "LOG_LEVEL", "TIMELINE", "RECORDER_DIR", "AUTOTUNE", "AUTOTUNE_LOG", "DYNAMIC_PROCESS_SETS", "ADASUM",
    "SECRET", "SECRET_FILE", "ELASTIC_TIMEOUT", "NOTICE", "NOTICE_SIGNAL", "REPLICA_INTERVAL", "COMPARE",
    "NO_HOROVOD_ALIAS",
]  # fmt: skip
NOTE = "<!-- `make docs` writes this page from csrc/base/settings_table.cc (docs/make_environment.py). -->"
HEAD = f"""# Settings

{NOTE}

The environment variables that people set. The rest is on the [page for experts](environment_expert.md).

Every setting is read once, by `init()`. `HOROCLONE_X` is looked up first, then the Horovod name
where the meaning is the same; an empty value counts as unset. A value that is not accepted makes
`init()` raise `ValueError` with the variable, the value and what is accepted. `horoclonerun --help`
names the flag that sets a variable for all ranks. `horoclonerun` itself sets the numbers of the ranks
and a secret; only under another launcher is a secret needed. Bytes may have a suffix (KiB, MiB, GiB),
and 0 or 1 may be written as false or true, no or yes, off or on.

| variable | Horovod name | default | accepted | meaning |
|---|---|---|---|---|
"""
EXPERT_HEAD = f"""# Settings for experts

{NOTE}

These are for tuning, for tests, and for launchers; those that people set are on the
[page of settings](environment.md), which also says how all of them are read.
"""
CORE = """
## Read by the runtime

| variable | Horovod name | default | accepted | meaning |
|---|---|---|---|---|
"""
LAUNCHER = """
## Read by the launcher and the bootstrap

`horoclonerun` sets most of these for the processes that it starts.

| variable | Horovod name | default | accepted | meaning |
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


def with_unit(number: int) -> str:
    """A number of bytes as people write it: 1 GiB for 1073741824; others as they are."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if number % (1 << power) == 0:
            return f"{number >> power} {unit}"
    return str(number)


def accepted(knob: dict[str, str]) -> str:
    """What the table says, without what the page says once."""
    if knob["read_by"] != "core":
        return cell(knob["type"])
    text = (
        knob["accepts"]
        .replace(", or with a suffix KiB, MiB, GiB", "")
        .replace(" (also false, true, no, yes, off, on)", "")
    )
    text = re.sub(r"\d{7,}", lambda found: with_unit(int(found[0])), text)
    text = re.sub(r"^(whole bytes|a (whole )?number) from |^one of |^any ", "", text)
    return cell(
        text.replace("0 or 1", "0, 1").replace(" (s)", " s").replace(" (ms)", " ms").replace(" (us)", " us")
    )


def row(knob: dict[str, str]) -> str:
    names = (code(knob[column]) for column in ("name", "horovod", "default"))
    return line(*names, accepted(knob), cell(knob["help"])) + "\n"


def pages(knobs: list[dict[str, str]]) -> dict[str, str]:
    """Both pages by name, from the rows of _core.knobs()."""
    often = {f"HOROCLONE_{name}" for name in OFTEN}
    chosen = "".join(row(knob) for knob in knobs if knob["name"] in often)
    parts = [EXPERT_HEAD]
    for read_by, head in (("core", CORE), ("launcher", LAUNCHER)):
        rest = [knob for knob in knobs if knob["read_by"] == read_by and knob["name"] not in often]
        parts.append(head + "".join(map(row, rest)))
    parts.append(UNREAD)
    for text, group in groupby(settings.UNREAD, key=lambda one: one[2]):
        unread = list(group)
        names, defaults = (", ".join(code(one[at]) for one in unread if one[at]) for at in (0, 1))
        parts.append(f"{line(names, defaults, cell(text))}\n")
    built = (
        f"{settings.BUILD_TIME_INSTEAD} So nothing reads these, at build time or later, and nothing is said when they "
        f"are set: {', '.join(map(code, settings.BUILD_TIME))}."
    )
    parts.append(BUILD_TIME.format(names=textwrap.fill(built, 100, break_on_hyphens=False)))
    return {"environment.md": HEAD + chosen, "environment_expert.md": "".join(parts)}


def main() -> int:
    from horoclone import _core

    made = pages(json.loads(_core.knobs()))
    if "--check" in sys.argv[1:]:
        return 0 if all((FOLDER / name).read_text() == text for name, text in made.items()) else 1
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
