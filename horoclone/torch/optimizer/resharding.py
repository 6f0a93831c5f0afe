"""Moves optimizer state from one partition of the parameters to another; each rank sends only what others now own.

Thread: the one that trains.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from horoclone import arrays
from horoclone.objects import opened, packed, sealed, unpacked
from horoclone.process_sets import ProcessSet
from horoclone.torch.operations.gpu import HOST, place_of
from horoclone.torch.operations.tensors import bytes_of
from horoclone.torch.optimizer.buckets import flat_of
from horoclone.torch.optimizer.pieces import Piece

State = dict[Any, Any]  # tensor -> {name of the state: tensor or other value}


class Range(NamedTuple):
    """Elements begin..end of a parameter, and the rank that owns them."""

    parameter: int
    begin: int
    end: int
    owner: int


class Move(NamedTuple):
    """Elements begin..end go from old[source] to new[target]; both begin and end within the parameter."""

    source: int
    target: int
    begin: int
    end: int


def moves(old: Sequence[Range], new: Sequence[Range]) -> Iterator[Move]:
    """Where the ranges of two cuts meet. Of a parameter that has no elements, what is there goes from piece to piece.

    Neither cut may have an element twice.
    """
    of: dict[int, list[int]] = {}
    for number, range_ in enumerate(new):
        of.setdefault(range_.parameter, []).append(number)
    for numbers in of.values():
        numbers.sort(key=lambda number: (new[number].begin, new[number].end))
    for source, have in enumerate(old):
        for target in of.get(have.parameter, ()):
            want = new[target]
            begin, end = max(have.begin, want.begin), min(have.end, want.end)
            if begin < end or (have.begin == have.end and want.begin == want.end):
                yield Move(source, target, begin, end)


class Box(NamedTuple):
    """A tensor as it travels: its bytes, dtype, shape, and whether it was on a GPU."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_gpu: bool

    def tensor(self, beside: torch.Tensor) -> torch.Tensor:
        """In memory of its own; on the device of `beside` where it was on a GPU."""
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        if self.data.size:
            made.view(-1).view(torch.uint8).copy_(torch.from_numpy(self.data))
        return made.to(beside.device) if self.on_gpu else made


def boxed(value: Any) -> Any:
    """A tensor as a Box over its memory where that is the host's; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    return Box(bytes_of(value).cpu().numpy(), value.dtype, tuple(value.shape), place_of(value) is not HOST)


def unboxed(value: Any, beside: torch.Tensor) -> Any:
    """What boxed() was given, in memory of its own."""
    return value.tensor(beside) if isinstance(value, Box) else copy.deepcopy(value)


def _ranges(pieces: Sequence[Piece], numbers: Mapping[torch.Tensor, int]) -> list[Range]:
    return [Range(numbers[one.parameter], one.begin, one.end, one.owner) for one in pieces]


def reshard(
    old: Sequence[Piece], new: Sequence[Piece], state: State, rank: int, process_set: ProcessSet, layout: int
) -> None:
    """Makes `state`, of this rank's pieces in the cut `old`, that of its pieces in the cut `new`. Collective.

    Both cuts are the same on every rank. layout: the number of the new one.
    """
    numbers: dict[torch.Tensor, int] = {}
    for piece in (*old, *new):
        numbers.setdefault(piece.parameter, len(numbers))
    size = process_set.size() or 1
    going: list[list[tuple[int, int, int, dict[str, Any]]]] = [[] for _ in range(size)]
    for source, target, begin, end in moves(_ranges(old, numbers), _ranges(new, numbers)):
        piece = old[source]
        if piece.owner == rank and piece.tensor in state:
            entry = {key: _part(value, piece, begin, end) for key, value in state[piece.tensor].items()}
            going[new[target].owner].append((target, begin, end, entry))
    coming = [going[rank]]
    if size > 1:
        going[rank] = []
        messages = [
            sealed(
                packed([(t, b, e, _boxed_entry(entry)) for t, b, e, entry in one]), _context(layout, rank, to)
            )
            for to, one in enumerate(going)
        ]
        rows, counts = arrays.alltoall(
            np.concatenate(messages),
            [one.size for one in messages],
            f"horoclone.optimizer.pieces.{layout}",
            process_set,
        )
        ends = np.cumsum(counts)
        coming += [
            unpacked(opened(rows[end - count : end].copy(), _context(layout, source, rank)))
            for source, (count, end) in enumerate(zip(counts, ends, strict=True))
        ]
    made: dict[int, dict[str, Any]] = {}
    for parts in coming:
        for target, begin, end, entry in parts:
            _put(made.setdefault(target, {}), new[target], begin, end, entry)
    for piece in old:
        if piece.owner == rank:
            state.pop(piece.tensor, None)
    for target, entry in made.items():
        state[own_tensor(new[target])] = entry


def _context(layout: int, source: int, target: int) -> str:
    """For what a message's digest holds."""
    return f"the optimizer's state from rank {source} to rank {target} of a process set, cut {layout}"


def own_tensor(piece: Piece) -> torch.Tensor:
    """What the owner's optimizer updates: the parameter, or a view of these elements of it."""
    if not piece.whole:
        piece.tensor = flat_of(piece.parameter)[piece.begin : piece.end].requires_grad_()
    return piece.tensor


def _is_of_elements(value: Any, piece: Piece) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape == (piece.parameter.shape if piece.whole else (piece.end - piece.begin,))


class _Elements(NamedTuple):
    """One value for each element of the range that travels, rather than one for all of the parameter."""

    values: Any


def _part(value: Any, piece: Piece, begin: int, end: int) -> Any:
    if not _is_of_elements(value, piece):
        return value
    flat = piece.part_of(value) if piece.whole else value
    return _Elements(flat[begin - piece.begin : end - piece.begin])


def _boxed_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _Elements(boxed(value.values)) if isinstance(value, _Elements) else boxed(value)
        for key, value in entry.items()
    }


def _put(entry: dict[str, Any], piece: Piece, begin: int, end: int, parts: Mapping[str, Any]) -> None:
    for key, value in parts.items():
        if not isinstance(value, _Elements):
            if key not in entry:
                entry[key] = unboxed(value, piece.parameter) if isinstance(value, Box) else _copied(value)
            continue
        values = unboxed(value.values, piece.parameter) if isinstance(value.values, Box) else value.values
        if key not in entry:
            if piece.whole:
                like = piece.parameter.detach()
                entry[key] = torch.empty_like(like, dtype=values.dtype, device=values.device)
            else:
                entry[key] = values.new_empty(piece.end - piece.begin)
        whole = flat_of(entry[key]) if piece.whole else entry[key]
        whole[begin - piece.begin : end - piece.begin] = values


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
