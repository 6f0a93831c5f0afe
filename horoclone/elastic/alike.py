"""Whether all ranks have made the same state: compared before a sync, where a difference would be a wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from horoclone import errors
from horoclone.elastic.generation import generation
from horoclone.objects import allgather_object, broadcast_object


def check_alike(forms: Sequence[Any], root: int, parts: str) -> None:
    """Every rank compares its list with the root's, and hears what each has found. A collective of all ranks.

    forms: what `parts` ("variables") are, one by one, in a fixed order; picklable, comparable. Where the lists of some
    ranks differ these raise ValueError. So do all others, but where those ranks have just come to a running job: the
    others go on without them, as after any loss (PeerLost).
    """
    roots = broadcast_object(list(forms), root, "hvd.elastic.forms")
    pairs = enumerate(zip_longest(forms, roots, fillvalue="nothing"))
    mine = next(
        (f"number {i} is {here} here and {there} there" for i, (here, there) in pairs if here != there), ""
    )
    told = allgather_object(mine, "hvd.elastic.alike")
    others = [rank for rank, text in enumerate(told) if text]
    if not others:
        return
    text = f"the {parts} of ranks {others} differ from those of rank {root} (rank {others[0]}: {told[others[0]]})"
    now = generation()
    if set(others) <= set(now.newcomers) and len(now.newcomers) < now.size and now.rank not in others:
        raise errors.PeerLost(f"{text}; they have just come, and end", others[0])
    raise ValueError(
        f"{text}. Build the same model and the same optimizer on every rank before the state is made."
    )
