"""Who is in an elastic job: takes what is heard of members, answers them, and has generations formed (decision.py).

A member is a process named by 16 random bytes. It joins, waits inside init() for a generation that includes it (form),
and comes back for the next one when that generation is lost or when members come or leave. One record describes a
generation to everybody; no number is given to two of them. Pure: no I/O, and every `now` is an argument. Thread: one at
a time (service.py holds a lock).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from horoclone.membership.decision import Decision, JobState, decide, record_of
from horoclone.membership.records import (
    ADDED,
    ID_BYTES,
    LOW_BITS,
    NO_UPDATE,
    NONCE_BYTES,
    REMOVED,
    Evicted,
    Limits,
    Loss,
    Record,
    RescaleNotice,
    Stop,
)
from horoclone.membership.states import NO_MEMBER, Drain, Event, Member, State
from horoclone.membership.timeouts import PROGRESS_S, TOGETHER_S

NEVER = float("inf")


class JoinRejected(Exception):
    """Who asks is not told anything; why."""


class Coordinator(JobState):
    """draw: gives so many random bytes. open_to_all: whether a process that nobody has announced by start() may join;
    its slot is its rank among others that are new, and it takes the place of who had it before. whole_hosts: a member
    that fails takes those on its host with it, as in Horovod. expected: hosts of the first generation, for a text.
    """

    def __init__(
        self,
        limits: Limits,
        draw: Callable[[int], bytes],
        open_to_all: bool = False,
        whole_hosts: bool = False,
        expected: tuple[str, ...] = (),
    ) -> None:
        super().__init__(limits, expected)
        self.open_to_all, self.whole_hosts, self._draw = open_to_all, whole_hosts, draw
        self.build = ""  # of horoclone, as the first member has it that said so
        self.stopped: Stop | None = None
        self.reason = ""  # of the newest decision
        self.fenced: list[bytes] = []  # alive perhaps; whoever started them should end them
        self.term = 0  # the high half of numbers
        self._next_index = 0
        self._handing_over_s: float | None = None  # since when only those who are to leave have the state
        self._notice = RescaleNotice(0, 0, NO_UPDATE)
        self._finishers: tuple[bytes, ...] = ()  # of the generation in which the first has said finished()

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
        member = Member(id_, self._next_index, host, slot, near, planned)
        self.detector.heard(id_, now)
        self._next_index += 1
        self.members[id_] = member
        return member.index

    def join(self, id_: bytes, incarnation: bytes, host: str, slot: int, now: float, build: str = "") -> int:
        """A connection of this member is there. incarnation: drawn by its process. Gives the number of the member."""
        # The ranks would refuse another build, and all of them would end with that.
        if build != self.build and self.build:
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
        self.detector.connected(id_, now)
        return member.index

    def numbers_from(self, index: int) -> None:
        """Members that come get numbers from here on: another coordinator has given the lower ones."""
        self._next_index = max(self._next_index, index)

    def _make_room(self, host: str, slot: int, now: float) -> None:
        """Who started a process at this place anew has seen the end of the one before."""
        for other in [one for one in self.members.values() if (one.host, one.slot) == (host, slot)]:
            speaks = self.detector.is_connected(other.id) and now < self.detector.silent_s(other.id, True)
            if speaks and other.is_live:
                raise JoinRejected(
                    f"another process is {host} (number {slot}) in this job, and it is alive. Are there two of one "
                    "name or number (JOB_COMPLETION_INDEX, HOROCLONE_HOSTNAME), or two jobs behind one service with "
                    "one HOROCLONE_JOB?"
                )
            self.dead(other.id, "another process has its place now", now)

    def heard(self, id_: bytes, now: float) -> None:
        self.detector.heard(id_, now)

    def disconnected(self, id_: bytes, now: float) -> None:
        """One of its connections is gone: it does not hear the answer to form()."""
        member = self.members[id_]
        self.detector.disconnected(id_, now)
        if self.detector.is_lost(id_):
            self._lose(member, "its connections ended")
        self.step(now)

    def suspect(self, number: int, rank: int, now: float, how: Loss = Loss.UNREACHABLE) -> None:
        """A member of this generation has lost another one. Where it is SILENT this coordinator is the second witness:
        those in_question() are to be asked."""
        record = self.record
        if record is None or record.number != number or not 0 <= rank < len(record.members):
            return
        member = self.members[record.members[rank]]
        self.detector.suspect(member.id)
        if how is Loss.ENDED:
            self._lose(member, "its process has ended", Event.ENDED)
        if how is Loss.SILENT and member.is_live:
            self.detector.ask(member.id, now)
        if member.incarnation and self.detector.is_lost(member.id):
            self._lose(member, "its connections ended")
        self.step(now)

    def form(self, id_: bytes, seen: int, commits: Iterable[int], now: float, is_ready: bool = True) -> None:
        """It waits for a generation after `seen`, the newest that it knows (0: none), and holds these commits. Others
        are not interrupted for a newcomer that is not ready."""
        member = self.members[id_]
        after = 0 if seen and seen == member.released else seen
        if member.waits_after != after or member.is_ready != is_ready:
            member.waiting_s = now
        member.is_ready = is_ready
        member.waits_after = after
        if after == 0:
            member.on(Event.ASKS)
        member.commits = tuple(sorted(set(commits)))
        member.has_state = bool(member.commits)
        self.detector.heard(id_, now)
        self.newest_commit = max((self.newest_commit, *member.commits))
        self.step(now)

    def withdraw(self, id_: bytes) -> None:
        """It does not wait any more, or nobody can tell."""
        self.members[id_].waits_after = None
        self.members[id_].on(Event.WITHDRAWS)

    def holds(self, id_: bytes, commit: int) -> bool:
        """A member that trains holds this commit. It is heard of once a second at most. Gives whether it is its first:
        step() may have to do something then."""
        member = self.members[id_]
        if not member.generation or not commit:
            return False
        is_first, member.has_state = not member.has_state, True
        self.newest_commit = max(self.newest_commit, commit)
        return is_first

    def established(self, number: int) -> None:
        """All members of this generation have come to connect: from now on they are those who may vote."""
        if self.record is not None and self.record.number == number:
            self.voters = self.record.members

    # --- who goes

    def announce(self, id_: bytes, reason: str, now: float) -> None:
        """It will leave: the others hear of it at their next commit."""
        self.members[id_].to_drain(Drain.ASKED, reason or "it was asked to leave")
        self.step(now)

    def leave(self, id_: bytes, reason: str, now: float) -> None:
        """It leaves now, as planned."""
        member = self.members[id_]
        member.drain[Drain.ASKED] = reason or member.drain.get(Drain.ASKED) or "it left"
        self._lose(member, f"it left: {member.drain[Drain.ASKED]}", Event.LEAVES)
        self.step(now)

    def dead(self, id_: bytes, text: str, now: float, is_certain: bool = True) -> None:
        """From who knows: its process has ended. is_certain: it was seen, and not only its host was lost."""
        self._lose(self.members[id_], text, Event.ENDED if is_certain else Event.LOST)
        self.step(now)

    def drain_all(self, workers: Mapping[bytes, str], now: float) -> None:
        """They shall go in one generation, each for this reason."""
        for id_, reason in workers.items():
            self.members[id_].to_drain(Drain.UNWANTED, reason)
        self.step(now)

    def displace(self, reasons: Mapping[bytes, str], now: float) -> None:
        """Of all workers: why nobody names the host of each any more; empty: it is there, perhaps again. They go, but
        where only they have the state they stay until others have it, for timeout_s at most."""
        for id_, reason in reasons.items():
            if reason:
                self.members[id_].to_drain(Drain.DISPLACED, reason)
            else:
                self.members[id_].recall()
        self.step(now)

    def expect(self, size: int, why: str, now: float) -> None:
        """No more than so many come to the first generation; why, where that is less than the smallest size."""
        if self.record is None:
            least = self.limits.smallest
            self.limits = self.limits._replace(size=max(least, min(size, self.limits.size)))
            is_short = size < self.limits.size
            self.too_few = f"{size} of at least {least} processes are left: {why}" if is_short else ""
            self.step(now)

    def finish(self, now: float) -> None:
        """A member has done its work: those who have not begun need not any more, and there is no smallest size."""
        self.finishing = True
        self.step(now)

    def finished(self, id_: bytes, now: float) -> None:
        """A member says itself that it has done its work; its process may stay. Nobody does in their place what others
        of its generation had still to do: the job ends with an error when one of them was, or is, lost."""
        member = self.members[id_]
        if not member.is_live:
            return
        if not self._finishers and self.record is not None:
            self._finishers = self.record.members
        self._lose(member, "it has finished", Event.LEAVES)
        self.finish(now)

    def stop(self, code: int, text: str) -> None:
        self.stopped = self.stopped or Stop(code, text)

    def _lose(self, member: Member, text: str, event: Event = Event.LOST) -> None:
        """LOST on one host is ENDED: a connection there ends with its process only."""
        is_near_end = member.near and member.incarnation and not self.detector.is_connected(member.id)
        if member.is_live:
            if event is not Event.LEAVES:
                self._close_host_of(member)
            member.gone = text
            if event is Event.LOST and is_near_end:
                event = Event.ENDED
        member.on(event)

    def _close_host_of(self, failed: Member) -> None:
        """Those beside it go in the same generation: they must not be in one more, and leave in the next."""
        live = self.live()
        if self.whole_hosts and failed in live and failed.state is not State.DRAINING and not self.finishing:
            for one in live:
                if one.host == failed.host and one is not failed and Drain.UNWANTED not in one.drain:
                    text = f"host {one.host} is not used any more: a process failed there"
                    one.to_drain(Drain.UNWANTED, text)

    # --- what is known of members

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

    def is_handing_over(self) -> bool:
        """Whether those who are to leave go on for the time being: nobody else has the state."""
        return bool(self.last_holders())

    # --- what members are told

    def answer(self, id_: bytes) -> Record | Evicted | Stop | None:
        """To form(); None: it has to wait."""
        member = self.members[id_]
        if member.waits_after is None:
            return None
        record = self.record
        if self.stopped is not None:
            return self.stopped
        if not member.is_live:
            return Evicted(member.out_code, member.gone)
        if record is not None and member.generation == record.number and member.waits_after < record.number:
            return record
        if member.waits_after != member.generation:
            text = f"generation {member.waits_after} is over, and it was not in the last one"
            return Evicted(NO_MEMBER, text)
        if member.state is State.DRAINING and member not in self.old():
            return Evicted(0, member.leave_reason)
        if self.finishing and not member.generation:
            return Evicted(0, "the job is done")
        return None

    def notice(self) -> RescaleNotice:
        """The newest; seq 0: there has been none."""
        return self._notice

    def next_s(self) -> float:
        """When step() has something to do that only time brings."""
        if self.stopped is not None:
            return NEVER
        due = [NEVER]
        if self.forming_since_s is not None:
            due += [self.forming_since_s + self.limits.timeout_s, self.unsynchronised()[1]]
            if self.record is None:
                due.append(self.first_waits_until_s())
            if self.quorum_lost_since_s is None:
                due += [self.silent_until_s(one) for one in self.old() if not self.comes(one)]
                due.append(self.detector.look_s())
        elif self.record is not None:
            due += [one.waiting_s + TOGETHER_S for one in self.fed()]
        if self._handing_over_s is not None:
            due.append(self._handing_over_s + self.limits.timeout_s)
        return min(due)

    # --- the machine

    def step(self, now: float) -> None:
        """Forms a generation when all for it is there, gives up who does not come, finds what to announce."""
        self._watch_hand_over(now)
        self._watch_finish()
        if self.stopped is not None:
            return
        if not self.is_forming():
            self.forming_since_s = None
            self._look_for_news(now)
            return
        if self.forming_since_s is None:
            self.forming_since_s = now
        while self._apply(decide(self, now), now):
            pass

    def _apply(self, decision: Decision, now: float) -> bool:
        """Whether something has changed about which decide() is to be asked again."""
        self.reason = decision.reason
        if not decision.quorum_lost:
            self.quorum_lost_since_s = None
        elif self.quorum_lost_since_s is None:
            self.quorum_lost_since_s = now
        for one in decision.released:
            one.released, one.generation, one.waits_after = one.generation, 0, None
            one.on(Event.RELEASED)
        for one in decision.forgiven:
            self.detector.heard(one.id, now)
        for one in decision.fenced:
            self._lose(one, f"{decision.reason} (generation {one.generation})")
            if not self.limits.majority:  # else by _form: it may be we who are cut off
                self.fenced.append(one.id)
        for one in decision.drained:
            one.to_drain(Drain.UNWANTED, decision.reason)
        if decision.stop is not None:
            self.stop(*decision.stop)
        if decision.members:
            self._form(decision.members)
        return bool(decision.released or decision.forgiven or decision.fenced)

    def next_number(self) -> int:
        """Of the generation after the newest."""
        newest = 0 if self.record is None else self.record.number
        return (self.term << LOW_BITS) | ((newest + 1) % (1 << LOW_BITS))

    def _form(self, members: tuple[Member, ...]) -> None:
        before, number = self.record, self.next_number()
        self.record = record_of(self, members, number, self._draw(NONCE_BYTES))
        self.commits_before = {one.id: max(one.commits, default=0) for one in members if one.generation}
        for one in members:
            if not one.generation:
                one.commit_before = self.newest_commit
            one.generation, one.released = number, 0
            self.detector.trust(one.id)
            one.on(Event.ADMITTED)
        if self.limits.majority and before is not None:
            self.fenced += [id_ for id_ in before.members if self.members[id_].state is State.FENCED]
        self.detector.ask_nobody()
        if len(members) == 1:
            self.established(number)  # it meets nobody
        self.forming_since_s = None

    def _watch_hand_over(self, now: float) -> None:
        """Ends the job where those who are to leave have waited for too long for others, who would take the state."""
        holders = self.last_holders()
        if not holders:
            self._handing_over_s = None
            return
        self._handing_over_s = now if self._handing_over_s is None else self._handing_over_s
        limit_s = self.limits.timeout_s
        if now >= self._handing_over_s + limit_s:
            self.stop(
                1,
                f"{holders[0].leave_reason}, and for {limit_s:g} s nobody came to whom the state of the training could "
                "be handed over; --elastic-timeout (seconds) waits longer",
            )

    def _watch_finish(self) -> None:
        for rank, one in enumerate(map(self.members.__getitem__, self._finishers)):
            if one.state in (State.FENCED, State.DEAD) and Drain.ASKED not in one.drain:
                self.stop(
                    1,
                    f"{one.host}, slot {one.slot}: rank {rank} had not finished when others had: {one.gone}",
                )

    def _look_for_news(self, now: float) -> None:
        """While a generation runs: is another one wanted?"""
        if self.record is None:
            return
        update, holders, new = NO_UPDATE, self.last_holders(), self.fed()
        going = [one for one in self.live() if one.state is State.DRAINING]
        if going and not holders:
            update |= REMOVED
        largest = self.limits.largest
        has_room = largest is None or len(self.live()) - len(going) < largest
        others_come = self.coming() or len(new) < len(self.newcomers())
        if new and has_room and (not others_come or now >= min(one.waiting_s for one in new) + TOGETHER_S):
            update |= ADDED | (REMOVED if holders else NO_UPDATE)
        last, wanted = self._notice, self.next_number()
        if update and (last.wanted, last.update) != (wanted, update):
            self._notice = RescaleNotice(last.seq + 1, wanted, update)
