"""How the ranks agree on an optimizer's gradients: the parameters, which of them are sparse or used, and their order.

Every function here is collective over the process set. Thread: the one that calls synchronize.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from horoclone.comparison import OFF, Policy
from horoclone.errors import Mismatch
from horoclone.gradient_names import Turn
from horoclone.ops import Max
from horoclone.process_sets import ProcessSet
from horoclone.runtime.steps import joins
from horoclone.torch import operations
from horoclone.torch.operations.tensors import DTYPE_OF, NUMBER_OF
from horoclone.torch.optimizer.buckets import GradState, bits_of

OTHER_OPTIMIZER = (
    "the ranks are in a step of different optimizers, whose {count} parameters have the same names ({name!r}, ...) and "
    "shapes; their gradients would have been added up. Make the optimizers, and their first steps, in the same order "
    "on every rank, or give them names that differ: hvd.DistributedOptimizer(..., named_parameters="
    'model.named_parameters(prefix="generator"))'
)
WEIGHTS_DIFFER = (
    "optimizer.set_weight() was called on rank {some}, and not on rank {others}: gradients would have been averaged in "
    "two ways. Call it on every rank before backward(), with 0 on a rank that has nothing; "
    "optimizer.set_weight(None), on every rank, ends it"
)
_formed = 0  # bucket layouts formed by this process: makes bucket names unique among its optimizers


def by_name(states: Sequence[GradState]) -> list[GradState]:
    """The order in which ranks speak of gradients before they have agreed on any other."""
    return sorted(states, key=lambda state: state.name)


class Parameters(NamedTuple):
    """What the ranks have in common; lists are by_name."""

    # 0: no rank has a gradient, 1: a dense one, 1 + d: one with d sparse dimensions on some rank
    sparse: list[int]
    dtypes: list[torch.dtype | None]  # of the gradients; None: no rank has one
    complete: list[bool]  # on every rank
    leads: bool  # this rank is the first one of those that have not joined
    all_here: bool  # none has joined
    some_local: bool  # some rank keeps gradients of its own
    same_values: bool  # as far as ranks have said a check of them
    policy: Policy  # about those values


def agree_on_parameters(
    states: Sequence[GradState],
    process_set: ProcessSet,
    turn: Turn | None = None,
    complete: Callable[[GradState], bool] | None = None,
    changed: bool = False,
    local: bool = False,
    operation: str = "horoclone.optimizer",
    weighted: bool = False,
    values: tuple[int | None, Policy] = (None, Policy()),
) -> Parameters | None:
    """Checks that the ranks mean the same parameters; ValueError names the first difference.

    turn: of its optimizer; Mismatch where other ranks are in a step of another one with the same names. complete: given
    at the end of backward, and not in a step. Then the result is None where other ranks are with another optimizer,
    whose backward pass comes first there. changed: here, since they agreed last; the same on all as well. local: this
    rank has parameters whose gradients stay here. operation: how names of operations begin. weighted: here; Mismatch
    unless it is alike on all. values: a check of them, and what is to be done about a difference.
    """
    ordered = by_name(states)
    check, policy = values
    checks = [-1, -(1 << 40)] if check is None else [check, -check]
    form = [(s.name, tuple(s.parameter.shape), str(s.parameter.dtype), s.strides()) for s in ordered]
    digest = int.from_bytes(hashlib.sha256(repr((form, changed)).encode()).digest()[:7], "big")
    # A rank that has joined contributes the least of all numbers.
    here = [0] * (process_set.size() or 1)
    mine = process_set.rank() or 0
    here[mine] = 1 + weighted
    while True:
        own = turn.name(begins=False, joins=joins()) if turn else ""
        optimizer = zlib.crc32(own.encode())
        asked = [digest, -digest, optimizer, -optimizer, int(complete is not None), int(local)]
        said = torch.tensor([*asked, *checks, *policy, *here], device="cpu")
        operations.allreduce_(said, name=f"{operation}.parameters", op=Max, process_set=process_set)
        most, least, last, first, in_backward, some_local, *rest = said.tolist()
        greatest, smallest, action, steps, *present = rest
        alike = most == -least
        if not in_backward or (alike and last == -first):
            break
        if complete is not None:
            return None
    if turn:  # it begins on all ranks, also where some are in backward and others in the step
        turn.name(joins=joins())
    if 1 in present and 2 in present:
        ranks = process_set.ranks or [0]
        raise Mismatch(WEIGHTS_DIFFER.format(some=ranks[present.index(2)], others=ranks[present.index(1)]))
    if not alike:
        from horoclone.torch.functions import allgather_object

        forms = allgather_object(form, f"{operation}.differences", process_set)
        raise ValueError(_difference(forms, process_set.ranks or []))
    if last != -first:
        raise Mismatch(OTHER_OPTIMIZER.format(count=len(ordered), name=ordered[0].name))
    flags = [(_flag(s), _dtype_number(s), int(complete is None or not complete(s))) for s in ordered]
    table = torch.tensor(flags, dtype=torch.uint8, device="cpu").reshape(-1, 3)
    operations.allreduce_(table, name=f"{operation}.sparse", op=Max, process_set=process_set)
    agreed = table.tolist()
    return Parameters(
        [row[0] for row in agreed],
        [DTYPE_OF[row[1] - 1] if row[1] else None for row in agreed],
        [not row[2] for row in agreed],
        present.index(1 + weighted) == mine,
        min(present) > 0,
        some_local == 1,
        greatest == -smallest or action == OFF,
        Policy(action, steps),
    )


@torch.no_grad()
def first_that_differs(
    states: Sequence[GradState], process_set: ProcessSet, flag: bool = False
) -> tuple[GradState | None, bool]:
    """Of gradients that have been reduced: the first whose content is not the same on all ranks; and whether some rank
    has set the flag."""
    ordered = by_name(states)
    grads = [(i, state.parameter.grad) for i, state in enumerate(ordered)]
    there = [(i, bits_of(grad)) for i, grad in grads if grad is not None]
    content = torch.zeros(len(ordered), dtype=torch.int64, device="cpu")
    if there:
        device = there[0][1].device
        sums = torch.stack([bits.to(device) for _, bits in there]).bitwise_and((1 << 62) - 1)
        content[[i for i, _ in there]] = sums.cpu()
    said = torch.cat([content, -content, torch.tensor([flag], device="cpu")])
    operations.allreduce_(said, name="horoclone.optimizer.alike", op=Max, process_set=process_set)
    most, least = said[:-1].chunk(2)
    differ = (state for state, same in zip(ordered, (most == -least).tolist(), strict=True) if not same)
    return next(differ, None), bool(said[-1])


def agree_on_order(
    observed: Sequence[GradState], process_set: ProcessSet, leads: bool
) -> tuple[int, list[list[GradState]]]:
    """Number of the layout, and the gradients in the order of the leading rank: those in use on every rank, those in
    use on some rank, those that no rank has used yet.

    observed: all gradients in the order in which they became complete here.
    """
    global _formed
    ordered = by_name(observed)
    place = {state: i for i, state in enumerate(observed)}
    _formed += 1
    own = [_formed, *(place[state] for state in ordered)] if leads else [0] * (1 + len(ordered))
    unused = [int(state.fires == 0) for state in ordered]
    said = torch.tensor([*own, *unused, *(1 - flag for flag in unused)], device="cpu")
    operations.allreduce_(said, name="horoclone.optimizer.order", op=Max, process_set=process_set)
    layout, *rest = said.tolist()
    count = len(ordered)
    runs: list[list[GradState]] = [[], [], []]
    for i in sorted(range(count), key=lambda i: rest[i]):
        somewhere_unused, somewhere_used = rest[count + i], rest[2 * count + i]
        runs[1 + (not somewhere_used) if somewhere_unused else 0].append(ordered[i])
    return layout, runs


def _dtype_number(state: GradState) -> int:
    grad = state.parameter.grad
    return 0 if grad is None or grad.dtype not in NUMBER_OF else NUMBER_OF[grad.dtype] + 1


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
