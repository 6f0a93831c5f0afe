"""Owned marks, in a state of all ranks, what one rank alone has: elastic states and checkpoints both know it."""

from __future__ import annotations

from typing import Any


class Owned:
    """Marks a value in a state as one that only this rank has: Owned(value). Its value may differ from rank to rank, in
    form too.

    load() of a checkpoint gives Pieces in its place: the values of all the ranks that saved.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
