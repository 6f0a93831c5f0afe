"""How the ranks agree on an optimizer's gradients: the parameters, which of them are sparse or used, and their order.

Every function here is collective over the process set. Thread: the one that calls synchronize.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from horoclone.ops import Max
from horoclone.process_sets import ProcessSet
from horoclone.torch import operations
from horoclone.torch.optimizer.buckets import GradState

_formed = 0  # bucket layouts formed by this process: makes bucket names unique among its optimizers


def by_name(states: Sequence[GradState]) -> list[GradState]:
    """The order in which ranks speak of gradients before they have agreed on any other."""
    return sorted(states, key=lambda state: state.name)


def agree_on_parameters(states: Sequence[GradState], process_set: ProcessSet) -> list[int]:
    """Checks that the ranks mean the same parameters. Returns, by name, 0 for a gradient that no rank has, 1 for a
    dense one, 1 + d for one with d sparse dimensions on some rank. ValueError names the first difference."""
    ordered = by_name(states)
    form = [(s.name, tuple(s.parameter.shape), str(s.parameter.dtype), s.strides()) for s in ordered]
    digest = int.from_bytes(hashlib.sha256(repr(form).encode()).digest()[:7], "big")
    both = torch.tensor([digest, -digest])
    operations.allreduce_(both, name="horoclone.optimizer.parameters", op=Max, process_set=process_set)
    if int(both[0]) != -int(both[1]):
        from horoclone.torch.functions import allgather_object

        forms = allgather_object(form, "horoclone.optimizer.differences", process_set)
        raise ValueError(_difference(forms, process_set.ranks or []))
    flags = torch.tensor([_flag(state) for state in ordered], dtype=torch.uint8)
    operations.allreduce_(flags, name="horoclone.optimizer.sparse", op=Max, process_set=process_set)
    return flags.tolist()


def agree_on_order(
    observed: Sequence[GradState], process_set: ProcessSet
) -> tuple[int, list[GradState], list[GradState]]:
    """The order of the set's first rank: number of the layout, gradients in use, gradients that no rank has used yet.

    observed: all gradients in the order in which they became complete here.
    """
    global _formed
    ordered = by_name(observed)
    index = {state: i for i, state in enumerate(ordered)}
    own = sorted(observed, key=lambda state: state.fires == 0)  # stable: never used on any rank goes last
    _formed += 1
    message = torch.tensor([_formed, sum(state.fires > 0 for state in own), *(index[state] for state in own)])
    root = (process_set.ranks or [0])[0]
    operations.broadcast_(message, root, "horoclone.optimizer.order", process_set)
    layout, used, *places = message.tolist()
    agreed = [ordered[i] for i in places]
    return layout, agreed[:used], agreed[used:]


def _flag(state: GradState) -> int:
    grad = state.parameter.grad
    if grad is None:
        return 0
    return 1 + (grad.sparse_dim() if grad.is_sparse else 0)


def _difference(forms: Sequence[list[Any]], ranks: Sequence[int]) -> str:
    """Which parameter differs between which ranks: the first difference from the first rank's list."""
    named = [{name: (list(shape), dtype, stride) for name, shape, dtype, stride in form} for form in forms]
    for rank, mine in zip(ranks[1:], named[1:], strict=True):
        for name in sorted(named[0].keys() | mine.keys()):
            here, there = named[0].get(name, "no such parameter"), mine.get(name, "no such parameter")
            if here != there:
                return (
                    f"the ranks optimise different parameters: {name!r} is {here} on rank {ranks[0]} and {there} on "
                    f"rank {rank} (shape, dtype, strides). Build the same model, with the same trainable parameters, "
                    "on every rank."
                )
    return "the ranks optimise different parameters"
