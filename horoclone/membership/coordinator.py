"""Decides who is in an elastic job: its members, and the generations that they form. Pure: time in, answers out.

A member is a process named by 16 random bytes. It joins, waits inside init() for a generation that includes it (form),
and comes back for the next one when that generation is lost or when members come or leave. One record describes a
generation to everybody; no number is given to two of them. Thread: one at a time (service.py holds a lock).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ID_BYTES = 16
NONCE_BYTES = 32
NO_UPDATE, REMOVED, ADDED = 0, 1, 2  # flags of a notice, as Horovod's HostUpdateResult
TOGETHER_S = 2.0  # how long a process that wants to join waits for others that are being started
PROGRESS_S = 10.0  # a member that was in the job for so long has not failed at once
SILENT_S = 5.0  # a member whom others have lost is dead when the coordinator has not heard of it for so long
LOW_BITS = 32  # of a generation's number: these count, those above name who counts (failover.py)
HEARTBEAT_TIMEOUT_S = 30.0  # so is, while a generation is formed, one of whom nobody says anything
AT_START_S = (
    30.0  # so long do those who are enough for the first generation wait for others that are being started
)
UNREADY_S = 0.1  # so long do survivors wait for newcomers that were not synchronised yet
NO_MEMBER = 75  # EX_TEMPFAIL: exit code of a process that the others go on without

RESET_LIMIT_TEXT = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"


class Limits(NamedTuple):
    """size: of the first generation. largest, resets: None for no limit. timeout_s: bounds every wait.

    majority: a generation needs more than half of those members of the last whole one that are not known to be dead, or
    half of them with the lowest. Another coordinator may have the rest.
    """

    size: int
    smallest: int = 1
    largest: int | None = None
    timeout_s: float = 600.0
    resets: int | None = None
    majority: bool = False


class Record(NamedTuple):
    """One generation. members: ids by rank; previous: the rank of each in the generation before, -1: none."""

    number: int
    members: tuple[bytes, ...]
    indexes: tuple[int, ...]  # the launcher's numbers of the members
    previous: tuple[int, ...]
    commit: int  # the newest that every survivor holds; 0: none
    commit_root: int  # the rank whose state the others take
    skip_sync: bool
    nonce: bytes

    @property
    def newcomers(self) -> tuple[int, ...]:
        return tuple(rank for rank, before in enumerate(self.previous) if before < 0)


class Evicted(NamedTuple):
    """The others go on without this process. code: with which it should end."""

    code: int
    text: str


class Stop(NamedTuple):
    """The job ends. code: of every process."""

    code: int
    text: str


class RescaleNotice(NamedTuple):
    """Another generation, of number `wanted`, shall be formed at the next commit. seq: rises with each."""

    seq: int
    wanted: int
    update: int


NO_NOTICE = RescaleNotice(0, 0, NO_UPDATE)


class JoinRejected(Exception):
    """Who asks may not be told anything, and why."""


@dataclass(eq=False)
class Member:
    """One process. generation: the newest that holds it; 0: none yet. planned: the rank it has among newcomers."""

    id: bytes
    index: int
    host: str
    slot: int
    heard_s: float
    incarnation: bytes = b""  # of the process that has joined; empty: not yet
    generation: int = 0
    released: int = (
        0  # the generation that it was in, and whose others went on before it was synchronised; 0: none
    )
    waits_after: int | None = None  # it is in form(), and this is the generation that it has seen last
    waiting_s: float = 0.0
    commits: tuple[int, ...] = ()
    connections: int = 0
    near: bool = False  # on the coordinator's own host, where no network is between
    planned: int = 0
    addresses: str = ""  # where it would be the coordinator itself (failover.py)
    commit_before: int = 0  # the newest of the job when it came into its first generation
    suspected: bool = False  # another member has lost it
    leaving: str = ""  # it has said that it will go
    unwanted: str = ""  # nobody wants it any more
    displaced: bool = False  # because nobody names its host any more: that may be a mistake, and it is there
    has_state: bool = False  # it holds a commit
    gone: str = ""  # it has ended, left or been given up; why
    out_code: int = 0


@dataclass(eq=False)
class Coordinator:
    """open_to_all: whether a process that nobody has announced by start() may join; its slot is its rank among others
    that are new, and it takes the place of who had it before. term: the high half of numbers. expected: hosts of the
    first generation, where they are known; for the text when some do not come.
    """

    limits: Limits
    draw: Callable[[int], bytes]  # so many random bytes
    open_to_all: bool = False
    build: str = ""  # of horoclone, as the first member has it that said so
    expected: tuple[str, ...] = ()
    whole_hosts: bool = False  # a member that fails takes those on its host with it, as in Horovod
    record: Record | None = None
    stopped: Stop | None = None
    finishing: bool = False  # a member has ended with success: whoever comes now comes too late
    members: dict[bytes, Member] = field(default_factory=dict)
    newest_commit: int = 0
    fenced: list[bytes] = field(default_factory=list)  # alive perhaps; whoever started them should end them
    too_few: str = ""  # why the first generation will never have its smallest size
    term: int = 0
    voters: tuple[bytes, ...] = ()  # of the last generation in which everybody came to connect, by rank
    _quorum_lost_since_s: float | None = (
        None  # since when somebody is silent, and the others are too few to go on without
    )
    confirmed_dead: set[bytes] = field(default_factory=set)  # dead or left for sure, not only silent
    _next_index: int = 0
    _forming_s: float | None = None
    _handing_over_s: float | None = None  # since when only those who are to leave have the state
    _notice: RescaleNotice = NO_NOTICE
    _commits_before: dict[bytes, int] = field(
        default_factory=dict
    )  # of the survivors, when they formed the newest

    # --- what is heard of members

    def start(
        self, id_: bytes, host: str, slot: int, now: float, near: bool = False, planned: int = 0
    ) -> int:
        """Somebody starts this process: it is waited for. Gives the number of the member.

        planned: newcomers get their ranks in this order; those of the same plan in that of these calls.
        """
        if len(id_) != ID_BYTES:
            raise ValueError(f"the name of a member has {ID_BYTES} bytes, not {len(id_)}")
        if id_ in self.members:
            raise ValueError("two members have the same name")
        member = Member(id_, self._next_index, host, slot, now, near=near, planned=planned)
        self._next_index += 1
        self.members[id_] = member
        return member.index

    def join(self, id_: bytes, incarnation: bytes, host: str, slot: int, now: float, build: str = "") -> int:
        """A connection of this member is there. incarnation: drawn by its process. Gives the number of the member."""
        if (
            build != self.build and self.build
        ):  # the ranks would refuse it, and all of them would end with that
            raise JoinRejected(
                f"it is horoclone {build or 'of an unknown version'}, and the job's other processes are horoclone "
                f"{self.build}; install the same horoclone on every host"
            )
        self.build = build
        member = self.members.get(id_)
        if member is None:
            if not self.open_to_all:
                raise JoinRejected(
                    "nobody has started a member of this name; was the environment of another job copied?"
                )
            self._make_room(host, slot, now)
            self.start(id_, host, slot, now, planned=slot)
            member = self.members[id_]
        if member.incarnation not in (b"", incarnation):
            raise JoinRejected(
                f"two processes say that they are member {member.index} ({member.host}, slot {member.slot}); was a "
                "process started with the environment of a worker? Take HOROCLONE_MEMBER out of its environment"
            )
        member.incarnation = incarnation
        member.connections += 1
        member.heard_s = now
        return member.index

    def numbers_from(self, index: int) -> None:
        """Members that come get numbers from here on: another coordinator has given the lower ones."""
        self._next_index = max(self._next_index, index)

    def _make_room(self, host: str, slot: int, now: float) -> None:
        """Who started a process at this place anew has seen the end of the one before. JoinRejected if that one
        lives."""
        for other in [one for one in self.members.values() if (one.host, one.slot) == (host, slot)]:
            if other.connections and not other.gone and now - other.heard_s < SILENT_S:
                raise JoinRejected(
                    f"another process is {host} (number {slot}) in this job, and it is alive. Are there two of one "
                    "name or number (JOB_COMPLETION_INDEX, HOROCLONE_HOSTNAME), or two jobs behind one service with "
                    "one HOROCLONE_JOB?"
                )
            self.dead(other.id, "another process has its place now", now)

    def heard(self, id_: bytes, now: float) -> None:
        self.members[id_].heard_s = now

    def disconnected(self, id_: bytes, now: float) -> None:
        """One of its connections is gone: it does not hear the answer to form()."""
        member = self.members[id_]
        member.connections -= 1
        if member.connections == 0 and member.suspected:
            self._lose(member, "its connections ended", NO_MEMBER)
        self.step(now)

    def form(self, id_: bytes, seen: int, commits: Iterable[int], now: float) -> None:
        """It waits for a generation after `seen`, the newest that it knows (0: none), and holds these commits."""
        member = self.members[id_]
        after = 0 if seen and seen == member.released else seen
        if member.waits_after != after:
            member.waiting_s = now
        member.waits_after = after
        member.commits = tuple(sorted(set(commits)))
        member.has_state = bool(member.commits)
        member.heard_s = now
        self.newest_commit = max((self.newest_commit, *member.commits))
        self.step(now)

    def holds(self, id_: bytes, commit: int) -> bool:
        """A member that trains holds this commit. It is heard of once a second at most. Gives whether it is its first:
        step() may have to do something then."""
        member = self.members[id_]
        if not member.generation or not commit:
            return False
        is_first, member.has_state = not member.has_state, True
        self.newest_commit = max(self.newest_commit, commit)
        return is_first

    def has_progressed(self, id_: bytes, since_s: float, now: float) -> bool:
        """Whether the job did something with this member, whose process began at since_s: a commit was made in a
        generation that held it, as far as the others have said, or it has been in the job for PROGRESS_S."""
        member = self.members[id_]
        if not member.generation:
            return False
        return now - since_s >= PROGRESS_S or self.newest_commit > member.commit_before

    def is_told(self, id_: bytes) -> bool:
        """Whether the others of a member that has ended have said since what they hold: has_progressed knows then."""
        record = self.record
        return record is None or self.members[id_].generation < record.number or not self.live()

    def withdraw(self, id_: bytes) -> None:
        """It does not wait any more, or nobody can tell."""
        self.members[id_].waits_after = None

    def announce(self, id_: bytes, reason: str, now: float) -> None:
        """It will leave: the others hear of it at their next commit."""
        self.members[id_].leaving = reason or "it was asked to leave"
        self.step(now)

    def leave(self, id_: bytes, reason: str, now: float) -> None:
        """It leaves now, as planned."""
        member = self.members[id_]
        member.leaving = reason or member.leaving or "it left"
        self.confirmed_dead.add(id_)
        self._lose(member, f"it left: {member.leaving}", 0)
        self.step(now)

    def dead(self, id_: bytes, text: str, now: float, is_certain: bool = True) -> None:
        """From who knows: its process has ended. is_certain: it was seen, and not only its host was lost."""
        if is_certain:
            self.confirmed_dead.add(id_)
        self._lose(self.members[id_], text, NO_MEMBER)
        self.step(now)

    def suspect(self, number: int, rank: int, now: float) -> None:
        """A member of this generation has lost another one."""
        record = self.record
        if record is None or record.number != number or not 0 <= rank < len(record.members):
            return
        member = self.members[record.members[rank]]
        member.suspected = True
        if member.connections == 0 and member.incarnation:
            self._lose(member, "its connections ended", NO_MEMBER)
        self.step(now)

    def established(self, number: int) -> None:
        """All members of this generation have come to connect: from now on they are those who may vote."""
        if self.record is not None and self.record.number == number:
            self.voters = self.record.members

    def drain(self, id_: bytes, reason: str, now: float) -> None:
        """It shall go: its host is not to be used any more."""
        self.drain_all({id_: reason}, now)

    def drain_all(self, workers: Mapping[bytes, str], now: float) -> None:
        """They shall go in one generation, each for this reason."""
        for id_, reason in workers.items():
            self.members[id_].unwanted = reason
        self.step(now)

    def displace(self, reasons: Mapping[bytes, str], now: float) -> None:
        """Of all workers: why nobody names the host of each any more; empty: it is there, perhaps again. They go, but
        where only they have the state they stay until others have it, for timeout_s at most."""
        for id_, reason in reasons.items():
            member = self.members[id_]
            if reason or member.displaced:
                member.unwanted, member.displaced = reason, bool(reason)
        self.step(now)

    def expect(self, size: int, why: str, now: float) -> None:
        """No more than so many come to the first generation; why, where that is less than the smallest size."""
        if self.record is None:
            size_then = max(self.limits.smallest, min(size, self.limits.size))
            self.limits = self.limits._replace(size=size_then)
            self.too_few = (
                f"{size} of at least {self.limits.smallest} processes are left: {why}"
                if size < size_then
                else ""
            )
            self.step(now)

    def finish(self, now: float) -> None:
        """A member has done its work: those who have not begun need not any more, and there is no smallest size."""
        self.finishing = True
        self.step(now)

    def stop(self, code: int, text: str) -> None:
        if self.stopped is None:
            self.stopped = Stop(code, text)

    # --- what members are told

    def answer(self, id_: bytes) -> Record | Evicted | Stop | None:
        """To form(); None: it has to wait."""
        member = self.members[id_]
        if member.waits_after is None:
            return None
        record = self.record
        if self.stopped is not None:
            return self.stopped
        if member.gone:
            return Evicted(member.out_code, member.gone)
        if record is not None and member.generation == record.number and member.waits_after < record.number:
            return record
        if member.waits_after != member.generation:
            return Evicted(
                NO_MEMBER, f"generation {member.waits_after} is over, and it was not in the last one"
            )
        if (member.leaving or member.unwanted) and member not in self._old():
            return Evicted(0, member.leaving or member.unwanted)
        if self.finishing and not member.generation:
            return Evicted(0, "the job is done")
        return None

    def notice(self) -> RescaleNotice:
        """The newest; seq 0: there has been none."""
        return self._notice

    def next_s(self) -> float:
        """When step() has something to do that only time brings."""
        if self.stopped is not None:
            return float("inf")
        due = [float("inf")]
        if self._forming_s is not None:
            due.append(self._forming_s + self.limits.timeout_s)
            if self.record is None:
                due.append(self._alone_until_s())
            unready, until_s = self._unready()
            due += [until_s] if unready else []
            if self._quorum_lost_since_s is None:
                due += [self._patience_s(one) for one in self._old() if not self._comes(one)]
        elif self.record is not None:
            due += [one.waiting_s + TOGETHER_S for one in self._newcomers()]
        if self._handing_over_s is not None:
            due.append(self._handing_over_s + self.limits.timeout_s)
        return min(due)

    def coming(self) -> list[Member]:
        """Those who were started and have not come to form()."""
        return [
            one
            for one in self.members.values()
            if not (one.gone or one.generation or one.waits_after is not None)
        ]

    def live(self) -> list[Member]:
        """Members of the newest generation who are still there, by rank."""
        record = self.record
        return (
            []
            if record is None
            else [
                one
                for one in map(self.members.__getitem__, record.members)
                if not one.gone and one.released != record.number
            ]
        )

    # --- the machine

    def step(self, now: float) -> None:
        """Forms a generation when all for it is there, gives up who does not come, finds what to announce."""
        if self.stopped is not None:
            return
        self._watch_hand_over(now)
        if self.stopped is not None:
            return
        if not self._is_forming():
            self._forming_s = None
            self._look_for_news(now)
            return
        if self._forming_s is None:
            self._forming_s = now
        is_late = now >= self._forming_s + self.limits.timeout_s
        unready, until_s = self._unready()
        if now >= until_s:
            for one in unready:  # it comes again, as a newcomer
                one.released, one.generation, one.waits_after = one.generation, 0, None
        missing = [one for one in self._old() if not self._comes(one)]
        overdue = [one for one in missing if is_late or now >= self._patience_s(one)]
        if overdue and not is_late and not self._may_go_on([one for one in self._old() if self._comes(one)]):
            self._quorum_lost_since_s = (
                now if self._quorum_lost_since_s is None else self._quorum_lost_since_s
            )
            return  # nobody is given up by those who may be the ones that are cut off
        if (
            self._quorum_lost_since_s is not None
            and now >= self._quorum_lost_since_s + SILENT_S
            and not is_late
        ):
            for one in overdue:
                one.heard_s = now  # the network is whole again: the others come back one by one
            overdue = []
        self._quorum_lost_since_s = None
        for one in missing:
            if one in overdue:
                why = "it did not come back" if is_late else "nobody has heard of it any more"
                self._lose(one, f"{why} (generation {one.generation})", NO_MEMBER)
                if not self.limits.majority:  # else by _make: it may be we who are cut off
                    self.fenced.append(one.id)
        if any(not one.gone for one in missing):
            return
        if self._is_state_lost():
            self._give_up_the_state()
        else:
            self._form_or_hold(now, is_late)

    def _unready(self) -> tuple[list[Member], float]:
        """Newcomers of a generation that was lost before they were synchronised, and until when they are waited for:
        they may be building their model for seconds yet. A sync ends in a commit of every rank."""
        record, old = self.record, self._old()
        survivors = [one for one in old if one.id in self._commits_before]
        others = [one for one in old if one.id not in self._commits_before and not self._comes(one)]
        if record is None or self.finishing or not others or not survivors:
            return [], 0.0
        for one in survivors:
            if not self._comes(one) or not one.commits or one.commits[-1] > self._commits_before[one.id]:
                return [], 0.0
        return others, max(one.waiting_s for one in survivors) + UNREADY_S

    def _is_state_lost(self) -> bool:
        """Nobody is left, or there are commits and only those are left who came and were never synchronised."""
        if self.record is None:
            return False
        old = self._old()
        return not self.live() or bool(old and self.newest_commit and not any(one.commits for one in old))

    def _give_up_the_state(self) -> None:
        if self.finishing:
            for one in self._old():
                one.unwanted = "the job is done"
            return
        assert self.record is not None
        self.stop(
            1,
            f"nobody is left of those who had the state of the training (generation {self.record.number}): the "
            "processes that wait would begin anew. Start the job again, from its last checkpoint.",
        )

    def _watch_hand_over(self, now: float) -> None:
        """Ends the job where those who are to leave have waited for too long for others, who would take the state."""
        last_holders = self._last_holders()
        if not last_holders:
            self._handing_over_s = None
            return
        self._handing_over_s = now if self._handing_over_s is None else self._handing_over_s
        if now >= self._handing_over_s + self.limits.timeout_s:
            self.stop(
                1,
                f"{last_holders[0].leaving or last_holders[0].unwanted}, and for {self.limits.timeout_s:g} s nobody "
                "came to whom the state of the training could be handed over; --elastic-timeout (seconds) waits longer",
            )

    def is_handing_over(self) -> bool:
        """Whether those who are to leave go on for the time being: nobody else has the state."""
        return bool(self._last_holders())

    def _last_holders(self) -> list[Member]:
        """Those of them, by rank: as long as others come, or may come because their hosts are only not named."""
        going = [one for one in self.live() if one.leaving or one.unwanted]
        if not going or not self.newest_commit or self.finishing:
            return []
        staying = [one for one in self.live() if one not in going]
        if any(one.has_state for one in staying):
            return []
        may_come = bool(staying or self._newcomers() or self.coming()) and self.limits.largest != 1
        return going if may_come or any(one.displaced for one in going) else []

    def _ready(self, old: list[Member], new: list[Member]) -> list[Member]:
        """The members of the next generation: no more than the largest size, old ones first. Where old ones only stay
        to hand over, there is room for at least one to whom they do."""
        largest = self.limits.largest
        if largest is None:
            return old + new
        last_holders = self._last_holders()
        if last_holders:
            largest = max(largest, 2)  # one more than there should be, for a moment
            staying = [one for one in old if one not in last_holders][: largest - 1]
            taking = new[: largest - 1 - len(staying)]
            last_holders = last_holders[: largest - len(staying) - len(taking)]
            return [one for one in old if one in last_holders or one in staying] + taking
        return (old + new)[: max(largest, 1)]

    def _alone_until_s(self) -> float:
        """Until when the first generation, which could begin, waits for others that are being started; -inf: nobody
        else can come, or there is no room."""
        new, limits = self._newcomers(), self.limits
        enough = len(new) >= limits.size
        if not self.coming() or (limits.largest is not None and len(new) >= limits.largest):
            return -math.inf if enough else math.inf
        return sorted(one.waiting_s for one in new)[limits.size - 1] + AT_START_S if enough else math.inf

    def _form_or_hold(self, now: float, is_late: bool) -> None:
        old, new, limits = self._old(), self._newcomers(), self.limits
        ready = self._ready(old, new)
        first = self.record is None
        if first and self.too_few and ready:
            self.stop(1, self.too_few)
            return
        if first and not is_late and now < self._alone_until_s():
            return
        wanted = limits.size if first and not is_late else limits.smallest
        votes, voters = self._votes(ready)
        if ready and not self._may_go_on(ready):
            if is_late:
                self.stop(
                    NO_MEMBER,
                    f"{votes} of {voters} ranks are on this side of a cut network after {limits.timeout_s:g} s: the "
                    "others may be going on, so these end; HOROCLONE_ELASTIC_QUORUM=any lets every side go on",
                )
        elif ready and (len(ready) >= wanted or (self.finishing and old)):
            if not first and limits.resets is not None and self._resets() >= limits.resets:
                self.stop(1, RESET_LIMIT_TEXT.format(limits.resets))
            else:
                self._make(ready)
        elif is_late and ready:
            here = {one.host for one in ready}
            absent = [one for one in self.expected if one not in here][:8]
            self.stop(
                1,
                f"{len(ready)} of at least {limits.smallest} processes were there after {limits.timeout_s:g} s"
                f"{', without ' + ', '.join(absent) if absent and first else ''}; --elastic-timeout (seconds) gives "
                "them more time, --min-np asks for fewer; without a launcher HOROCLONE_ELASTIC_TIMEOUT and "
                "HOROCLONE_MIN_NP",
            )

    def _voting(self) -> list[bytes]:
        return [id_ for id_ in self.voters if id_ not in self.confirmed_dead]

    def _votes(self, ready: list[Member]) -> tuple[int, int]:
        """How many of those who may vote are here, and how many there are."""
        voting, here = self._voting(), {one.id for one in ready}
        return sum(id_ in here for id_ in voting), len(voting)

    def _may_go_on(self, ready: list[Member]) -> bool:
        """Whether nobody else can have a majority. Two coordinators cannot both: who is dead votes for neither."""
        if not self.limits.majority or not (voting := self._voting()):
            return True
        votes, voters = self._votes(ready)
        return 2 * votes > voters or (2 * votes == voters and any(one.id == voting[0] for one in ready))

    def next_number(self) -> int:
        """Of the generation after the newest."""
        newest = 0 if self.record is None else self.record.number
        return (self.term << LOW_BITS) | ((newest + 1) % (1 << LOW_BITS))

    def _make(self, ready: list[Member]) -> None:
        before = self.record
        number = self.next_number()
        ranks = {} if before is None else {id_: rank for rank, id_ in enumerate(before.members)}
        survivors = [one for one in ready if one.generation]
        held = set.intersection(*(set(one.commits) for one in survivors)) if survivors else set()
        newest = {max(one.commits, default=0) for one in survivors}
        commit = max(held, default=0)
        most = max(newest, default=0)
        root = next(
            (
                rank
                for rank, one in enumerate(ready)
                if one.generation and (commit or most in (0, *one.commits[-1:]))
            ),
            0,
        )
        self.record = Record(
            number,
            tuple(one.id for one in ready),
            tuple(one.index for one in ready),
            tuple(ranks.get(one.id, -1) if one.generation else -1 for one in ready),
            commit,
            root,
            len(survivors) == len(ready) and len(newest) == 1 and commit > 0 and commit in newest,
            self.draw(NONCE_BYTES),
        )
        self._commits_before = {one.id: max(one.commits, default=0) for one in survivors}
        for one in ready:
            if not one.generation:
                one.commit_before = self.newest_commit
            one.generation, one.released, one.suspected = number, 0, False
        if self.limits.majority and before is not None:
            left = [id_ for id_ in before.members if self.members[id_].out_code == NO_MEMBER]
            self.fenced += [id_ for id_ in left if id_ not in self.confirmed_dead]
        if len(ready) == 1:
            self.established(number)  # it meets nobody
        self._forming_s = None

    def _patience_s(self, member: Member) -> float:
        """Until when a silent member is waited for; a host whose network is gone takes all its members with it."""
        record = self.record
        members = [] if record is None else [self.members[id_] for id_ in record.members]
        is_doubted = any(one.suspected and one.host == member.host for one in members)
        return member.heard_s + (SILENT_S if is_doubted else HEARTBEAT_TIMEOUT_S)

    def _is_forming(self) -> bool:
        if self.record is None:
            return bool(self._newcomers())
        return any(self._comes(one) for one in self._old()) or (not self.live() and bool(self._newcomers()))

    def _look_for_news(self, now: float) -> None:
        """While a generation runs: is another one wanted?"""
        record = self.record
        if record is None:
            return
        update = NO_UPDATE
        live = self.live()
        last_holders = self._last_holders()
        if any(one.leaving or one.unwanted for one in live) and not last_holders:
            update |= REMOVED
        new = self._newcomers()
        staying = sum(1 for one in live if not (one.leaving or one.unwanted))
        largest = self.limits.largest
        has_room = largest is None or staying < largest
        if new and has_room and not self.finishing:
            all_there = not self.coming() or now >= min(one.waiting_s for one in new) + TOGETHER_S
            update |= (ADDED | REMOVED if last_holders else ADDED) if all_there else NO_UPDATE
        last = self._notice
        if update and (last.wanted, last.update) != (self.next_number(), update):
            self._notice = RescaleNotice(last.seq + 1, self.next_number(), update)

    def _old(self) -> list[Member]:
        """Members of the newest generation who may be in the next, by rank."""
        last_holders = self._last_holders()
        return [one for one in self.live() if one in last_holders or not (one.leaving or one.unwanted)]

    def _newcomers(self) -> list[Member]:
        """Those who wait for their first generation, as planned, the oldest first."""
        if self.finishing:
            return []
        return sorted(
            (
                one
                for one in self.members.values()
                if one.waits_after == 0 and not (one.generation or one.gone or one.leaving or one.unwanted)
            ),
            key=lambda one: (one.planned, one.index),
        )

    def _comes(self, member: Member) -> bool:
        """Whether it waits for the generation after the newest."""
        return self.record is not None and member.waits_after == self.record.number

    def _resets(self) -> int:
        return 0 if self.record is None else self.record.number % (1 << LOW_BITS) - 1

    def _close_host_of(self, failed: Member) -> None:
        """Those beside it go in the same generation: they must not be in one more, and leave in the next."""
        is_planned = failed.leaving or failed.unwanted or self.finishing
        if self.whole_hosts and failed in self.live() and not is_planned:
            for one in self.live():
                if one.host == failed.host and one is not failed:
                    one.unwanted = (
                        one.unwanted or f"host {one.host} is not used any more: a process failed there"
                    )

    def _lose(self, member: Member, text: str, code: int) -> None:
        if not member.gone:
            self._close_host_of(member)
            member.gone, member.out_code = text, code
            if member.near and not member.connections and member.incarnation:
                self.confirmed_dead.add(member.id)  # on one host a connection ends with its process only
