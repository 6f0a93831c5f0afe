"""Numbers that a caller passes to run() and its kind: checked by name, before anything starts. Pure functions."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from horoclone.launch.hosts import MAX_SLOTS

LONGEST_S = 1e9


def whole(what: str, name: str, value: Any, least: int = 1, most: int = MAX_SLOTS) -> int | None:
    """value as int, None as it is. TypeError for what is no whole number (2.5, "2", True), ValueError outside of
    least...most."""
    if value is None:
        return None
    try:
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{what}: {name} must be a whole number, not {value!r} ({type(value).__name__})."
        ) from None
    if not least <= number <= most:
        raise ValueError(f"{what}: {name} must be from {least} to {most}, not {_shown(number)}.")
    return number


def seconds(what: str, name: str, value: Any) -> float | None:
    """value as float, None as it is. TypeError for what is no number, ValueError for NaN and what is below 0 or
    endless."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{what}: {name} must be a number of seconds, not {value!r} ({type(value).__name__})."
        )
    number = float(value) if abs(value) < LONGEST_S else math.nan  # type: ignore[operator]
    if not number >= 0:
        raise ValueError(f"{what}: {name} must be seconds, 0 or more, not {_shown(value)}.")
    return number


def one_of(what: str, first: tuple[str, int | None], second: tuple[str, int | None]) -> int | None:
    """Of two names for one thing. ValueError where they say two things."""
    if None not in (first[1], second[1]) and first[1] != second[1]:
        raise ValueError(
            f"{what}: {first[0]}={first[1]} and {second[0]}={second[1]} are the same thing; give one of them."
        )
    return second[1] if first[1] is None else first[1]


def _shown(number: Any) -> str:
    is_long = isinstance(number, int) and abs(number) >= 10**30
    return "a number of more than 30 digits" if is_long else repr(number)
