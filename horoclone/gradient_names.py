"""What a step's name says of the variables whose gradients are sent. Without it those of different variables, on ranks
that lack different ones, would be added up where they are alike in shape and number. Standard library only.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise

MAX_NUMBERS = 40  # characters that list variables


def named_by(sent: Sequence[int], count: int) -> str:
    """The end of a name: "" where the gradients of all `count` variables are sent, else the numbers of those that are,
    which are given in rising order."""
    if len(sent) == count or not sent:
        return ""
    cuts = [0, *(i for i in range(1, len(sent)) if sent[i] != sent[i - 1] + 1), len(sent)]
    runs = [(sent[a], sent[b - 1]) for a, b in pairwise(cuts)]
    text = "_".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    if len(text) > MAX_NUMBERS:
        text = f"{text[:MAX_NUMBERS]}.{zlib.crc32(text.encode()):08x}"
    return f".variables.{text}.of.{count}"
