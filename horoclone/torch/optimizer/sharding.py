"""ZeRO stage 1: every rank keeps the optimizer state of its shard of the parameters, and updates only those.

The parameters are cut into pieces, each owned by one rank. For a step the optimizer's parameter groups hold this
rank's pieces instead of the parameters; then every owner broadcasts what it has updated. Rajbhandari et al., "ZeRO:
Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020). docs/decisions/sharded-state.md says why
it is cut so. Thread: the one that trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horoclone.ops import BROADCAST
from horoclone.process_sets import ProcessSet, set_id
from horoclone.runtime import native
from horoclone.torch.operations import requests, spans
from horoclone.torch.operations.gpu import follow, place_of_all
from horoclone.torch.operations.tensors import NUMBER_OF
from horoclone.torch.optimizer.agreement import by_name
from horoclone.torch.optimizer.buckets import Bucket, flat_of, is_dense
from horoclone.torch.optimizer.pieces import Piece
from horoclone.torch.optimizer.reducer import Reducer
from horoclone.torch.optimizer.resharding import reshard
from horoclone.torch.optimizer.sharded_state import scatter_state

# Optimizers that treat every element of a parameter alike, whatever its neighbours: a parameter may be cut anywhere.
_ELEMENT_WISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip
ADOPTED = -1  # number of a layout that no reducer has formed
_NOT_ELEMENT_WISE = ("Adafactor", "Muon", "SparseAdam")


def checked_mode(mode: Any, kind: type) -> str:
    """ "elements" or "parameters" for the argument shard_optimizer_state. ValueError where it cannot be."""
    if issubclass(kind, torch.optim.LBFGS):
        raise ValueError(
            "shard_optimizer_state does not work with LBFGS: its state is about all parameters together"
        )
    if mode is True:
        return "elements" if kind in _ELEMENT_WISE else "parameters"
    if mode not in ("elements", "parameters"):
        raise ValueError(f"shard_optimizer_state={mode!r}: must be True, False, 'elements' or 'parameters'")
    if mode == "elements" and any(base.__name__ in _NOT_ELEMENT_WISE for base in kind.__mro__):
        raise ValueError(
            f"shard_optimizer_state='elements' does not work with {kind.__name__}, which looks at whole parameters; "
            "use 'parameters' or True"
        )
    return str(mode)


class Sharding:
    """Who owns what, for one optimizer; makes its step one of this rank's pieces."""

    def __init__(self, mode: str, process_set: ProcessSet) -> None:
        self.mode = mode
        self.process_set = process_set
        self.size = self.rank = 0  # of the set, when the pieces were cut
        self.pieces: list[Piece] = []
        self.layout = 0  # the reducer's number of the layout that the pieces belong to; 0: none
        self._mine: dict[torch.Tensor, list[Piece]] = {}

    @property
    def parts(self) -> int:
        """Equal parts that a bucket is cut into, with the ranks there are now."""
        return (self.process_set.size() or 1) if self.mode == "elements" else 1

    def lay_out(self, reducer: Reducer) -> None:
        """Cuts the reducer's parameters, the same way on every rank."""
        self.size, self.rank = self.process_set.size() or 1, self.process_set.rank() or 0
        pieces: list[Piece] = []
        if self.mode == "elements":
            for bucket in reducer.buckets:
                pieces += self._cut(bucket)
        alone = [
            state for state in by_name(reducer.states) if self.mode == "parameters" or state.bucket is None
        ]
        loads = [0] * self.size
        for state in sorted(alone, key=lambda state: -state.parameter.nbytes):  # stable: by name among equals
            owner = loads.index(min(loads))
            loads[owner] += state.parameter.nbytes
            pieces.append(Piece(state.parameter, 0, state.parameter.numel(), owner))
        self.pieces, self.layout = pieces, reducer.layout
        self._mine = {state.parameter: [] for state in reducer.states}
        for piece in pieces:
            if piece.owner == self.rank:
                self._mine[piece.parameter].append(piece)

    def move_to(self, reducer: Reducer, state: dict[Any, Any]) -> None:
        """Cuts the reducer's parameters, and gives what is in `state` to the new owners of it. Collective.

        Every parameter of the cut that there was is in the new one: see covers().
        """
        old = self.pieces
        self.lay_out(reducer)
        reshard(old, self.pieces, state, self.rank, self.process_set, self.layout)

    def covers(self, reducer: Reducer) -> bool:
        """Whether the reducer has all the parameters that were cut."""
        return {piece.parameter for piece in self.pieces} <= {state.parameter for state in reducer.states}

    def adopt(self, pieces: list[Piece]) -> None:
        """A cut of another generation, with owners of this one. The next step makes a cut of its own."""
        self.pieces, self.layout, self._mine = pieces, ADOPTED, {}
        self.size, self.rank = self.process_set.size() or 1, self.process_set.rank() or 0

    def forget(self) -> None:
        """No rank owns anything: the state is, or is about to be, that of whole parameters."""
        self.pieces, self.layout, self._mine = [], 0, {}

    def _cut(self, bucket: Bucket) -> list[Piece]:
        """Rank r owns the r-th of equal parts of the bucket."""
        shard = bucket.flat.numel() // self.size
        pieces = []
        for state in bucket.states:
            assert state.view is not None
            first, count = int(state.view.storage_offset()), state.parameter.numel()
            if count == 0:
                pieces.append(Piece(state.parameter, 0, 0, 0))
            for owner in range(first // shard, self.size):
                begin, end = max(0, owner * shard - first), min(count, (owner + 1) * shard - first)
                if begin < end:
                    pieces.append(Piece(state.parameter, begin, end, owner))
        return pieces

    # --- one step --------------------------------------------------------------------------------------------------

    @contextmanager
    def only_mine(self, optimizer: dict[str, Any]) -> Iterator[None]:
        """Within it the optimizer (given by its __dict__) has this rank's pieces for parameters."""
        groups = optimizer["param_groups"]
        full = [group["params"] for group in groups]
        scatter_state(optimizer["state"], self._mine)
        try:
            for group, parameters in zip(groups, full, strict=True):
                group["params"] = [t for p in parameters for t in self._tensors_of(p, optimizer["state"])]
            yield
        finally:
            for group, parameters in zip(groups, full, strict=True):
                group["params"] = parameters
            for piece in self.pieces:
                if piece.tensor is not piece.parameter:
                    piece.tensor.grad = None

    def _tensors_of(self, parameter: torch.Tensor, state: dict[Any, Any]) -> list[torch.Tensor]:
        pieces = self._mine.get(parameter)
        if pieces is None:  # frozen or local: not sharded
            return [parameter]
        grad = parameter.grad
        for piece in pieces:
            if piece.whole:
                continue
            view = flat_of(parameter)[piece.begin : piece.end]
            if piece.tensor is parameter or piece.tensor.data_ptr() != view.data_ptr():
                old, piece.tensor = (
                    piece.tensor,
                    view.requires_grad_(),
                )  # first step, or parameter.data was exchanged
                if old is not parameter and old in state:
                    state[piece.tensor] = state.pop(old)
            piece.tensor.grad = None if grad is None else piece.part_of(grad)
        return [piece.tensor for piece in pieces]

    def share_parameters(self) -> None:
        """Every owner broadcasts its pieces, in place, all of them as one operation. Collective."""
        if self.size == 1:
            return
        runtime, number = native(), set_id(self.process_set)
        roots = self.process_set.ranks or []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        handles = []
        for owner in range(self.size):
            parts = []
            for piece in self.pieces:
                if piece.owner != owner or piece.begin == piece.end:
                    continue
                if is_dense(piece.parameter):
                    parts.append(flat_of(piece.parameter)[piece.begin : piece.end])
                else:
                    parts.append(piece.parameter.detach().contiguous())
                    copies.append((piece.parameter, parts[-1]))
            if parts:
                place = place_of_all(parts)
                name = f"parameters of rank {roots[owner]} (cut {self.layout})"
                handle = requests.submit_group(
                    runtime, BROADCAST, name, sources=parts, targets=parts,
                    dtypes=[NUMBER_OF[part.dtype] for part in parts], root=roots[owner], process_set=number,
                    place=place,
                )  # fmt: skip
                handles.append((handle, place))
        for handle, place in handles:
            spans.wait(runtime, handle)
            follow(runtime, handle, place)
            runtime.release(handle)
        with torch.no_grad():
            for parameter, received in copies:
                parameter.copy_(received)
