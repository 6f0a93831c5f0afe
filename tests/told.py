"""What the comparison of the ranks' values says in a test; the questions that are the same for bindings with programs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


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


def finds_a_forgotten_broadcast(training: Callable[..., Any], rank: int, says: str, error: str) -> None:
    """training(compiled, seed) has steps(count), broadcast() and flip() of a bit."""
    for compiled in (False, True):
        with told("warn") as lines:
            one = training(compiled, rank)
            one.steps(1)
            assert not lines
            one.steps(3)
            assert len(lines) == (rank == 0), lines
            assert all("after step 2 the ranks" in line and says in line for line in lines)
        with told("error"):
            one = training(compiled, rank)
            one.steps(1)
            one.broadcast()
            one.steps(3)
            if rank == 1:
                one.flip()
            with pytest.raises(Exception, match=error):
                one.steps(1)


def finds_one_forgotten_after_the_tenth_step(training: Callable[..., Any], rank: int) -> None:
    """With fewer comparisons; in a program each step takes its share of the values by the step's number."""
    for compiled in (False, True):
        with told("error", 100):
            one = training(compiled, rank)
            one.steps(8)
            one.broadcast()
            one.steps(4)
            one = training(compiled, rank)
            one.steps(10)
            with pytest.raises(
                Exception, match="after step 10 the ranks .* before the first step or after it"
            ):
                one.steps(1)
