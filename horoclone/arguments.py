"""Arguments of a wrong type: what was given, what is accepted, and which argument it is. Standard library only.

Most calls are not checked beforehand, which would cost a small one a tenth of its time: they are explained when they
have failed. Thread: any.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable
from typing import Any

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 60


def given(value: Any) -> str:
    """`'ab' (a str)`, `None`, `<object ...> (a package.Kind)`: a value and its type, at most about 100 characters."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = _shown.repr(value)
    except Exception:  # the repr of somebody else's object
        text = "an object"
    text = " ".join(text.split())
    article = "an" if name[0] in "aeiouAEIOU" else "a"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({article} {name})"


def wrong_type(call: str, argument: str, value: Any, accepted: str) -> TypeError:
    """What to raise. call: the public function's name. accepted: `a number`."""
    return TypeError(f"{call}: {argument}={given(value)} cannot be used; {argument} takes {accepted}.")


def whole_numbers(text: str) -> list[int]:
    """`2,4,8` of a command line, all above 0. For argparse, to which its error belongs."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        from argparse import ArgumentTypeError  # not loaded for a program that only imports horoclone

        raise ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 2,4,8")
    return [int(part) for part in parts]


def refuse_mask(array: Any) -> None:
    """ValueError for a masked array of NumPy, of which np.asarray() and TensorFlow take what lies under the mask."""
    if hasattr(array, "mask") and hasattr(array, "filled"):
        raise ValueError("a masked array cannot be passed: its mask would be lost. Pass array.filled(value)")


def is_integer(value: Any) -> bool:
    """Whether it is one, and no bool."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not _is_bool(value)


def is_number(value: Any) -> bool:
    """Whether it is a real number: no bool, nothing complex, no NaN."""
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        return False
    if _is_bool(value) or getattr(getattr(value, "dtype", None), "kind", "") == "c":
        return False
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return number == number


def _is_bool(value: Any) -> bool:
    """Python's or NumPy's: True is the integer 1 and the number 1.0 to all who do not look."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def _is_splits(value: Any) -> bool:
    if value is None:
        return True
    try:
        return all(is_integer(count) for count in value)
    except TypeError:
        return False


_NUMBER, _INTEGER = (is_number, "a number that is real and not NaN"), (is_integer, "an integer")
SPLITS = "a list of integers, one for each rank of the process set, or None"
# argument of a public function -> (what fits, in words)
_ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda value: value is None or isinstance(value, str),
        "a str, or None for an unnamed operation",
    ),
    "prescale_factor": _NUMBER,
    "postscale_factor": _NUMBER,
    "root_rank": (is_integer, "the rank of a process, an integer"),
    "splits": (_is_splits, SPLITS),
    "tag": _INTEGER,
    "priority": _INTEGER,
    "device": (is_integer, "the number of a GPU, an integer (-1: the current one)"),
}


def check(call: str, **arguments: Any) -> None:
    """TypeError for the first argument of a wrong type. For calls that are so long that a check costs nothing."""
    for argument, value in arguments.items():
        fits, accepted = _ACCEPTED[argument]
        if not fits(value):
            raise wrong_type(call, argument, value, accepted)


def explained(call: str, error: TypeError, **arguments: Any) -> TypeError:
    """The reason why a call has failed with `error`: the first argument of a wrong type, or `error` when all fit."""
    try:
        check(call, **arguments)
    except TypeError as reason:
        return reason
    return error


def root(call: str, root_rank: Any) -> int:
    """root_rank as the core's number. TypeError unless it is an integer."""
    if type(root_rank) is not int:
        check(call, root_rank=root_rank)
    return int(root_rank)


def check_compression(call: str, compression: Any) -> None:
    """TypeError for what has not the two functions of a compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        accepted = "hvd.Compression.none, hvd.Compression.fp16, or a class with compress and decompress"
        raise wrong_type(call, "compression", compression, accepted)
