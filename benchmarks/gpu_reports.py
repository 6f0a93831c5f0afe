"""What the programs that `make gpu` runs have printed or written, read: pytest's reports, JSON among other output.

Thread: any.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any


def first_object(output: str) -> dict[str, Any]:
    """The JSON object that begins on the first line which begins one; libraries warn before and after it."""
    for at, character in enumerate(output):
        if character == "{" and (at == 0 or output[at - 1] == "\n"):
            try:
                return dict(json.JSONDecoder().raw_decode(output, at)[0])
            except ValueError:
                continue
    return {}


def told(log: str) -> dict[str, Any]:
    """Of what pytest -v has printed so far: as counted(), and which test was under way."""
    lines = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b(.*)", log, re.MULTILINE)
    begun = re.findall(r"^(\S+::.*)$", log, re.MULTILINE)
    ended = {name for name, _, _ in lines}
    return {
        "passed": sum(verdict == "PASSED" for _, verdict, _ in lines),
        "failed": [name for name, verdict, _ in lines if verdict in ("FAILED", "ERROR")],
        "skipped": [name + rest.rstrip() for name, verdict, rest in lines if verdict == "SKIPPED"],
        "under way": [
            line.strip() for line in begun[-1:] if not any(line.startswith(name + " ") for name in ended)
        ],
    }


def counted(report: Path) -> dict[str, Any]:
    """Of pytest's report: how many passed, which failed, and why others were skipped."""
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            found["failed"].append(name)
        elif (skipped := case.find("skipped")) is not None:
            found["skipped"].append(f"{name}: {skipped.get('message')}")
        else:
            found["passed"] += 1
    return found
