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
NOTE = "<!-- `make docs` writes this page from csrc/base/settings_table.cc. -->"
HEAD = f"""# Settings

{NOTE}

The environment variables that people set; the rest is on the [page for experts](environment_expert.md).

Every setting is read once, by `init()`: `HOROCLONE_X` first, then the Horovod name that stands in
brackets with the unit or the words that are accepted. Defaults stand behind `=`. An empty value counts
as unset; one out of range makes `init()` raise `ValueError` with the range. `horoclonerun --help`
names the flag that sets a variable for all ranks. Bytes may have a suffix (KiB, MiB, GiB), and 0 or 1
may be written as false or true, no or yes, off or on.

"""
EXPERT_HEAD = f"""# Settings for experts

{NOTE}

For tuning, for tests, and for launchers. The [page of settings](environment.md) has those that people
set, and says how all of them are read.
"""
CORE = """
## Read by the runtime

"""
LAUNCHER = """
## Read by the launcher and the bootstrap

"""
SET_BY_LAUNCHER = "; set by the launcher."
FOR_RANKS = """
`horoclonerun` sets these for the processes that it starts:

"""


UNREAD = """
## Horovod's variables that nothing here reads

Where one of these is set to something else than Horovod's default, which stands in brackets, rank 0
says so at its first `init()`.

"""
BUILD_TIME = """
## Horovod's variables at build time

{names}
"""


def accepted(knob: dict[str, str]) -> str:
    """The words that are accepted, or the unit of a number; init() says what the range is."""
    if knob["read_by"] != "core":
        return "s" if knob["type"] == "seconds" else ""
    words = re.fullmatch(r"one of (.*\|.*)", knob["accepts"])
    unit = re.search(r" \((s|ms|us)\)$", knob["accepts"])
    return words[1] if words else unit[1] if unit else ""


def item(knob: dict[str, str]) -> str:
    name = f"{knob['name']}={knob['default']}" if knob["default"] else knob["name"]
    horovod = f"`{knob['horovod']}`" if knob["horovod"] else ""
    inside = "; ".join(filter(None, (horovod, accepted(knob))))
    return f"- `{name}`{f' ({inside})' if inside else ''}: {knob['help']}\n"


def pages(knobs: list[dict[str, str]]) -> dict[str, str]:
    """Both pages by name, from the rows of _core.knobs()."""
    often = {f"HOROCLONE_{name}" for name in OFTEN}
    chosen = "".join(item(knob) for knob in knobs if knob["name"] in often)
    rest = [knob for knob in knobs if knob["name"] not in often]
    core = [item(knob) for knob in rest if knob["read_by"] == "core"]
    launcher = [item(knob) for knob in rest if knob["read_by"] == "launcher"]
    set_by_it = [one.replace(SET_BY_LAUNCHER, ".") for one in launcher if SET_BY_LAUNCHER in one]
    parts = [EXPERT_HEAD, CORE, *core, LAUNCHER, *(one for one in launcher if SET_BY_LAUNCHER not in one)]
    parts += [FOR_RANKS, *set_by_it, UNREAD]
    for text, group in groupby(settings.UNREAD, key=lambda one: one[2]):
        unread = list(group)
        names, defaults = (", ".join(f"`{one[at]}`" for one in unread if one[at]) for at in (0, 1))
        parts.append(f"- {names}{f' ({defaults})' if defaults else ''}: {text}\n")
    built = (
        f"{settings.BUILD_TIME_INSTEAD} So nothing reads these, and nothing is said when they "
        f"are set: {', '.join(f'`{name}`' for name in settings.BUILD_TIME)}."
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
