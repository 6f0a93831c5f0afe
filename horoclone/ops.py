"""The numbers of operations, reductions and dtypes: those of csrc/include/horoclone.h. Standard library only.

The list of dtypes is csrc/include/horoclone_dtypes.h, which tells how to add one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NewType

from horoclone.arguments import is_integer, wrong_type
from horoclone.errors import InvalidArgument

ALLREDUCE = 0
ALLGATHER = 1
BROADCAST = 2
ALLTOALL = 3
REDUCESCATTER = 4
JOIN = 5
BARRIER = 6
REDUCE = 7
GATHER = 8
SCATTER = 9
SEND = 10
RECEIVE = 11
CALLS = (
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "join", "barrier", "reduce", "gather",
    "scatter", "send", "recv",
)  # fmt: skip

ReduceOp = NewType("ReduceOp", int)
"""What `op=` takes: the names below, which each binding has, too. A kind of its own to type checkers; in a running
program plain integers, as in Horovod, which the core takes as they are."""

# Horovod's order, then our own, as in csrc/base/reductions.h.
Average = ReduceOp(0)
"""The sum divided by the number of ranks; of integers truncated toward zero. Not of bool."""
Sum = ReduceOp(1)
"""The sum; integers wrap, of bool it is or."""
Adasum = ReduceOp(2)
"""Adasum (Maleki et al., 2020): parallel gradients are averaged, orthogonal ones added. Of floats, in allreduce."""
Min = ReduceOp(3)
"""The least element."""
Max = ReduceOp(4)
"""The greatest element."""
Product = ReduceOp(5)
"""The product; integers wrap, of bool it is and."""
And = ReduceOp(6)
"""And of the bits of integers, of the truth of bools. Not of floats."""
Or = ReduceOp(7)
"""Or of the bits of integers, of the truth of bools. Not of floats."""
Xor = ReduceOp(8)
"""Exclusive or of the bits of integers, of the truth of bools. Not of floats."""

__all__ = [
    "Adasum",
    "And",
    "Average",
    "Max",
    "Min",
    "Or",
    "Product",
    "Sum",
    "Xor",
]  # as every binding exports them
REDUCE_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product", "And", "Or", "Xor")

DTYPES: dict[str, int] = {
    "bool": 0,
    "uint8": 1,
    "int8": 2,
    "uint16": 3,
    "int16": 4,
    "int32": 5,
    "int64": 6,
    "float16": 7,
    "bfloat16": 8,
    "float32": 9,
    "float64": 10,
}
"""Of what can be reduced."""

MOVED = (
    "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz", "float6_e2m3fn",
    "float6_e3m2fn", "float4_e2m1fn", "float4_e2m1fn_x2", "int4", "uint4", "int2", "uint2",
)  # fmt: skip
FIRST_MOVED = len(DTYPES)
MOVABLE = {**DTYPES, **{name: number for number, name in enumerate(MOVED, FIRST_MOVED)}}
"""Of all that broadcast, allgather, alltoall, gather, scatter and messages take."""


def counts_dtype(counts: Sequence[int]) -> str:
    """Of the rows that an alltoall has received from each rank: int32, as in Horovod, where they fit into it."""
    return "int32" if max(counts, default=0) < 1 << 31 else "int64"


def peer_number(rank: int | None, what: str) -> int:
    """The rank that a message goes to or comes from as the core's number: None means any. ValueError otherwise."""
    if rank is None:
        return -1
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise ValueError(f"{what}={rank!r} is not the rank of a process")
    return rank


def resolve_reduce(average: bool | None, op: int | None) -> int:
    """The reduction meant by Horovod's two arguments: `op`, and the older `average` that it replaced.

    Neither given means Average. Raises ValueError when both are given, InvalidArgument when `op` is no reduction.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if isinstance(op, bool) or not isinstance(op, int) or op not in range(len(REDUCE_NAMES)):
            raise InvalidArgument(
                f"op={op!r} is not a reduction; use one of hvd.{', hvd.'.join(REDUCE_NAMES)}."
            )
        return op
    if average is None:
        return Average
    if not is_integer(average) and not hasattr(average, "__bool__"):  # a name, given by its place
        raise wrong_type("op and average", "average", average, "True, False or None")
    warnings.warn(
        "Parameter `average` has been replaced with `op`; use op=hvd.Average or op=hvd.Sum.",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum
