"""The recorded table: what Horovod computed, by suite and case. See README.md."""

from __future__ import annotations

import functools
import json
import lzma
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETS = {2: {"a": [0], "b": [1]}, 3: {"a": [0, 1], "b": [2], "c": [0, 2]}}  # in all suites of that size


@dataclass(frozen=True)
class Suite:
    """One recorded job: its cases, in the order in which they ran."""

    name: str
    ranks: int
    dynamic: bool  # init(process_sets="dynamic")
    cases: list[dict[str, Any]]
    codes: list[str]

    @property
    def sets(self) -> dict[str, list[int]]:
        return SETS[self.ranks]

    @property
    def label(self) -> str:
        return f"{self.name}-{self.ranks}"

    def code_of(self, case: dict[str, Any]) -> str:
        return self.codes[case["code"]]


@functools.cache
def suites() -> list[Suite]:
    """All of the table; of another one where HC_RECORDED names a file of the same form, compressed or not."""
    path = Path(os.environ.get("HC_RECORDED", HERE / "recorded.json.xz"))
    data = json.loads(lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes())
    return [
        Suite(each["suite"], each["ranks"], each["process_sets"] == "dynamic", each["cases"], data["codes"])
        for each in data["suites"]
    ]


def suite_of(name: str, ranks: int) -> Suite:
    return next(each for each in suites() if (each.name, each.ranks) == (name, ranks))
