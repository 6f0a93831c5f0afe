"""Decides which members form the next generation, and says why. Pure: nothing here changes anything."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from horoclone.bootstrap.failure_detector import SUSPECT_TIMEOUT_S, FailureDetector
from horoclone.membership.records import LOW_BITS, Limits, Record, Stop
from horoclone.membership.states import NO_MEMBER, Drain, Member, State
from horoclone.membership.timeouts import FIRST_GENERATION_S, UNSYNCHRONISED_S

RESET_LIMIT_TEXT = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"


class Decision(NamedTuple):
    """members: of the next generation, by rank; none: not yet. fenced, released, drained, forgiven (silent ones that
    are waited for anew): what members are from now on. quorum_lost: too few are here to give up the others."""

    reason: str
    members: tuple[Member, ...] = ()
    stop: Stop | None = None
    fenced: tuple[Member, ...] = ()
    released: tuple[Member, ...] = ()
    drained: tuple[Member, ...] = ()
    forgiven: tuple[Member, ...] = ()
    quorum_lost: bool = False


@dataclass(eq=False)
class JobState:
    """What is known of a job. voters: of the last generation in which everybody came to connect, by rank."""

    limits: Limits
    expected: tuple[str, ...] = ()  # hosts of the first generation, where they are known
    members: dict[bytes, Member] = field(default_factory=dict)
    detector: FailureDetector[bytes] = field(default_factory=FailureDetector)
    record: Record | None = None
    voters: tuple[bytes, ...] = ()
    finishing: bool = False  # a member has ended with success: whoever comes now comes too late
    newest_commit: int = 0
    too_few: str = ""  # why the first generation will never have its smallest size
    forming_since_s: float | None = None
    quorum_lost_since_s: float | None = None
    # of the survivors, when they formed the newest
    commits_before: dict[bytes, int] = field(default_factory=dict)

    def newest(self) -> list[Member]:
        """Members of the newest generation, by rank."""
        record = self.record
        members = [] if record is None else [self.members[id_] for id_ in record.members]
        return [one for one in members if record and one.generation == record.number]

    def live(self) -> list[Member]:
        """Those of them who are still there."""
        return [one for one in self.newest() if one.is_live]

    def old(self) -> list[Member]:
        """Those of these who may be in the next, by rank."""
        holders = self.last_holders()
        return [one for one in self.live() if one.state is not State.DRAINING or one in holders]

    def newcomers(self) -> list[Member]:
        """Those who wait for their first generation, in their order, the oldest first."""
        new = [one for one in self.members.values() if one.state is State.JOINING and not self.finishing]
        return sorted(new, key=lambda one: (one.order, one.index))

    def fed(self) -> list[Member]:
        """Those of them who have what they can have before the others are interrupted."""
        new = self.newcomers()
        return [one for one in new if one.is_ready or self.record is None]

    def coming(self) -> list[Member]:
        """Those who were started and have not come to form()."""
        started = [one for one in self.members.values() if one.state is State.STARTING]
        return [one for one in started if one.waits_after is None]  # else it has come, and was turned away

    def comes(self, member: Member) -> bool:
        """Whether it waits for the generation after the newest."""
        return self.record is not None and member.waits_after == self.record.number

    def is_forming(self) -> bool:
        if self.record is None:
            return bool(self.newcomers())
        return any(map(self.comes, self.old())) or (not self.live() and bool(self.newcomers()))

    def last_holders(self) -> list[Member]:
        """Those who are to leave and stay for the time being, by rank: nobody else has the state of the training, and
        others come, or may come because their hosts are only not named."""
        live = self.live()
        going = [one for one in live if one.state is State.DRAINING]
        staying = [one for one in live if one.state is not State.DRAINING]
        if not going or not self.newest_commit or self.finishing or any(one.has_state for one in staying):
            return []
        may_come = bool(staying or self.newcomers() or self.coming()) and self.limits.largest != 1
        return going if may_come or any(Drain.DISPLACED in one.drain for one in going) else []

    def ready(self) -> list[Member]:
        """The members of the next generation: no more than the largest size, old ones first. Where old ones only stay
        to hand over, there is room for at least one to whom they do."""
        old, new, largest = self.old(), self.fed(), self.limits.largest
        if len(old) + len(new) < self.limits.smallest:  # the others wait anyway
            new = self.newcomers()
        if largest is None:
            return old + new
        holders = self.last_holders()
        if not holders:
            return (old + new)[: max(largest, 1)]
        largest = max(largest, 2)  # one more than there should be, for a moment
        staying = [one for one in old if one not in holders][: largest - 1]
        taking = new[: largest - 1 - len(staying)]
        holders = holders[: largest - len(staying) - len(taking)]
        return [one for one in old if one in holders or one in staying] + taking

    def unsynchronised(self) -> tuple[list[Member], float]:
        """Newcomers of a generation that was lost before they were synchronised, and until when they are waited for:
        they may be building their model for seconds yet. A sync ends in a commit of every rank."""
        old, before = self.old(), self.commits_before
        survivors = [one for one in old if one.id in before]
        others = [one for one in old if one.id not in before and not self.comes(one)]
        if self.finishing or not others or not survivors:
            return [], math.inf
        if not all(
            self.comes(one) and one.commits and one.commits[-1] <= before[one.id] for one in survivors
        ):
            return [], math.inf
        return others, max(one.waiting_s for one in survivors) + UNSYNCHRONISED_S

    def silent_until_s(self, member: Member) -> float:
        """Until when a silent member is waited for; a host whose network is gone takes all its members with it."""
        members = () if self.record is None else map(self.members.__getitem__, self.record.members)
        beside = [one.id for one in members if one.host == member.host]
        return self.detector.silent_s(member.id, any(map(self.detector.is_suspected, beside)), beside)

    def in_question(self) -> set[bytes]:
        """Members of the hosts of whom somebody is silent to others."""
        hosts = {one.host for one in self.members.values() if self.detector.is_asked(one.id)}
        return {one.id for one in self.members.values() if one.host in hosts}

    def first_waits_until_s(self) -> float:
        """Until when the first generation, which could begin, waits for others that are being started; -inf: nobody
        else can come, or there is no room."""
        new, limits = self.newcomers(), self.limits
        enough = len(new) >= limits.size
        if not self.coming() or (limits.largest is not None and len(new) >= limits.largest):
            return -math.inf if enough else math.inf
        return (
            sorted(one.waiting_s for one in new)[limits.size - 1] + FIRST_GENERATION_S if enough else math.inf
        )

    def has_ended(self, id_: bytes) -> bool:
        """For sure, and not only silent."""
        return id_ in self.members and self.members[id_].state in (State.LEFT, State.DEAD)

    def votes(self, here: Iterable[Member]) -> tuple[int, int, bool]:
        """How many of those who may vote are here, how many there are, and whether nobody else can have a majority. Two
        coordinators cannot both have one: who is dead votes for neither."""
        ids = {one.id for one in here}
        voting = [id_ for id_ in self.voters if not self.has_ended(id_)]
        votes = sum(id_ in ids for id_ in voting)
        half = 2 * votes == len(voting) and voting and voting[0] in ids
        return (
            votes,
            len(voting),
            not self.limits.majority or not voting or 2 * votes > len(voting) or bool(half),
        )

    def resets(self) -> int:
        return 0 if self.record is None else self.record.number % (1 << LOW_BITS) - 1


def decide(job: JobState, now: float) -> Decision:
    """About the next generation, while one is formed (since job.forming_since_s)."""
    assert job.forming_since_s is not None
    is_late = now >= job.forming_since_s + job.limits.timeout_s
    unsynchronised, until_s = job.unsynchronised()
    if now >= until_s:
        return Decision(
            "survivors do not wait for newcomers that were not synchronised", released=tuple(unsynchronised)
        )
    old = job.old()
    missing = [one for one in old if not job.comes(one)]
    overdue = tuple(one for one in missing if is_late or now >= job.silent_until_s(one))
    if overdue and not is_late:
        here = [one for one in old if one not in missing]
        if not job.votes(here)[2]:  # nobody is given up by those who may be the ones that are cut off
            return Decision(f"{len(here)} of {len(old)} members are no majority", quorum_lost=True)
        lost_s = job.quorum_lost_since_s
        if lost_s is not None and now >= lost_s + SUSPECT_TIMEOUT_S:
            return Decision("the network is whole again: the others come back one by one", forgiven=overdue)
    if overdue:
        return Decision(
            "it did not come back" if is_late else "nobody has heard of it any more", fenced=overdue
        )
    if missing:
        names = ", ".join(f"{one.host} (slot {one.slot})" for one in missing[:4])
        return Decision(f"{len(missing)} of {len(old)} members have not come yet, as {names}")
    has_state = not job.newest_commit or not old or any(one.commits for one in old)
    if job.record is None or (job.live() and has_state):
        return _form_or_hold(job, now, is_late)
    if job.finishing:
        return Decision("the job is done", drained=tuple(old))
    return _stop(
        1,
        f"nobody is left of those who had the state of the training (generation {job.record.number}): the processes "
        "that wait would begin anew. Start the job again, from its last checkpoint.",
    )


def _form_or_hold(job: JobState, now: float, is_late: bool) -> Decision:
    """Everybody of the last generation is there who will come."""
    ready, limits, first = job.ready(), job.limits, job.record is None
    if not ready:
        return Decision("nobody is there")
    if first and job.too_few:
        return _stop(1, job.too_few)
    wanted = limits.size if first and not is_late else limits.smallest
    if first and not is_late and len(ready) >= wanted and now < job.first_waits_until_s():
        return Decision(f"{len(ready)} processes are there, and others are being started")
    votes, voters, has_quorum = job.votes(ready)
    if not has_quorum:
        text = f"{votes} of {voters} ranks are on this side of a cut network"
        return (
            _stop(
                NO_MEMBER,
                f"{text} after {limits.timeout_s:g} s: the others may be going on, so these end; "
                "HOROCLONE_ELASTIC_QUORUM=any lets every side go on",
            )
            if is_late
            else Decision(text)
        )
    if len(ready) >= wanted or (job.finishing and job.old()):
        if not first and limits.resets is not None and job.resets() >= limits.resets:
            return _stop(1, RESET_LIMIT_TEXT.format(limits.resets))
        return Decision("all who can come are there", members=tuple(ready))
    text = f"{len(ready)} of at least {wanted} processes are there"
    if not is_late:
        return Decision(text)
    here = {one.host for one in ready}
    absent = [one for one in job.expected if one not in here][:8] if first else []
    return _stop(
        1,
        f"{len(ready)} of at least {limits.smallest} processes were there after {limits.timeout_s:g} s"
        f"{', without ' + ', '.join(absent) if absent else ''}; --elastic-timeout (seconds) gives them more time, "
        "--min-np asks for fewer; without a launcher HOROCLONE_ELASTIC_TIMEOUT and HOROCLONE_MIN_NP",
    )


def _stop(code: int, text: str) -> Decision:
    return Decision(text, stop=Stop(code, text))


def record_of(job: JobState, ready: tuple[Member, ...], number: int, nonce: bytes) -> Record:
    """The generation that these form: from which commit they go on, and whose state the others take."""
    ranks = {} if job.record is None else {id_: rank for rank, id_ in enumerate(job.record.members)}
    survivors = [one for one in ready if one.generation]
    held = set.intersection(*(set(one.commits) for one in survivors)) if survivors else set()
    newest = {max(one.commits, default=0) for one in survivors}
    commit, most = max(held, default=0), max(newest, default=0)
    roots = (
        rank
        for rank, one in enumerate(ready)
        if one.generation and (commit or most in (0, *one.commits[-1:]))
    )
    return Record(
        number,
        tuple(one.id for one in ready),
        tuple(one.index for one in ready),
        tuple(ranks.get(one.id, -1) if one.generation else -1 for one in ready),
        commit,
        next(roots, 0),
        len(survivors) == len(ready) and len(newest) == 1 and commit > 0 and commit in newest,
        nonce,
    )
