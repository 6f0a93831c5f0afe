"""Whether all ranks have made the same state: compared before a sync, where a difference would be a wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from horoclone import arrays
from horoclone.objects import broadcast_object


def check_alike(forms: Sequence[Any], root: int, parts: str) -> None:
    """Every rank compares its list with the root's, and hears what the others found. A collective of all ranks.

    forms: what `parts` ("variables") are, one by one, in a fixed order; picklable, comparable. ValueError, on every
    rank, when the lists of some rank differ.
    """
    roots = broadcast_object(list(forms), root, "hvd.elastic.forms")
    verdicts = arrays.allgather(np.array([list(forms) == roots], np.int64), "hvd.elastic.alike")
    if verdicts.all():
        return
    others = [rank for rank, verdict in enumerate(verdicts.tolist()) if not verdict]
    pairs = enumerate(zip_longest(forms, roots, fillvalue="nothing"))
    first = next((f" (number {i} is {a} here and {b} there)" for i, (a, b) in pairs if a != b), "")
    raise ValueError(
        f"the {parts} of ranks {others} differ from those of rank {root}{first}. Build the same model and the same "
        "optimizer on every rank before the state is made."
    )
