"""Arguments of wrong types, and what each operation has to say of them; each binding's test_argument_types.py asks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import horoclone as hvd


class Odd:
    """Of no type that anybody accepts."""

    def __repr__(self) -> str:
        return "<Odd>"


# A wrong value for each argument, as it is shown, and what the text says is accepted.
WRONG: dict[str, tuple[Any, str, str]] = {
    "name": (3, "3 (an int)", "a str, or None"),
    "average": ("grad", "'grad' (a str)", "True, False or None"),
    "op": ("sum", "'sum'", "hvd.Sum"),
    "prescale_factor": ("2", "'2' (a str)", "a number"),
    "postscale_factor": ([1.0], "[1.0] (a list)", "a number"),
    "process_set": ([0], "[0]", "ProcessSet"),
    "compression": ("fp16", "'fp16' (a str)", "Compression.fp16"),
    "root_rank": ("0", "'0' (a str)", "rank of a process"),
    "splits": (5, "5 (an int)", "integers, one for each rank"),
    "priority": (1.5, "1.5 (a float)", "an integer"),
    "tag": ("a", "'a' (a str)", "an integer"),
    "dst": ("a", "'a'", "rank of a process"),
    "src": (1.5, "1.5", "rank of a process"),
    "device": ("gpu", "'gpu' (a str)", "number of a GPU"),
    "handle": (["h"], "['h'] (a list)", "_async"),
    "tensors": (7, "7 (an int)", "list or tuple"),
    "arrays": (7, "7 (an int)", "list or tuple"),
}
# What Python casts without a word where nobody looks: all of them are as wrong.
CAST: dict[str, tuple[Any, ...]] = {
    "root_rank": (True, False, 0.0, 1.7, np.float32(0), np.bool_(False), None, 0j, np.array([0.0])),
    "prescale_factor": (
        True, np.bool_(True), 1j, np.complex64(1), float("nan"), np.float32("nan"), 10**400, None, b"1"
    ),
    "postscale_factor": (False, np.complex128(1), float("nan"), "nan", np.ones(2)),
    "priority": (True, 1.0, np.float32(1), 10**30),
    "tag": (True, 1.0, np.float64(1)),
    "device": (True, 1.0),
    "splits": ([1.5], [True], [np.float32(1)], "11", ["1"]),
    "name": (b"x", 1.5, True),
}  # fmt: skip
REDUCTION = ("average", "name", "op", "prescale_factor", "postscale_factor", "process_set")
SHARE = ("name", "op", "prescale_factor", "postscale_factor", "process_set")
ROOTED = ("root_rank", "name", "process_set")


def calls_of(
    prefix: str, suffixes: tuple[str, ...], arguments: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    return {prefix + suffix: arguments for suffix in suffixes}


FOUR = ("", "_", "_async", "_async_")
TWO = ("", "_async")


def check(
    module: Any, calls: Mapping[str, tuple[str, ...]], given: Mapping[str, Callable[[], dict[str, Any]]]
) -> None:
    """Each call with each of its arguments wrong, all others right. given: right arguments by the call's first word."""
    for name, arguments in calls.items():
        function = getattr(module, name)
        kind = max((word for word in given if name.startswith(word)), key=len)
        for argument in arguments:
            value, shown, accepted = WRONG[argument]
            try:
                function(**{**given[kind](), argument: value})
            except (TypeError, ValueError, hvd.HorovodInternalError) as error:
                text = str(error)
                assert f"{argument}=" in text or argument in ("op",), f"{name}: which argument? {text}"
                assert shown in text, f"{name}({argument}=...): what was given? {text}"
                assert accepted in text, f"{name}({argument}=...): what is accepted? {text}"
            else:
                raise AssertionError(f"{name}({argument}={value!r}) was accepted")
            for other in CAST.get(argument, ()):
                try:
                    function(**{**given[kind](), argument: other})
                except (TypeError, ValueError, hvd.HorovodInternalError) as error:
                    assert argument in str(error), f"{name}({argument}={other!r}): {error}"
                else:
                    raise AssertionError(f"{name}({argument}={other!r}) was accepted")


ARRAYS = {
    **calls_of("allreduce", FOUR, REDUCTION),
    **calls_of("allreduce_async", ("", "_"), ("priority",)),
    **calls_of("grouped_allreduce", FOUR, (*REDUCTION, "arrays")),
    **calls_of("allgather", TWO, ("name", "process_set")),
    **calls_of("grouped_allgather", TWO, ("name", "process_set", "arrays")),
    **calls_of("broadcast", FOUR, ROOTED),
    **calls_of("alltoall", TWO, ("splits", "name", "process_set")),
    **calls_of("reducescatter", TWO, SHARE),
    **calls_of("grouped_reducescatter", TWO, (*SHARE, "arrays")),
    **calls_of("reduce", FOUR, (*ROOTED, "op", "prescale_factor", "postscale_factor")),
    **calls_of("gather", TWO, ROOTED),
    **calls_of("scatter", TWO, (*ROOTED, "splits")),
    "send": ("dst", "tag", "process_set"), "isend": ("dst", "tag", "process_set"),
    "recv": ("src", "tag", "process_set"), "irecv": ("src", "tag", "process_set"),
    "join": ("device",), "barrier": ("process_set",), "poll": ("handle",), "synchronize": ("handle",),
    "broadcast_object": ROOTED, "allgather_object": ("name", "process_set"),
}  # fmt: skip
