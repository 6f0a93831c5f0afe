"""Compares weights, optimizer state and reduced gradients of the ranks of one optimizer (horoclone/comparison.py).

The first step compares everything, in the exchange in which the ranks agree on their gradients. Later steps compare a
share, by a check that travels in the first bucket, or in the mark where marks have an operation of their own. Owner:
reducer.py. Thread: the one that trains, and those of backward.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard

import torch

from horoclone import comparison
from horoclone.comparison import DRIFTED, MENDED, OFF, Difference, Policy
from horoclone.objects import broadcast_object
from horoclone.ops import Sum
from horoclone.process_sets import ProcessSet
from horoclone.runtime.steps import joins
from horoclone.torch import operations
from horoclone.torch.optimizer.agreement import by_name
from horoclone.torch.optimizer.buckets import Bucket, GradState, flat_of, is_dense

FORGOTTEN = (
    " Give all ranks the same before the first step: hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)."
)
JOINED = (
    " Ranks that had joined made no steps meanwhile: give them the weights of the last one that trained, after every "
    "join. last = hvd.join(); hvd.broadcast_parameters(model.state_dict(), root_rank=last); "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=last)."
)


class Comparison(comparison.Comparison):
    """Of one optimizer. state_of: gives what the optimizer has, by parameter."""

    def __init__(self, policy: Policy, state_of: Callable[[], MutableMapping[Any, Any]] | None) -> None:
        super().__init__(policy)
        self._state_of = state_of
        self._states: list[GradState] = []
        self._fresh: list[tuple[str, int]] = []  # buckets reduced since the last check, and their hashes
        self._reduced: list[tuple[str, int]] = []  # those of the last check
        self._joins = joins()  # that there had been when the ranks agreed

    # --- the first step -------------------------------------------------------------------------------------------

    def said(self, states: Sequence[GradState]) -> tuple[int | None, Policy]:
        """What the ranks agree on: a check of all values, and what is to be done. None: nothing is compared here."""
        if self.own.action == OFF or not all(_is_plain(state.parameter) for state in states):
            return None, Policy(OFF, 0)
        return comparison.joined(self._hashes(by_name(states))), self.own

    def heard(self, alike: bool, agreed: Policy) -> None:
        """What they have agreed on."""
        self.agreed = agreed
        if agreed.action != OFF and not alike:
            self._differs = True
            self._when = f"after step {self._steps}" if self._steps else "before the first step"
            self._why = DRIFTED if self._steps else FORGOTTEN
            if self._joins != joins():
                self._why = JOINED
        self._joins = joins()

    def begin(self, states: Sequence[GradState]) -> None:
        """The order of states and the layout of buckets are new."""
        self._states = list(states)
        self._begin([state.parameter.nbytes for state in states])
        self._fresh, self._reduced = [], []

    # --- every other step -----------------------------------------------------------------------------------------

    def fill(self, places: torch.Tensor) -> None:
        """Once in a step, before its first reduction; places hold zeros."""
        self._share = self._rotation.next() if self.agreed.action != OFF else None
        if self._share is not None:
            self._reduced, self._fresh = self._fresh, []
            share = [self._states[i] for i in self._rotation.shares[self._share]]
            parts = self._hashes(share) + [bits for _, bits in self._reduced]
            places.copy_(torch.tensor(comparison.places(comparison.joined(parts)), device="cpu"))

    def look(self, places: torch.Tensor) -> None:
        """At what the reduction has made of them."""
        if self._share is not None:
            self._look(places.tolist())
            places.zero_()

    def note(self, bucket: Bucket) -> None:
        """It holds the result of this step's reduction."""
        if self._share is not None and bucket.index % len(self._rotation.shares) == self._share:
            [bits] = comparison.hashes([bucket.address], [bucket.gradients.nbytes])
            self._fresh.append((bucket.summary, bits))

    # --- a difference ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, process_set: ProcessSet) -> None:
        """At the end of a step's reductions, before its update. Collective where a difference was seen."""
        self._steps += 1
        if not self._differs:
            return
        self._differs = False
        states = self._states
        labels = [f"the reduced gradient of {name!r}" for name, _ in self._reduced]
        labels += [f"the weight {state.name!r}" for state in states]
        labels += [f"the optimizer's state of {state.name!r}" for state in states] if self._state_of else []
        own = [bits for _, bits in self._reduced] + self._hashes(states)
        ranks = process_set.ranks or [0]
        mine = process_set.rank() or 0
        table = torch.zeros(len(ranks), 1 + len(own), dtype=torch.int64, device="cpu")
        table[mine] = torch.tensor(
            [1, *(bits - (1 << 64) if bits >> 63 else bits for bits in own)], device="cpu"
        )
        operations.allreduce_(table, name="horoclone.optimizer.values", op=Sum, process_set=process_set)
        rows = [row[1:] if row[0] else [] for row in table.tolist()]

        def mend(found: list[Difference]) -> str:
            self._repair(found, len(self._reduced), ranks, process_set)
            return MENDED

        self._settle(labels, rows, ranks, mine, mend)

    def _repair(
        self, found: Sequence[Difference], buckets: int, ranks: Sequence[int], process_set: ProcessSet
    ) -> None:
        for difference in found:
            at, root = difference.column - buckets, ranks[difference.root]
            if 0 <= at < len(self._states):
                weight = self._states[at].parameter.data
                name = f"horoclone.repair.{self._states[at].name}"
                received = operations.broadcast(weight.contiguous(), root, name, process_set)
                weight.copy_(received)
            elif at >= 0:
                assert self._state_of is not None
                self._repair_state(
                    self._state_of(), self._states[at - len(self._states)].parameter, root, process_set
                )

    def _repair_state(
        self, held: MutableMapping[Any, Any], parameter: torch.Tensor, root: int, process_set: ProcessSet
    ) -> None:
        received = broadcast_object(held.get(parameter), root, process_set=process_set)
        state = held.get(parameter)
        if not (isinstance(received, Mapping) and isinstance(state, MutableMapping)):
            held.pop(parameter, None)
            if received is not None:
                held[parameter] = received
            return
        for key, value in received.items():
            old: Any = state.get(key)
            if _is_plain(old) and _is_plain(value) and old.shape == value.shape and old.dtype == value.dtype:
                old.copy_(value)  # others may hold it
            else:
                state[key] = value
        for key in set(state) - set(received):
            del state[key]

    # --- hashes ---------------------------------------------------------------------------------------------------

    def _hashes(self, states: Sequence[GradState]) -> list[int]:
        """Of the weights, then of the optimizer's state of each."""
        tensors, counts = [_in_memory(state.parameter.detach(), True) for state in states], []
        names = []
        if self._state_of is not None:
            held = self._state_of()
            for state in states:
                found_here = _tensors_of(held.get(state.parameter))
                tensors += [_in_memory(tensor.detach(), False) for _, tensor in found_here]
                counts.append(len(found_here))
                names.append(zlib.crc32(repr([(key, tuple(one.shape)) for key, one in found_here]).encode()))
        bits = comparison.hashes([t.data_ptr() for t in tensors], [t.nbytes for t in tensors])
        found, at = bits[: len(states)], len(states)
        for count, name in zip(counts, names, strict=True):
            found.append(comparison.joined([name, *bits[at : at + count]]))
            at += count
        return found


def _tensors_of(held: Any) -> list[tuple[str, torch.Tensor]]:
    """What can be compared of an optimizer's state of one parameter, which is a mapping almost always."""
    named = held if isinstance(held, Mapping) else {"": held}
    there = [key for key, value in named.items() if isinstance(key, str) and _is_plain(value)]
    return [(key, named[key]) for key in sorted(there)]


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    """A tensor whose memory can be read here."""
    return (
        isinstance(value, torch.Tensor)
        and type(value.data) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.is_conj()
        and not value.is_neg()
    )


def _in_memory(tensor: torch.Tensor, same_strides: bool) -> torch.Tensor:
    """Without gaps: in the order of its memory where that is the same on all ranks, else of its dimensions."""
    if tensor.is_contiguous():
        return tensor
    return flat_of(tensor) if same_strides and is_dense(tensor) else tensor.contiguous()
