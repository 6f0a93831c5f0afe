"""What only one rank has, kept a second time by a buddy on another host, and found again when ranks are lost.

After a commit each rank sends its shard (all that it alone has, packed) to its buddy while training goes on. A commit
counts as held when a rank has its own shard and those that it keeps for others. When a generation begins, the ranks
tell each other what they keep; plan() says who goes on with whose shard. Thread: the one that trains.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from horoclone import arrays, errors
from horoclone.arrays.handles import poll, synchronize
from horoclone.elastic import member
from horoclone.elastic.generation import generation
from horoclone.objects import allgather_object, opened, packed, sealed, unpacked
from horoclone.runtime import topology

TAG = 1 << 40  # of messages between buddies; a user's tags are smaller
MOVED_TAG = TAG + 1  # of shards that go to who takes a lost rank's place
PARTS = 8  # messages that a shard travels in, so that others get between them

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class OwnPart(Protocol):
    """One part of a state that differs from rank to rank."""

    def own(self) -> Any:
        """What this rank has now; it is pickled at once, NumPy's arrays without a copy before that."""
        ...

    def set_own(self, values: Mapping[int, Any], mine: int | None, holders: Sequence[int]) -> None:
        """Goes on with the values of a commit. They may be kept and changed.

        values: of the ranks of the commit whose shards this rank has from now on. mine: whose place it takes, None:
        nobody's. holders: for each rank of the commit, which rank of now has its value.
        """
        ...


# --- pure: who keeps whose shard, and what becomes of them


def buddies(hosts: Sequence[Any], copies: int = 1) -> list[tuple[int, ...]]:
    """For each rank those that keep its shard: on hosts other than its own, and each other's, where there are such.

    hosts: of each rank. No rank keeps more than its share where hosts have equally many ranks, and also in every other
    job in which no host has more than half of all.
    """
    size = len(hosts)
    by_host: dict[Any, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    ring = [rank for ranks in by_host.values() for rank in ranks]
    place = {rank: number for number, rank in enumerate(ring)}
    stride = max(map(len, by_host.values())) if len(by_host) > 1 else 1
    load = [0] * size
    chosen: list[list[int]] = [[] for _ in hosts]
    for _ in range(min(copies, size - 1)):
        for rank in ring:
            used = {hosts[rank], *(hosts[one] for one in chosen[rank])}
            first = place[rank] + stride

            def cost(one: int, used: set[Any] = used, first: int = first) -> tuple[bool, int, int]:
                return hosts[one] in used, load[one], (place[one] - first) % size

            best = min((one for one in ring if one != rank and one not in chosen[rank]), key=cost)
            chosen[rank].append(best)
            load[best] += 1
    return [tuple(ranks) for ranks in chosen]


class Held(NamedTuple):
    """What a rank tells of a commit: it was rank `rank` of `size` then, and has the shards of `origins`."""

    commit: int
    generation: int
    size: int
    rank: int
    origins: tuple[int, ...]


class Plan(NamedTuple):
    """From which commit the ranks go on, and with what.

    root: a rank that has the commit. takes: for each rank of now the rank of the commit whose place it has, None:
    nobody's. sources, holders: for each rank of the commit, which rank of now has its shard, and which one shall have.
    """

    commit: int
    generation: int
    root: int
    takes: tuple[int | None, ...]
    sources: tuple[int, ...]
    holders: tuple[int, ...]


def plan(told: Sequence[Sequence[Held]], newest: int = 0) -> Plan:
    """What all ranks have told, in rank order. newest: the newest commit that may be taken, 0: any.

    Commit 0: nobody has one, or there is none of which everything is left and all go back to how they began.
    StateLost, with what is missing, where that cannot be either.
    """
    groups: dict[tuple[int, int], dict[int, Held]] = {}
    for rank, commits in enumerate(told):
        for held in commits:
            if 0 < held.commit <= (newest or held.commit):
                groups.setdefault((held.commit, held.generation), {})[rank] = held
    for key in sorted(groups, reverse=True):
        here = groups[key]
        size = next(iter(here.values())).size
        if {origin for held in here.values() for origin in held.origins} == set(range(size)):
            return _plan_of(here, len(told), size)
    if all(not commits or any(held.commit == 0 for held in commits) for commits in told):
        return Plan(0, 0, 0, (None,) * len(told), (), ())
    raise errors.StateLost(_what_is_lost(groups))


def _plan_of(here: Mapping[int, Held], ranks: int, size: int) -> Plan:
    takes: list[int | None] = [here[rank].rank if rank in here else None for rank in range(ranks)]
    lost = sorted(set(range(size)) - set(takes))
    for rank in range(ranks):
        if takes[rank] is None and lost:
            takes[rank] = lost.pop(0)
    load = [0] * ranks
    sources, holders = [], []
    for origin in range(size):
        keepers = [rank for rank, held in here.items() if origin in held.origins]
        source = next((rank for rank in keepers if here[rank].rank == origin), None)
        if source is None:
            source = min(keepers, key=lambda rank: (load[rank], rank))
            load[source] += 1
        sources.append(source)
        holders.append(takes.index(origin) if origin in takes else source)
    one = next(iter(here.values()))
    return Plan(one.commit, one.generation, min(here), tuple(takes), tuple(sources), tuple(holders))


def _what_is_lost(groups: Mapping[tuple[int, int], Mapping[int, Held]]) -> str:
    lines = []
    for (commit, _), here in sorted(groups.items(), reverse=True):
        size = next(iter(here.values())).size
        missing = sorted(set(range(size)) - {origin for held in here.values() for origin in held.origins})
        lines.append(f"of commit {commit} what only ranks {missing} of {size} had")
    text = "; ".join(lines) or "the state of every rank that has trained"
    return (
        f"lost is {text}: a rank and its buddy ended together. Load a checkpoint (hvd.checkpoint.load) into the state "
        "and call the function of hvd.elastic.run again, or start the job again from one"
    )


# --- the exchange


@dataclass
class Kept:
    """Of one commit. rank, size, generation: of this process when it was made. others: shards kept, by their rank."""

    commit: int
    generation: int
    rank: int
    size: int
    own: Bytes
    others: dict[int, list[Bytes]] = field(default_factory=dict)
    is_complete: bool = False

    def shard(self, origin: int) -> Any:
        """Unpacked anew: what is in it may be changed."""
        if origin == self.rank:
            return unpacked(self.own.copy())
        return unpacked(opened(np.concatenate(self.others[origin]), self._context(origin)))

    def bytes_of(self, origin: int) -> list[Bytes]:
        """In as many parts as a shard travels in."""
        own = origin == self.rank
        parts = [sealed(self.own, self._context(origin))] if own else self.others[origin]
        return np.array_split(parts[0], PARTS) if len(parts) == 1 else parts

    def _context(self, origin: int) -> str:
        return _context(self.commit, self.generation, origin)


def _context(commit: int, generation: int, origin: int) -> str:
    """For what a shard's digest holds: what is left of an earlier life is not taken for a commit of its number."""
    return f"the shard of rank {origin} of commit {commit} in generation {generation}"


@dataclass
class _UnderWay:
    """Messages of one commit. received: by the rank that sends."""

    kept: Kept
    sent: list[int]
    received: dict[int, list[int]]
    arrived: dict[int, list[Bytes]]
    has_failed: bool = False

    def handles(self) -> list[int]:
        return [*self.sent, *(one for handles in self.received.values() for one in handles)]


class Shards(NamedTuple):
    """values: for each rank of the commit whose shard is here, what it had."""

    plan: Plan
    values: dict[int, Any]

    @property
    def mine(self) -> int | None:
        return self.plan.takes[topology.rank()]


class Peers:
    """The shards of one state: this rank's own, and those that it keeps for others. copies: buddies of each rank."""

    def __init__(self, copies: int = 1) -> None:
        self.copies = copies
        self.kept: dict[int, Kept] = {}
        self._under_way: _UnderWay | None = None
        self._abandoned: list[int] = []  # handles of a generation that is over
        self._ring: tuple[int, list[tuple[int, ...]]] = (0, [])  # generation, buddies of each rank in it

    # --- one commit

    def save(self, commit: int, value: Any, keep: Collection[int]) -> None:
        """Packs this rank's shard of a commit; of older ones those in `keep` stay."""
        self.kept = {number: one for number, one in self.kept.items() if number in keep and number < commit}
        number, rank, size = _place()
        self.kept[commit] = Kept(commit, number, rank, size, packed(value), is_complete=size == 1)

    def start(self, commit: int) -> None:
        """Sends the shard to the buddies and takes theirs, without waiting. All ranks call it for the same commit.

        The first time in a generation it waits for the others: they tell each other which hosts they are on.
        """
        kept = self.kept[commit]
        if kept.is_complete:
            return
        self._drop_abandoned()
        ring = self._buddies(kept)
        wards = [rank for rank, keepers in enumerate(ring) if kept.rank in keepers]
        parts = kept.bytes_of(kept.rank)
        self._under_way = _UnderWay(
            kept,
            [_isend(part, to, TAG) for to in ring[kept.rank] for part in parts],
            {ward: [arrays.irecv(None, ward, TAG) for _ in range(PARTS)] for ward in wards},
            {ward: [] for ward in wards},
        )

    def _buddies(self, kept: Kept) -> list[tuple[int, ...]]:
        if self._ring[0] != kept.generation:
            name = hashlib.blake2b(member.host().encode(), digest_size=7).digest()
            mine = np.array([[int.from_bytes(name, "little"), self.copies]], np.int64)
            hosts, copies = arrays.allgather(mine, "hvd.elastic.hosts").T.tolist()
            self._ring = kept.generation, buddies(hosts, max(copies))
        return self._ring[1]

    def finish(self) -> None:
        """Waits until the exchange that is under way is done. HorovodInternalError when a rank was lost."""
        work = self._under_way
        if work is None:
            return
        try:
            for ward, handles in work.received.items():
                while handles:
                    work.arrived[ward].append(_as_bytes(synchronize(handles.pop(0))))
            while work.sent:
                synchronize(work.sent.pop(0))
        except BaseException:
            work.has_failed = True
            raise
        work.kept.others = work.arrived
        work.kept.is_complete = True
        self._under_way = None

    def settle(self) -> None:
        """After a failure: takes what has arrived. What has not is given up; its commit is not held."""
        work = self._under_way
        if work is None:
            return
        if not work.has_failed and all(poll(handle) for handle in work.handles()):
            with contextlib.suppress(errors.HorovodInternalError):
                self.finish()
                return
        for ward, handles in work.received.items():
            with contextlib.suppress(errors.HorovodInternalError):
                while handles and poll(handles[0]):
                    work.arrived[ward].append(_as_bytes(synchronize(handles.pop(0))))
        work.kept.others = {ward: parts for ward, parts in work.arrived.items() if len(parts) == PARTS}
        self._abandoned += work.handles()
        self._under_way = None

    def spread(self, commit: int) -> None:
        """Gives every rank all shards of a commit: some leave as planned now, and nobody knows which. Collective."""
        kept = self.kept[commit]
        if kept.size == 1:
            return
        sizes = arrays.allgather(np.array([kept.own.size], np.int64), "hvd.elastic.sizes")
        own = sealed(kept.own, _context(commit, kept.generation, kept.rank))
        everything = arrays.allgather(own, "hvd.elastic.everything")
        ends = np.cumsum(sizes)
        kept.others = {
            rank: [everything[end - size : end]]
            for rank, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if rank != kept.rank
        }

    def _drop_abandoned(self) -> None:
        """Lets go of the memory of messages that have failed with their generation."""
        abandoned, self._abandoned = self._abandoned, []
        for handle in abandoned:
            with contextlib.suppress(errors.HorovodInternalError):
                synchronize(handle)

    def is_held(self, commit: int) -> bool:
        """Whether this rank has its own shard of a commit and all that it keeps for others."""
        return commit not in self.kept or self.kept[commit].is_complete

    def forget(self) -> None:
        """Nothing that was committed counts any more."""
        self.settle()
        self.kept.clear()

    def step_back(self, commit: int) -> None:
        """Commits after this one are given up."""
        self.kept = {number: one for number, one in self.kept.items() if number <= commit}

    @property
    def nbytes(self) -> int:
        """Host memory that shards take now: this rank's own and those of others, of all commits that are kept."""
        return sum(
            one.own.nbytes + sum(part.nbytes for parts in one.others.values() for part in parts)
            for one in self.kept.values()
        )

    # --- a generation begins

    def told(self) -> tuple[Held, ...]:
        """What this rank has, for plan()."""
        return tuple(
            Held(number, one.generation, one.size, one.rank, tuple(sorted({one.rank, *one.others})))
            for number, one in self.kept.items()
        )

    def look(self, commit: int) -> Plan | None:
        """Agrees with all ranks on the commit to go on from, and on who takes whose place. Collective.

        commit: the one that this rank's state is at. None: it is of this generation on every rank, and there is nothing
        to find. StateLost, on every rank.
        """
        self.settle()
        self._drop_abandoned()
        now, kept = generation(), self.kept.get(commit)
        is_now = kept is not None and kept.generation == now.number
        told = allgather_object((is_now, self.told()), "hvd.elastic.shards")
        return None if all(one for one, _ in told) else plan([held for _, held in told], now.commit)

    def recover(self, found: Plan) -> Shards:
        """Moves shards to those who have them from now on, and unpacks what this rank has. Collective."""
        me, kept = topology.rank(), self.kept.get(found.commit)
        moves = [
            (origin, source, to)
            for origin, (source, to) in enumerate(zip(found.sources, found.holders, strict=True))
            if source != to
        ]
        sent = [
            _isend(part, to, MOVED_TAG)
            for origin, source, to in moves
            if source == me and kept is not None
            for part in kept.bytes_of(origin)
        ]
        values = {
            origin: kept.shard(origin)
            for origin, (source, to) in enumerate(zip(found.sources, found.holders, strict=True))
            if source == to == me and kept is not None
        }
        for origin, source, to in moves:
            if to == me:
                parts = [_as_bytes(arrays.recv(None, source, MOVED_TAG)) for _ in range(PARTS)]
                values[origin] = unpacked(
                    opened(np.concatenate(parts), _context(found.commit, found.generation, origin))
                )
        for handle in sent:
            synchronize(handle)
        return Shards(found, values)


def _place() -> tuple[int, int, int]:
    """Generation, rank and size; (0, 0, 1) where nobody else keeps anything: no elastic job, or before init()."""
    if not member.is_elastic():
        return 0, 0, 1
    try:
        now = generation()
    except errors.NotInitialized:
        return 0, 0, 1
    return now.number, now.rank, now.size


def wait_for_all() -> None:
    """Ends on no rank before all have called it."""
    arrays.allgather(np.zeros(1, np.int64), "hvd.elastic.barrier")


def _isend(part: Bytes, to: int, tag: int) -> int:
    handle: int = arrays.isend(part, to, tag)
    return handle


def _as_bytes(received: Any) -> Bytes:
    return np.asarray(received, np.uint8)
