"""Under Horovod's name: small functions that scripts and libraries take from horovod.tensorflow.util."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import tensorflow as tf

from horoclone.common.util import num_rank_is_power_2
from horoclone.ops import resolve_reduce

__all__ = [
    "_cache", "_executing_eagerly", "_make_subgraph", "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility", "refs_to_vars", "vars_to_refs",
]  # fmt: skip


def _executing_eagerly() -> bool:
    """Whether ops run at once."""
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function)  # type: ignore[no-any-return]


_cache = lru_cache(maxsize=None)


def vars_to_refs(variables: Iterable[Any]) -> tuple[Any, ...]:
    """Returns hashable references to variables."""
    return tuple(variable.ref() for variable in variables)


def refs_to_vars(references: Iterable[Any]) -> list[Any]:
    """Returns the variables behind references."""
    return [reference.deref() for reference in references]


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Returns the reduction that these two arguments of a function mean. ValueError for both."""
    return resolve_reduce(average, op)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Returns whether a number of ranks is a power of two. Adasum needs that in Horovod, not here."""
    return num_rank_is_power_2(num_rank)
