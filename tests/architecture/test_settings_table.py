"""One truth for each setting: its default stands once, and somebody reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from horoclone import settings

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
TABLE = CSRC / "base" / "settings_table.h"
ROWS = TABLE.with_suffix(".cc")
# How fields of other structures call a setting.
OTHER_NAMES = {
    "ring_threshold_bytes": "ring_from_bytes",
    "init_report_s": "report_after_s",
    "gpu_peer_bytes": "peer_bytes",
    "control_fanout": "fanout",
    "liveness_probe_s": "probe_s",
    "liveness_warn_s": "warn_s",
    "liveness_error_s": "error_s",
    "autotune_warmup_samples": "warmup_samples",
    "autotune_steps_per_sample": "steps_per_sample",
    "autotune_max_samples": "max_samples",
}
# A field of another meaning: how far off a clock may be, before that is known.
OTHER_MEANINGS = {"csrc/engine/engine.h: double ahead_s = 0, error_s = 1e9;"}


def fields() -> list[tuple[str, str]]:
    """(field, name of the variable)"""
    found = re.findall(r"{&Config::(\w+), \"(\w+)\"", ROWS.read_text())
    assert len(found) > 40 and len(found) == len(set(found))
    return found


def sources() -> dict[str, str]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in sorted(CSRC.rglob("*"))
        if path.suffix in (".h", ".cc") and "tests" not in path.parts and path not in (TABLE, ROWS)
    }


def test_every_setting_of_the_core_is_read_by_somebody() -> None:
    text = "\n".join(text for name, text in sources().items() if not name.startswith("csrc/base/config"))
    python = "\n".join(
        path.read_text() for path in (ROOT / "horoclone").rglob("*.py") if path.name != "settings.py"
    )
    idle = [
        field
        for field, name in fields()
        if not re.search(rf"\bc(?:onfig)?_?\.{field}\b", text)
        and not re.search(rf"environ.*\W(?:HOROCLONE_)?{name}\W", python)
    ]
    assert not idle, f"make them work, or take them out and say in horoclone/settings.py what to use: {idle}"


def test_no_structure_writes_the_default_of_a_setting_again() -> None:
    names = "|".join({*dict(fields()), *OTHER_NAMES.values()})
    # A size of nothing and a switch that is off say that a structure was not filled yet.
    again = re.compile(
        rf"^ *(?:size_t|double|int|int64_t|uint64_t|bool) [^();]*\b(?:{names}) = (?!0\b|false\b)[\d(st].*$",
        re.MULTILINE,
    )
    found = {
        f"{path}: {line.strip()}"
        for path, text in sources().items()
        if path.endswith(".h")
        for line in again.findall(text)
    }
    wrong = {one for one in found if not any(one.startswith(known) for known in OTHER_MEANINGS)}
    assert not wrong, f"take them from `defaults` (base/settings_table.h): {sorted(wrong)}"


def test_what_the_launcher_knows_of_the_table_is_what_stands_there() -> None:
    core = pytest.importorskip("horoclone._core", reason="the native module is not built")
    defaults = {knob["name"]: knob["default"] for knob in json.loads(core.knobs())}
    assert float(defaults["HOROCLONE_START_TIMEOUT"]) == settings.START_TIMEOUT_S
    written = [
        p
        for p in (ROOT / "horoclone").rglob("*.py")
        if re.search(r"start_timeout\w*\W.*\b300\b", p.read_text())
    ]
    assert not written, written
