"""What a table takes as an id, a row or a number of its own: nothing becomes another number on its way to the servers.

Every error names the table or key, the argument and the value. Pure; thread: any.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from horoclone.arguments import given

NAME_BYTES = 200  # of a table's name, as the servers allow
_INT64 = np.iinfo(np.int64)


def check_name(what: str, name: Any) -> None:
    """For a table's name or a key: TypeError unless it is a str, ValueError for one that the servers cannot keep."""
    if not isinstance(name, str):
        raise TypeError(f"{what} {given(name)}: a name is a str")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what} {name!r}: a name has no lone surrogates") from None
    if not 1 <= length <= NAME_BYTES or "\0" in name:
        raise ValueError(f"{what} {given(name)}: a name has 1 to {NAME_BYTES} bytes, and none of them is 0")


def whole_number(where: str, argument: str, value: Any, least: int, most: int, also: str = "") -> int:
    """The integer. TypeError for a bool, a float or anything else, ValueError outside [least, most]."""
    possible = f"{also}{least} to {most} is possible"
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{where}: {argument}={given(value)}; {possible}")
    number = operator.index(value)
    if not least <= number <= most:
        raise ValueError(f"{where}: {argument}={number}; {possible}")
    return number


def real_number(where: str, argument: str, value: Any, below: float = float("inf")) -> float:
    """A number of 0 or more, and less than `below`, as float32 holds it. TypeError for what is no real number."""
    if isinstance(value, (bool, np.bool_, str, bytes, complex, np.complexfloating)) or not hasattr(
        value, "__float__"
    ):
        raise TypeError(f"{where}: {argument}={given(value)}; a number of 0 or more is needed")
    number = float(value)
    with np.errstate(over="ignore", under="ignore"):
        kept = float(np.float32(number))
    if not 0 <= number < below:
        limit = "" if below == float("inf") else f", less than {below:g}"
        raise ValueError(f"{where}: {argument}={number}; a number of 0 or more{limit} is needed")
    if not kept < below or (kept == 0) != (number == 0):
        raise ValueError(
            f"{where}: {argument}={number}, which float32, in which servers compute, makes {kept}"
        )
    return number


def int64_ids(where: str, ids: Any) -> np.ndarray[Any, Any]:
    """Contiguous int64. TypeError for ids that are no integers, ValueError for those that int64 cannot hold."""
    if not hasattr(ids, "dtype"):  # NumPy makes floats of a list with 2**63 and -1 in it
        ids = _of_integers(where, ids)
    array = _plain(where, "ids", ids)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{where}: ids of {array.dtype}, the first is {given(_first(array))}; ids are integers"
        )
    if array.ndim != 1:
        raise ValueError(f"{where}: ids of shape {array.shape}; a list of them is needed")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and (too_large := array > _INT64.max).any():
        raise ValueError(f"{where}: ids has {array[too_large][0]}, and ids are int64: at most {_INT64.max}")
    return np.ascontiguousarray(array, np.int64)


def _of_integers(where: str, ids: Any) -> np.ndarray[Any, Any]:
    try:
        some = list(ids)
    except TypeError:
        raise TypeError(f"{where}: ids={given(ids)}; a list or array of integers is needed") from None
    for one in some:
        if isinstance(one, (list, tuple)) or getattr(one, "ndim", False):
            raise ValueError(f"{where}: ids of shape {np.shape(some)}; a list of them is needed")
        if isinstance(one, (bool, np.bool_)) or not hasattr(one, "__index__"):
            raise TypeError(f"{where}: ids has {given(one)}; ids are integers")
        if not _INT64.min <= operator.index(one) <= _INT64.max:
            raise ValueError(f"{where}: ids has {one}, and ids are int64: {_INT64.min} to {_INT64.max}")
    return np.array([operator.index(one) for one in some], np.int64)


def float32_rows(where: str, argument: str, rows: Any) -> np.ndarray[Any, Any]:
    """Contiguous float32: floats rounded, integers as they are. TypeError for other dtypes, ValueError for a value that
    would be another one: an integer that float32 cannot hold, a finite number that becomes infinite."""
    array = _plain(where, argument, rows)
    is_float = array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    if not is_float and array.dtype.kind not in "iu":
        raise TypeError(f"{where}: {argument} of {array.dtype}; float32 is kept, so real numbers are needed")
    if array.dtype == np.float32:
        return np.ascontiguousarray(array, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        kept = np.ascontiguousarray(array.astype(np.float32))
    changed = np.isinf(kept) & ~np.isinf(array) if is_float else _not_held(array, kept)
    if changed.any():
        raise ValueError(
            f"{where}: {argument} has {array[changed][0]} ({array.dtype}), which float32 makes {kept[changed][0]}"
        )
    return kept


def _not_held(integers: np.ndarray[Any, Any], kept: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which integers are others as float32. Compared as Python's: NumPy compares large ones as float64."""
    changed = (
        (integers > 1 << 24) | (integers < -(1 << 24))
        if integers.dtype.itemsize > 2
        else np.zeros(integers.shape, bool)
    )
    changed[changed] = [int(a) != int(b) for a, b in zip(integers[changed], kept[changed], strict=True)]
    return changed


def _plain(where: str, argument: str, values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(
            f"{where}: {argument} is a masked array, whose mask would be lost; select or fill first"
        )
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{where}: {argument} is not an array: {error}") from None


def _first(array: np.ndarray[Any, Any]) -> Any:
    return array.reshape(-1)[0] if array.size else None
