"""The weights of a mean over the ranks: in which form they travel behind the data, and what is wrong with them.

Each rank puts its own weight into its own place, and zeros into those of the others, so that the sum that reduces the
data brings every rank all weights, unrounded. What is no weight travels, too: every rank hears of it, and of whose it
is. Standard library only. Thread: any.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

from horoclone.arguments import is_integer, wrong_type
from horoclone.errors import InvalidArgument
from horoclone.ops import Average

MISSING = -math.inf  # in the place of a rank that has given none
NEXT_MOVE = (
    "A weight is a finite number, 0 or more: give the number of samples, or of tokens, that this rank's part was "
    "computed from, and 0 where it has none."
)
EVERY_STEP = "Call optimizer.set_weight() before the backward() of each step, on every rank."
_LARGEST = float.fromhex("0x1.fffffep127")  # of float32


def number(call: str, weight: Any) -> float:
    """A weight as a number, whatever it says. TypeError for what is neither a number nor one element without
    dimensions; ValueError for a tensor that wants a gradient."""
    if weight is MISSING:
        return MISSING
    accepted = "a number, or a tensor without dimensions"
    if getattr(weight, "requires_grad", False):
        raise ValueError(f"{call}: weight= has no gradient: pass weight.detach()")
    if getattr(weight, "shape", ()) != () or isinstance(weight, (str, bytes)):
        raise wrong_type(call, "weight", weight, accepted)
    if isinstance(weight, bool) or not (hasattr(weight, "__float__") or is_integer(weight)):
        raise wrong_type(call, "weight", weight, accepted)
    try:
        value = float(weight)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise wrong_type(call, "weight", weight, accepted) from None
    return -_LARGEST if value == MISSING else value


def check_mean(call: str, reduce: int, scales: tuple[float, float] = (1.0, 1.0)) -> None:
    """ValueError for other reductions than a plain mean."""
    if reduce != Average:
        raise ValueError(f"{call}: weight= makes a mean, so it works with op=hvd.Average only")
    if scales != (1.0, 1.0):
        raise ValueError(f"{call}: weight= does not work with prescale_factor and postscale_factor")


def wire_of(dtype: str) -> str | None:
    """The dtype, by name, in which elements of `dtype` travel when they are weighted; None: they cannot be."""
    wires = {"float64": "float64", "float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
    return wires.get(dtype)  # float16 would overflow


def rounded(weight: float, wire: str) -> float:
    """The weight with which elements are multiplied: of float32's precision where they have not more themselves."""
    return weight if wire == "float64" else ctypes.c_float(weight).value


def places(wire: str) -> int:
    """How many elements a weight takes."""
    return 3 if wire == "bfloat16" else 1


def parts(weight: float, wire: str) -> list[float]:
    """What those elements are: each is exact in its dtype, and so is their sum."""
    if wire != "bfloat16" or not math.isfinite(weight):
        return [weight] + [0.0] * (places(wire) - 1)
    listed = []
    for _ in range(3):  # of 8 bits each
        bits = struct.unpack("<I", struct.pack("<f", weight))[0] & 0xFFFF0000
        part = struct.unpack("<f", struct.pack("<I", bits))[0]
        listed.append(part)
        weight -= part
    return listed


def tail(weight: float, wire: str, rank: int, size: int) -> list[float]:
    """What travels behind the elements of rank `rank`, of `size` ranks."""
    count = places(wire)
    return [0.0] * (count * rank) + parts(weight, wire) + [0.0] * (count * (size - rank - 1))


def total(sums: Sequence[float], wire: str, label: str, ranks: Sequence[int]) -> float:
    """The sum of all weights, from the sum of all tails; the same on every rank.

    ranks: as they are called. Raises InvalidArgument where there is no mean, on every rank.
    """
    count = places(wire)
    weights = [math.fsum(sums[i * count : (i + 1) * count]) for i in range(len(ranks))]
    wrong = [
        f"rank {rank} {_gave(w)}" for rank, w in zip(ranks, weights, strict=True) if not 0 <= w < math.inf
    ]
    if wrong:
        more = f", and {len(wrong) - 4} more ranks" if len(wrong) > 4 else ""
        every_step = f" {EVERY_STEP}" if MISSING in weights else ""
        raise InvalidArgument(f"{label}: {', '.join(wrong[:4])}{more}. {NEXT_MOVE}{every_step}")
    if not any(weights):
        raise InvalidArgument(
            f"{label}: all ranks gave the weight 0, so that there is nothing to take the mean of. Leave the step out "
            "on every rank, or give one of them a weight above 0."
        )
    try:
        found = rounded(math.fsum(weights), wire)
    except OverflowError:
        found = math.inf
    if found == math.inf:
        raise InvalidArgument(
            f"{label}: the sum of all weights is infinite in {wire}. Divide them by their largest."
        )
    return found


def _gave(weight: float) -> str:
    if weight == MISSING:
        return "gave no weight"
    why = "not a number" if weight != weight else "infinite" if weight == math.inf else "negative"
    shown = "" if weight == -_LARGEST else f" {weight:g}"
    return f"gave the weight{shown}, which is {why}"
