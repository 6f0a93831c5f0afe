"""Converts optimizer state between two forms: of whole parameters (as in checkpoints) and of one rank's pieces.

Thread: the one that trains.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from horoclone.objects import allgather_object
from horoclone.process_sets import ProcessSet
from horoclone.torch import operations
from horoclone.torch.operations.gpu import HOST, memory_beside, place_of
from horoclone.torch.optimizer.buckets import flat_of
from horoclone.torch.optimizer.pieces import Piece

State = dict[Any, Any]  # tensor -> {name of the state: tensor or other value}


def scatter_state(state: State, mine: Mapping[torch.Tensor, Sequence[Piece]]) -> None:
    """Turns the state of whole parameters, where there is any, into that of this rank's pieces of them."""
    for parameter, pieces in mine.items():
        if parameter not in state or any(piece.whole for piece in pieces):
            continue
        entry = state.pop(parameter)
        for piece in pieces:
            piece.tensor = flat_of(parameter)[piece.begin : piece.end].requires_grad_()
            state[piece.tensor] = {key: _cut(value, piece) for key, value in entry.items()}


def _cut(value: Any, piece: Piece) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == piece.parameter.shape:
        return piece.part_of(value).clone()
    return copy.deepcopy(value)


class Owners(Protocol):
    """Who owns which piece: a Sharding. size, rank: of the set, when the pieces were cut."""

    pieces: list[Piece]
    process_set: ProcessSet
    size: int
    rank: int


def gather_state(sharding: Owners, state: State, to: int | None) -> State | None:
    """The state of whole parameters, on every rank or on rank `to` of the set (None on the others). Collective.

    Tensors of a piece's shape are put together; everything else comes from the owner of the parameter's first piece.
    What belongs to no piece (local parameters) is this rank's own.
    """
    pieces, group = sharding.pieces, sharding.process_set
    roots = group.ranks or [0]
    wanted = to is None or to == sharding.rank
    own = {
        i: _form_of(state[p.tensor])
        for i, p in enumerate(pieces)
        if p.owner == sharding.rank and p.tensor in state
    }
    forms: dict[int, dict[str, Any]] = {}
    for part in allgather_object(own, "horoclone.optimizer.state", group):
        forms.update(part)
    whole: State = {}
    for i in sorted(forms):
        piece = pieces[i]
        entry = whole.setdefault(piece.parameter, {})
        for key, form in forms[i].items():
            if not isinstance(form, _Form):
                entry.setdefault(key, form)
                continue
            if piece.owner == sharding.rank:
                part = state[piece.tensor][key].detach().contiguous()
            elif form.on_gpu:
                part = memory_beside(piece.parameter.detach(), form.shape, form.dtype)
            else:
                part = torch.empty(form.shape, dtype=form.dtype, device="cpu")
            if sharding.size > 1:
                operations.broadcast_(part, roots[piece.owner], None, group)
            if wanted:
                _put(entry, key, part, piece)
    if not wanted:
        return None
    owned = {id(piece.tensor) for piece in pieces}
    whole.update({key: value for key, value in state.items() if id(key) not in owned})
    return whole


class _Form:
    """Shape and dtype of a tensor that follows, and whether it lies on its owner's GPU or in host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.on_gpu = place_of(tensor) is not HOST


def _form_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _Form(value) if isinstance(value, torch.Tensor) else value for key, value in entry.items()}


def _put(entry: dict[str, Any], key: str, part: torch.Tensor, piece: Piece) -> None:
    if piece.whole or part.shape != (piece.end - piece.begin,):
        entry.setdefault(key, part.clone())
        return
    if key not in entry:
        entry[key] = torch.empty_like(piece.parameter, dtype=part.dtype, requires_grad=False)
    flat_of(entry[key])[piece.begin : piece.end] = part
