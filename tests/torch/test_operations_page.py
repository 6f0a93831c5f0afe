"""The page of operations: its blocks run as they stand on two ranks, and it names every operation."""

from __future__ import annotations

import re
from pathlib import Path

from world import ranks

import horoclone.torch as hvd
from horoclone import arrays
from horoclone.torch import operations

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@ranks(2)
def test_every_block_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 8
    for number, block in enumerate(blocks):
        exec(compile(block, f"operations.md, block {number}", "exec"), {})
    hvd.barrier()


def test_every_operation_is_named() -> None:
    text = PAGE.read_text()
    forms = re.compile(r"^grouped_|_async_?$|_$")
    functions = [*arrays.__all__, *operations.__all__]
    assert len(functions) > 60
    missing = {n for n in functions if n not in text and forms.sub("", forms.sub("", n)) not in text}
    assert not missing
