"""The part of an elastic state that differs from rank to rank: what it is, when buddies get it, who goes on with it.

Thread: the one that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from horoclone import errors
from horoclone.elastic import member
from horoclone.elastic.attributes import Attributes, Place, States
from horoclone.elastic.generation import generation
from horoclone.elastic.peers import OwnPart, Peers, Shards, wait_for_all
from horoclone.elastic.randomness import RandomStates
from horoclone.objects import allgather_object
from horoclone.owned import Owned

_chosen_root = (
    0,
    0,
)  # number of a generation, and the rank whose state it goes on from, where shards decided it


def chosen_root(number: int) -> int | None:
    """The rank that has the commit of which all shards were found in this generation; None: shards did not decide."""
    return _chosen_root[1] if _chosen_root[0] == number else None


class _Copy(NamedTuple):
    """Of a value that is, or refers to, an object which stays itself."""

    values: dict[str, Any]
    states: States

    def piece(self) -> Any:
        """For other ranks, which have no such object: what is inside of it."""
        (value,) = self.values.values()
        return self.states[value.name][1] if isinstance(value, Place) and value.name in self.states else value


class _OwnedAttribute:
    """An attribute that was given as Owned."""

    def __init__(self, state: Any, name: str) -> None:
        self._state, self._name = state, name

    def own(self) -> Any:
        found = self._attributes()
        return _Copy(*found.copied(found.holding)) if found.holding else self._box().value

    def set_own(self, values: Mapping[int, Any], mine: int | None, holders: Sequence[int]) -> None:
        value = values[mine] if mine is not None else None
        if isinstance(value, _Copy):
            found, writes = self._attributes().resolved(value.values, value.states)
            self._box().value = found[self._name]
            for write, one, inside in writes:
                write(one, inside)
        elif mine is not None:
            self._box().value = value

    def _attributes(self) -> Attributes:
        return Attributes({self._name: self._box().value}, self._state._fixed())

    def _box(self) -> Owned:
        box = getattr(self._state, self._name)
        if not isinstance(box, Owned):
            raise TypeError(
                f"the state was made with {self._name}=Owned(...), and state.{self._name} is {type(box).__name__} now: "
                f"set state.{self._name}.value, or assign another Owned"
            )
        return box


class Owning:
    """What ObjectState adds for values that only one rank has."""

    _commit_number: int
    _slots: dict[int, Any]
    _somebody_leaves: bool

    def _begin_owning(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Takes those that are one rank's only; gives the others."""
        self._owned: dict[str, OwnPart] = {
            name: _OwnedAttribute(self, name)
            for name, value in attributes.items()
            if isinstance(value, Owned)
        }
        self._random: dict[str, OwnPart] = {
            name: value for name, value in attributes.items() if isinstance(value, RandomStates)
        }
        self._peers = Peers()
        self._pieces: dict[str, list[Any]] = {}
        self._shards: Shards | None = None  # what sync() is to hand out
        self._all_have_room = False  # for another commit: all hold the newest
        return {name: one for name, one in attributes.items() if name not in {*self._owned, *self._random}}

    def pieces(self, name: str) -> list[Any]:
        """What the ranks of the commit that this generation began with had in an Owned attribute, in their order.

        Empty where nobody was lost or came: each rank has its own. KeyError for another name.
        """
        if name not in self._owned:
            raise KeyError(f"{name!r} is none of what this state was given as Owned: {sorted(self._owned)}")
        return list(self._pieces.get(name, []))

    def _own_parts(self) -> dict[str, OwnPart]:
        """By name, the same names on every rank."""
        return {**self._owned, **self._random}

    # --- one commit

    def _keep_own(self, number: int) -> None:
        """Packs what is this rank's only, for a commit whose copy has just been made, and begins to send it."""
        parts = self._own_parts()
        if parts:
            self._peers.save(number, {name: part.own() for name, part in parts.items()}, self._slots)
            if number:
                self._peers.start(number)

    def _restore_own(self) -> None:
        kept, parts = self._peers.kept.get(self._commit_number), self._own_parts()
        if kept is not None and parts:
            mine = kept.shard(kept.rank)
            for name, part in parts.items():
                if name in mine:
                    part.set_own({kept.rank: mine[name]}, kept.rank, range(kept.size))

    def _make_room(self) -> None:
        """Before a commit: the newest is held by all ranks, so that the one before it need not be kept."""
        if self._own_parts() and member.is_elastic() and not self._all_have_room:
            self._finish_everywhere()
        self._all_have_room = False

    def _finish_exchange(self) -> None:
        self._peers.finish()
        member.offer_commits(self._held())

    def _finish_everywhere(self) -> None:
        """Waits until every rank holds the newest commit. A collective."""
        self._finish_exchange()
        if member.is_elastic():
            wait_for_all()

    def _spread(self) -> None:
        """Hosts change now: whoever leaves takes nothing along. A collective."""
        self._finish_everywhere()
        if self._somebody_leaves and member.is_elastic():
            self._peers.spread(self._commit_number)

    def _settle(self) -> None:
        self._all_have_room, self._shards = False, None
        self._peers.settle()
        member.offer_commits(self._held())

    def _come_to_an_end(self) -> None:
        with contextlib.suppress(errors.HorovodInternalError):
            self._peers.finish()

    # --- a generation begins

    def _look_for_shards(self) -> None:
        """Finds what only lost ranks had, and who has it from now on. StateLost, on every rank, where nobody has it."""
        global _chosen_root
        self._shards = None
        if not self._own_parts() or not member.is_elastic():
            return
        now = generation()
        try:
            found = self._peers.look(self._commit_number)
        except errors.StateLost:
            self._begin_anew()
            raise
        if found is None:
            return
        if found.commit == 0:
            if self._commit_number and 0 in self._slots:
                self._step_back(0)
            return
        _chosen_root = (now.number, found.root)
        if found.commit in self._peers.kept and found.commit != self._commit_number:
            self._step_back(found.commit)
        self._shards = self._peers.recover(found)
        self._pieces = {name: self._gathered(name, self._shards) for name in self._owned}

    def _begin_anew(self) -> None:
        """The state may be filled from a checkpoint now, and that is a beginning."""
        self._peers.forget()
        for part in self._own_parts().values():
            lose = getattr(part, "lose", None)
            if lose is not None:
                lose()
        self._slots, self._commit_number = {0: self._content()}, 0
        self._keep_own(0)
        member.offer_commits(())

    def _gathered(self, name: str, recovery: Shards) -> list[Any]:
        values = {origin: value[name] for origin, value in recovery.values.items()}
        mine = {origin: one.piece() if isinstance(one, _Copy) else one for origin, one in values.items()}
        everything: dict[int, Any] = {}
        for part in allgather_object(mine, "hvd.elastic.owned"):
            everything.update(part)
        return [everything[origin] for origin in sorted(everything)]

    def _hand_out(self) -> None:
        """What was found goes to the parts of this state, behind a sync of the rest."""
        recovery, self._shards = self._shards, None
        if recovery is None:
            return
        for name, part in self._own_parts().items():
            values = {origin: value[name] for origin, value in recovery.values.items() if name in value}
            part.set_own(values, recovery.mine if recovery.mine in values else None, recovery.plan.holders)

    def _go_on(self) -> None:
        self._look_for_shards()
        if self._shards is not None:
            self._hand_out()
            self._save_as(self._commit_number + 1)

    # ObjectState's.

    def _held(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _step_back(self, commit: int) -> None:
        raise NotImplementedError

    def _content(self) -> Any:
        raise NotImplementedError

    def _save_as(self, number: int) -> None:
        raise NotImplementedError
