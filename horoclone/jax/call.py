"""What one call asks for, in words that are equal on every rank, and the names of calls that have none.

Thread: whichever traces; the counters of names are each thread's own.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

from horoclone import ops

SELF_TEST = -1  # copies its arguments, and fails when the root is not 0
VISIT = -2  # a branch is come to, in one of whose arms a call is_step; gives its argument back

NAMES = {
    ops.ALLREDUCE: "allreduce",
    ops.ALLGATHER: "allgather",
    ops.BROADCAST: "broadcast",
    ops.ALLTOALL: "alltoall",
    ops.REDUCESCATTER: "reducescatter",
    SELF_TEST: "self-test",
}


@dataclass(frozen=True)
class Call:
    """`members`: the process set as native.members_of writes it; `size`: how many they are, `position`: this rank's
    place among them (both 0 where the operation does not depend on them). `is_gradient`: it is itself the gradient of
    an allgather or reducescatter, so that its own is the exact one and not Horovod's, or second derivatives would not
    be those of the first. `is_step`: it belongs to an optimizer's step; one that this rank alone leaves out must not be
    made up for by its next."""

    op: int
    name: str  # "": unnamed, outside of programs only
    reduce: int = ops.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    members: str = ""
    size: int = 0
    position: int = 0
    is_gradient: bool = False
    is_step: bool = False


def rows_of(rows: int, size: int, position: int) -> int:
    """How many of `rows` rows a reducescatter gives to the member at `position`: the first have one more if uneven."""
    return rows // size + (1 if position < rows % size else 0)


class _Traces(threading.local):
    """The traces that this thread was in last, with how often each had a call of some form."""

    def __init__(self) -> None:
        self.recent: deque[tuple[Any, Counter[str]]] = deque(maxlen=64)

    def counter(self) -> Counter[str]:
        state = get_opaque_trace_state()
        for known, counter in self.recent:
            if known == state:
                return counter
        self.recent.append((state, Counter()))
        return self.recent[-1][1]


_traces = _Traces()
_top_level: Any = None


def is_tracing() -> bool:
    """Whether a program is being built (or a derivative or a batch is taken) in this thread."""
    global _top_level
    if _top_level is None:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(get_opaque_trace_state()))  # it traces nothing
        thread.start()
        thread.join()
        _top_level = found[0]
    return bool(get_opaque_trace_state() != _top_level)


def name_for(op: int, paths: Sequence[str], leaves: Sequence[Any], *more: Any) -> str:
    """A name for an unnamed call in a program, or of a step, from what is equal on every rank.

    That is the operation, the tree's paths, shapes and dtypes, and how many calls of this form the trace had before;
    never the identity of an object. Outside of a program calls come one after another, and need no number.
    """
    form = [(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in zip(paths, leaves, strict=True)]
    digest = hashlib.sha256(repr((op, form, more)).encode()).hexdigest()[:12]
    if not is_tracing():
        return f"jax.{NAMES[op]}.{digest}"
    counter = _traces.counter()
    counter[digest] += 1
    return f"jax.{NAMES[op]}.{digest}.{counter[digest]}"


def paths_and_leaves(tree: Any) -> tuple[list[str], list[Any], Any]:
    """The paths of a pytree's leaves as text, the leaves, and its structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs], structure
