"""What the comparison of the ranks' values says in a test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told(action: str, steps: int = 1) -> Iterator[list[str]]:
    """Optimizers made within compare like that; what the first rank is told."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    before = {name: os.environ.get(name) for name in ("HOROCLONE_COMPARE", "HOROCLONE_COMPARE_STEPS")}
    os.environ |= {"HOROCLONE_COMPARE": action, "HOROCLONE_COMPARE_STEPS": str(steps)}
    handler = Handler()
    logging.getLogger("horoclone").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("horoclone").removeHandler(handler)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
