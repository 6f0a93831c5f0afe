"""What training must not lose: a state that is committed, restored after a loss, and given to ranks that come.

Commits have numbers, and two are kept. A rank that dies between the commit of one rank and that of another leaves both
with a number in common, and the generation that is formed next begins there. Thread: the one that trains.
"""

from __future__ import annotations

import os
import queue
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from horoclone import errors, failpoints
from horoclone.elastic import member, replicas
from horoclone.elastic.attributes import Attributes, Indistinct, Named, Place, States, attribute_of
from horoclone.elastic.disk import Disk
from horoclone.elastic.generation import generation
from horoclone.elastic.notice import HostUpdateResult
from horoclone.elastic.owning import Owning, chosen_root
from horoclone.elastic.recovery import watch
from horoclone.elastic.replicas import is_ours
from horoclone.elastic.sampler import ElasticSampler
from horoclone.runtime.lifecycle import member as process

KEPT = 2  # commits: the newest, and the one before for ranks whose newest is not everybody's


class State:
    """Base class of what elastic.run keeps over the generations of a job. ObjectState and the states of the frameworks
    build on it.

    bcast_object(obj): rank 0's object on every rank. get_rank(): this process's rank. A subclass says how to save(),
    restore() and sync(); it may say what to do in reset().
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commit_number = 0  # of the newest commit; 0: none yet
        self._commits_made = 0  # by commit() in this process
        self._somebody_leaves = False  # with the notice that check_host_updates() has found last
        # every rank was asked to leave: the membership coordinator says when, others may take over
        self._nobody_stays = False

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Adds functions without arguments, which are called in their order whenever another generation has begun."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when another generation has begun: forgets the notices that led to it, calls reset() and the
        callbacks."""
        self._forget_notices(generation().number if member.is_elastic() else None)
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Notes, on any thread, that a notice has come: the next commit() or check_host_updates() acts on it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves, and lets the hosts change here. All ranks call it at the same point of their training.

        HostsUpdatedInterrupt, on every rank, when the job shall go on with other ranks.
        """
        failpoints.reach("elastic.commit.begin")
        self._commit()
        failpoints.reach("elastic.commit.done")

    def _commit(self) -> None:
        number = self._commit_number
        watch.commits()
        self.save()
        self._commits_made += 1
        if self._commit_number == number:  # a save() that keeps one copy and does not count
            self._commit_number += 1
        member.offer_commits(self._held())
        failpoints.reach("elastic.commit.agree")
        watch.committed()
        try:
            self.check_host_updates()
        except errors.HostsUpdatedInterrupt as interrupt:
            interrupt.committed = True
            replicas.offer(self)
            process.hurry_replica()  # while the next generation is formed and connected
            raise
        replicas.offer(self)

    def check_host_updates(self) -> None:
        """Lets the hosts change here, without saving. A collective: all ranks call it at the same point.

        HostsUpdatedInterrupt, on every rank, when any of them has heard that hosts changed or has to leave.
        """
        before, newest, update = self._last_updated_timestamp, self._last_updated_timestamp, 0
        for timestamp, kind in self._waiting_notices():
            if timestamp > before:
                newest, update = max(newest, timestamp), update | int(kind)
        if not is_ours(self._bcast_object):
            before, newest, update = self._bcast_object((before, newest, update))
            self._last_updated_timestamp = newest
            self._somebody_leaves = bool(update & HostUpdateResult.removed)
            if newest > before:
                raise errors.HostsUpdatedInterrupt(update == HostUpdateResult.removed)
            return
        leaves = member.leave_requested() is not None
        mine = (newest if newest > before else 0, update, int(leaves))
        everybody = member.told_by_all(mine, "hvd.elastic.commit")
        self._last_updated_timestamp = max(before, *(told[0] for told in everybody))
        for _, kind, somebody_leaves in everybody:
            update |= kind | (HostUpdateResult.removed if somebody_leaves else 0)
        self._somebody_leaves = bool(update & HostUpdateResult.removed)
        self._nobody_stays = member.is_elastic() and all(told[2] for told in everybody)
        if any(told[0] or (told[2] and not self._nobody_stays) for told in everybody):
            raise errors.HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Sets the state to the newest copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank the same state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Does what a subclass needs when another generation has begun, before the callbacks are called."""

    def _held(self) -> tuple[int, ...]:
        """The numbers of the commits that restore and _step_back can give, ascending."""
        return (self._commit_number,) if self._commit_number else ()

    def _step_back(self, commit: int) -> None:
        """Goes back to an older commit, where it is held; without it the sync that follows makes the ranks alike."""

    def _keep(self) -> None:
        """Makes what is not committed a commit of its own: the hosts change now, and nothing shall be lost."""
        number = self._commit_number
        self.save()
        self._commit_number = max(self._commit_number, number + 1)
        member.offer_commits(self._held())

    def _settle(self) -> None:
        """A failure has come, and restore() follows: what is on its way to other ranks counts, or is given up."""

    def _look_for_shards(self) -> None:
        """Before the sync of a generation: finds what only lost ranks had. A collective where a state has such."""

    def _go_on(self) -> None:
        """Instead of the sync, where the generation needs none."""

    def _save_last(self) -> None:
        """All ranks of a job of a fixed size end behind this commit."""

    def _come_to_an_end(self) -> None:
        """Training is over: nothing stays on its way."""

    def _forget_notices(self, number: int | None) -> None:
        """Drops those that asked for a generation up to this one; None: all of them."""
        newer = []
        for notice in self._waiting_notices():
            if number is not None and notice[0] > number:
                newer.append(notice)
        for notice in newer:
            self._host_messages.put(notice)
        self._last_updated_timestamp = max(self._last_updated_timestamp, number or 0)

    def _waiting_notices(self) -> Iterator[tuple[int, int]]:
        """Takes them out of the queue; the thread that brings them may go on to put others in."""
        while True:
            try:
                yield self._host_messages.get_nowait()
            except queue.Empty:
                return


def _without_places(values: dict[str, Any]) -> dict[str, Any]:
    """Those that are not, as a whole, an object that stays itself."""
    return {n: one for n, one in values.items() if not (isinstance(one, Place) and one.name == n)}


def _insides(states: States) -> dict[str, Any]:
    return {name: inside for name, (_, inside) in states.items()}


def _joined(
    names: Iterable[str], insides: dict[str, Any], values: dict[str, Any]
) -> tuple[dict[str, Any], States]:
    """What _without_places() and _insides() have taken apart; names: of the attributes."""
    places = {name: Place(name) for name in names if name not in values}
    return {**places, **values}, {name: (Place(name), inside) for name, inside in insides.items()}


def root_of_sync() -> int:
    """The rank whose state is the newest."""
    if not member.is_elastic():
        return 0
    now = generation()
    chosen = chosen_root(now.number)
    return now.commit_root if chosen is None else chosen


class ObjectState(Owning, State):
    """Holds attributes of Python that are committed, restored and synchronised: ObjectState(bcast_object, get_rank,
    batch=0).

    Every keyword becomes an attribute. save() copies the values deeply, so that lists and dicts are restored as they
    were; by_reference() names those that are not to be copied. An object with state_dict() and load_state_dict() (a
    sampler, a learning-rate scheduler) stays the same object, also inside of other values, and so does one that refers
    to such an object: only what is inside of it is kept. The values must be picklable for sync().

    A value given as hvd.checkpoint.Owned is this rank's alone: sync() leaves it, and a buddy on another host keeps it
    as of the last commits. So are RandomStates. pieces() has what the ranks of the commit had.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._uncopied: set[str] = set()
        self._saved_state: dict[str, Any] = self._begin_owning(kwargs)
        self._saved_objects: States = {}
        self._disk: Disk | None = None
        self._slots: dict[int, Any] = {}  # number of a commit -> what it holds, ascending
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        ObjectState._save(self)
        self._slots = {0: self._content()}  # nobody else has it: it is no commit
        self._keep_own(0)

    def by_reference(self, *names: str) -> None:
        """Names attributes that are saved as references: a change inside of the value is not undone by restore().

        For values that are large and never changed. ValueError for a name that is none of the attributes.
        """
        unknown = sorted(set(names) - set(self._saved_state))
        if unknown:
            raise ValueError(f"by_reference: {unknown} are none of this state's {sorted(self._saved_state)}")
        self._uncopied |= set(names)
        self._saved_state = {**self._saved_state, **{name: getattr(self, name) for name in names}}
        states = self._saved_objects.items()
        self._saved_objects = {name: one for name, one in states if attribute_of(name) not in names}

    def checkpoint(
        self, path: str | os.PathLike[str], every: int = 100, keep: int = 3, timeout_s: float = 600.0
    ) -> None:
        """Saves each `every`-th commit below `path` while training goes on (hvd.checkpoint), and keeps `keep` of them.

        Call it on every rank, before run: where no rank holds a commit, run goes on from the newest save. commit() then
        raises what hvd.checkpoint.save raises. What the state holds must be what save() can save. path: on storage that
        all ranks share. timeout_s: for one save, from its commit on; a disk that takes longer has failed. ValueError
        for numbers below 1 and for a time of 0.
        """
        self._disk = Disk(path, every, keep, timeout_s)

    def _commit(self) -> None:
        if self._own_parts():
            self._commit_with_own_parts()
        else:
            super()._commit()
        if self._disk is not None:
            self._disk.committed(self)

    def _save_last(self) -> None:
        if self._disk is not None:
            self._disk.save(self)

    def _commit_with_own_parts(self) -> None:
        """The ranks agree first: a save is a collective here, and whoever leaves must still be there for it."""
        self._finish_exchange()
        interrupt = None
        try:
            self.check_host_updates()
        except errors.HostsUpdatedInterrupt as error:
            interrupt = error
        # its collective ends on no rank before all have begun
        self._all_have_room = is_ours(self._bcast_object)
        self.save()
        self._commits_made += 1
        watch.committed()
        if interrupt is not None:
            self._spread()
            interrupt.committed = True
            raise interrupt
        replicas.offer(self)

    def save(self) -> None:
        """Keeps a copy of the attributes in memory, beside the one before. A collective where a part of the state is
        one rank's only."""
        self._make_room()
        self._save_as(self._commit_number + 1)

    def restore(self) -> None:
        """Sets the attributes to the newest copy; the copy itself stays as it is, however often it is restored."""
        as_they_are = {name: value for name, value in self._saved_state.items() if name in self._uncopied}
        copied = {name: value for name, value in self._saved_state.items() if name not in self._uncopied}
        self._put(as_they_are, copied, self._saved_objects)
        self._restore_own()

    def reset(self) -> None:
        """Has samplers share out the samples that are left among the ranks that there are now."""
        for value in self._attributes().kept():
            if isinstance(value, ElasticSampler):
                value.reset()

    def sync(self) -> None:
        """Gives every rank the attributes of the rank with the newest commit, as they are now, and saves them.

        Rank 0's where nobody has committed. A collective of all ranks.
        """
        self._make_room()
        number = self._synchronised()
        failpoints.reach("elastic.sync.received")
        self._hand_out()
        self._save_as(number)

    def _synchronised(self) -> int:
        """Sets the attributes to the root's values; the number under which the result is to be saved."""
        number = self._commit_number
        plain, held, states = self._now()
        if is_ours(self._bcast_object):
            number, plain, held, states = self._bcast_object(
                (number, plain, held, states), root_rank=root_of_sync(), name="hvd.elastic.sync"
            )
        elif plain or held:  # as in Horovod: rank 0's, and nothing else travels
            received = self._bcast_object({**plain, **_without_places(held), **_insides(states)})
            held, states = _joined(held, {name: received.pop(name) for name in states}, received)
            plain = {}
        self._put(plain, held, states)
        return number + 1

    def _now(self) -> tuple[dict[str, Any], dict[str, Any], States]:
        """What travels: attributes as they are, copies of those that hold objects which stay themselves, and these.

        Of what cannot be copied each rank keeps its own.
        """
        attributes = self._attributes()
        plain = {n: value for n, value in attributes.values.items() if n not in attributes.holding}
        mine = set()
        for name in attributes.holding & self._uncopied:
            try:
                Attributes({name: attributes.values[name]}, self._fixed()).copied([name])
            except Exception:
                mine.add(name)
        rest = {n: attributes.values[n] for n in attributes.values if n in attributes.holding - mine}
        return plain, *Attributes(rest, self._fixed()).copied(rest)

    def _attributes(self) -> Attributes:
        return Attributes({name: getattr(self, name) for name in self._saved_state}, self._fixed())

    def _fixed(self) -> Named:
        """What this state keeps in a way of its own, and parts of that: attributes may refer to it."""
        yield "state", self

    def _put(self, as_they_are: dict[str, Any], copied: dict[str, Any], states: States) -> None:
        """Makes these the attributes; those that were copied are copied again. Objects with a state are filled."""
        found, writes = self._attributes().resolved(copied, states)
        for name, value in {**as_they_are, **found}.items():
            setattr(self, name, value)
        for write, value, inside in writes:
            write(value, inside)

    def _copied(self) -> tuple[dict[str, Any], States]:
        """Deep copies, but of what is kept by reference; what several values share is shared in the copies as well."""
        values = {name: getattr(self, name) for name in self._saved_state}
        named = {name: value for name, value in values.items() if name not in self._uncopied}
        try:
            copies, states = Attributes(named, self._fixed()).copied(named)
        except Indistinct:
            raise
        except Exception:
            for name, value in named.items():
                self._try_to_copy(name, value)
            named = {name: value for name, value in named.items() if name not in self._uncopied}
            copies, states = Attributes(named, self._fixed()).copied(named)
        return {**values, **copies}, states

    def _try_to_copy(self, name: str, value: Any) -> None:
        try:
            Attributes({name: value}, self._fixed()).copied([name])
        except Exception as error:
            self._uncopied.add(name)
            warnings.warn(
                f"the attribute {name!r} of an elastic state cannot be copied ({type(error).__name__}: {error}): it is "
                "kept by reference, and a change inside of it is not undone by restore()",
                stacklevel=2,
            )

    # What a subclass with more than attributes adds to.

    def _content(self) -> Any:
        """What the newest copy holds, for a slot."""
        return self._saved_state, self._saved_objects

    def _set_content(self, content: Any) -> None:
        """Makes a slot's content the newest copy."""
        self._saved_state, self._saved_objects = content

    def _on_disk(self) -> dict[str, Any]:
        """The newest copy, as what hvd.checkpoint saves."""
        return {"attributes": _without_places(self._saved_state), "objects": _insides(self._saved_objects)}

    def _from_disk(self, found: dict[str, Any]) -> None:
        """Makes that the newest copy, and goes back to it. ValueError for the copy of another state."""
        for kind, mine in self._on_disk().items():
            theirs = found.get(kind, ())
            if set(mine) != set(theirs):
                raise ValueError(
                    f"the save has the {kind} {sorted(theirs)}, and this state {sorted(mine)}: only in the save are "
                    f"{sorted(set(theirs) - set(mine))}, only in this state {sorted(set(mine) - set(theirs))}. "
                    "Make the state as it was when it was saved, or begin with an empty directory."
                )
        self._take_from_disk(found)
        self.restore()

    def _take_from_disk(self, found: dict[str, Any]) -> None:
        joined = _joined(self._saved_state, found["objects"], found["attributes"])
        self._saved_state, self._saved_objects = joined

    def _accepts(self, content: Any) -> bool:
        """Whether another rank's content fits this state."""
        values, states = content
        return set(values) == set(self._saved_state) and set(states) == set(self._saved_objects)

    def _save(self) -> None:
        """Makes the newest copy."""
        self._saved_state, self._saved_objects = self._copied()

    def _save_as(self, number: int) -> None:
        self._save()
        self._commit_number = number
        self._slots = {n: kept for n, kept in self._slots.items() if n < number}
        self._slots[number] = self._content()
        while len(self._slots) > KEPT:
            del self._slots[min(self._slots)]
        failpoints.reach("elastic.commit.saved")
        self._keep_own(number)
        member.offer_commits(self._held())

    def _held(self) -> tuple[int, ...]:
        return tuple(sorted(number for number in self._slots if number and self._peers.is_held(number)))

    def _step_back(self, commit: int) -> None:
        if commit not in self._slots:
            return
        self._slots = {number: kept for number, kept in self._slots.items() if number <= commit}
        self._peers.step_back(commit)
        self._set_content(self._slots[commit])
        self._commit_number = commit
        self.restore()
        member.offer_commits(self._held())

    def _keep(self) -> None:
        super()._keep()
        if self._own_parts():
            self._spread()
