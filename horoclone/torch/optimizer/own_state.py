"""State of a distributed optimizer that only one rank has: pieces of sharded state, local parameters' state, residuals.

Elastic training commits it separately from the state that is equal on all ranks. Thread: the one that trains.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horoclone.process_sets import global_process_set
from horoclone.torch.optimizer.pieces import Piece
from horoclone.torch.optimizer.resharding import Range, boxed, own_tensor, unboxed
from horoclone.torch.optimizer.sharding import Sharding


class OwnState:
    """Of one optimizer, by DistributedOptimizer or not."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def _sharding(self) -> Sharding | None:
        sharding = getattr(self._optimizer, "_sharding", None)
        return sharding if sharding is not None and sharding.process_set is global_process_set else None

    @property
    def _reducer(self) -> Any:
        return getattr(self._optimizer, "_reducer", None)

    def exists(self) -> bool:
        """Whether there may be any; the same on every rank."""
        reducer = self._reducer
        return (
            self.is_sharded
            or bool(self.local_parameters)
            or (reducer is not None and reducer.residuals.may_exist)
        )

    @property
    def is_sharded(self) -> bool:
        """Over all ranks; a cut over a process set is committed whole."""
        return self._sharding is not None

    @property
    def local_parameters(self) -> list[torch.Tensor]:
        """Those whose gradients stay on their rank."""
        of_adasum = list(getattr(self._optimizer, "_local", ()))
        return of_adasum if self._reducer is None else list(self._reducer.local)

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._groups() for parameter in group["params"]]

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.__dict__["param_groups"]
        return groups

    def layout(self) -> list[Range] | None:
        """The cut, with parameters by their number in the groups; None: there is none, and the state is whole."""
        sharding = self._sharding
        if sharding is None or not sharding.pieces:
            return None
        number = {parameter: i for i, parameter in enumerate(self._parameters())}
        return [Range(number[one.parameter], one.begin, one.end, one.owner) for one in sharding.pieces]

    def options(self) -> list[dict[str, Any]]:
        """A copy of what the parameter groups hold beside parameters."""
        return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in self._groups()]

    def set_options(self, options: Sequence[dict[str, Any]]) -> None:
        """Gives them back. Reductions in flight are given up."""
        self._optimizer._give_up()
        for group, theirs in zip(self._groups(), copy.deepcopy(list(options)), strict=True):
            for key in group.keys() - theirs.keys() - {"params"}:
                del group[key]
            group.update(theirs)

    def read(self) -> dict[str, Any]:
        """This rank's, over the optimizer's own memory where that is the host's: copy it before the next step."""
        state, sharding = self._optimizer.__dict__["state"], self._sharding
        pieces: dict[int, Any] = {}
        owned: set[torch.Tensor] = set()
        if sharding is not None:
            for number, piece in enumerate(sharding.pieces):
                if piece.owner == sharding.rank and piece.tensor in state:
                    pieces[number] = _boxed_entry(state[piece.tensor])
                    owned.add(piece.tensor)
        apart = set(self.local_parameters)
        is_cut = sharding is not None and bool(sharding.pieces)
        rest = {
            number: _boxed_entry(state[parameter])
            for number, parameter in enumerate(self._parameters())
            if parameter in state and parameter not in owned and (is_cut or parameter in apart)
        }
        residuals = {} if self._reducer is None else self._reducer.residuals.read(self._reducer.buckets)
        return {"pieces": pieces, "rest": rest, "residuals": {k: boxed(v) for k, v in residuals.items()}}

    def forget(self) -> None:
        """Drops sharded state."""
        if self._sharding is not None and self._sharding.pieces:
            self._optimizer.__dict__["state"].clear()
            self._optimizer._whole_state = None
            self._sharding.forget()

    def write(
        self,
        values: Mapping[int, Any],
        mine: int | None,
        holders: Sequence[int],
        layout: Sequence[Range] | None,
    ) -> None:
        """Continues with what read() gave on the ranks of a commit. layout: the partition at that time, with its
        owners. Residuals of ranks that were not replaced are added to those of the rank that has their shard.
        """
        state, sharding = self._optimizer.__dict__["state"], self._sharding
        parameters = self._parameters()
        if sharding is not None and layout is not None:
            state.clear()
            self._optimizer._whole_state = None
            pieces = [Piece(parameters[i], begin, end, holders[owner]) for i, begin, end, owner in layout]
            for value in values.values():
                for number, entry in value["pieces"].items():
                    piece = pieces[number]
                    state[own_tensor(piece)] = _unboxed_entry(entry, piece.parameter)
            sharding.adopt(pieces)
        if mine is not None:
            for number, entry in values[mine]["rest"].items():
                state[parameters[number]] = _unboxed_entry(entry, parameters[number])
        if self._reducer is not None and self._reducer.residuals.may_exist:
            total: dict[str, torch.Tensor] = {}
            for value in values.values():
                for name, box in value["residuals"].items():
                    residual = unboxed(box, parameters[0])
                    total[name] = total[name].add_(residual) if name in total else residual
            self._reducer.residuals.write(total, self._reducer.buckets)


def _boxed_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: boxed(value) for key, value in entry.items()}


def _unboxed_entry(entry: Mapping[str, Any], beside: torch.Tensor) -> dict[str, Any]:
    return {key: unboxed(value, beside) for key, value in entry.items()}
