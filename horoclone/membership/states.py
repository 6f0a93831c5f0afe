"""The states of a member of an elastic job, and the one table of what changes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

NO_MEMBER = 75  # EX_TEMPFAIL: exit code of a process that the others go on without


class State(Enum):
    """docs/decisions/membership.md has the picture."""

    STARTING = "its process was started, and does not ask for a generation"
    JOINING = "it asks for its first generation"
    ACTIVE = "a generation holds it"
    DRAINING = "it is to leave"
    LEFT = "it has left as planned"
    FENCED = "the others go on without it; its process may live"
    DEAD = "its process has ended for sure"


class Event(Enum):
    ASKS = "it asks for its first generation"
    WITHDRAWS = "it asks no more"
    ADMITTED = "a generation was formed with it"
    RELEASED = "its generation was lost before it was synchronised: it comes again, as a newcomer"
    DRAINED = "there is a reason why it is to leave"
    LEAVES = "it says goodbye"
    LOST = "the others have lost it"
    ENDED = "somebody has seen the end of its process"


class Drain(Enum):
    """Why a member is to leave."""

    ASKED = "it was asked to, or wants to"
    UNWANTED = "its host is not to be used any more"
    DISPLACED = "nobody names its host any more: that may be a mistake, and it is there"


LIVE = (State.STARTING, State.JOINING, State.ACTIVE, State.DRAINING)

# What is not here changes nothing.
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.ASKS): State.JOINING,
    (State.JOINING, Event.WITHDRAWS): State.STARTING,
    (State.JOINING, Event.ADMITTED): State.ACTIVE,
    (State.ACTIVE, Event.RELEASED): State.STARTING,
    **{(state, Event.DRAINED): State.DRAINING for state in LIVE},
    **{(state, Event.LEAVES): State.LEFT for state in LIVE},
    **{(state, Event.LOST): State.FENCED for state in LIVE},
    **{(state, Event.ENDED): State.DEAD for state in LIVE},
    (State.FENCED, Event.LEAVES): State.DEAD,
    (State.FENCED, Event.ENDED): State.DEAD,
}


@dataclass(eq=False)
class Member:
    """One process. generation: the newest that holds it; 0: none yet. order: the rank it has among newcomers."""

    id: bytes
    index: int
    host: str
    slot: int
    near: bool = False  # on the coordinator's own host, where no network is between
    order: int = 0
    state: State = State.STARTING
    incarnation: bytes = b""  # of the process that has joined; empty: not yet
    addresses: str = ""  # where it would be the coordinator itself (failover.py)
    generation: int = 0
    released: int = 0  # the generation of which RELEASED tells
    waits_after: int | None = None  # it is in form(), and this is the generation that it has seen last
    waiting_s: float = 0.0  # since when
    is_ready: bool = True  # as a newcomer: it is not being given the commit of the others
    commits: tuple[int, ...] = ()
    has_state: bool = False  # it holds a commit
    commit_before: int = 0  # the newest of the job when it came into its first generation
    drain: dict[Drain, str] = field(default_factory=dict)  # in words
    gone: str = ""  # why it is not LIVE

    def on(self, event: Event) -> None:
        self.state = TRANSITIONS.get((self.state, event), self.state)

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def out_code(self) -> int:
        """With which its process ends, where it can be told."""
        return NO_MEMBER if self.state in (State.FENCED, State.DEAD) else 0

    @property
    def leave_reason(self) -> str:
        return next((self.drain[why] for why in Drain if why in self.drain), "")

    def to_drain(self, why: Drain, text: str) -> None:
        self.drain[why] = text
        self.on(Event.DRAINED)

    def recall(self) -> None:
        """Its host is named again. Where there is no other reason to leave, it is what it was."""
        if (
            self.drain.pop(Drain.DISPLACED, None) is not None
            and self.state is State.DRAINING
            and not self.drain
        ):
            asks = State.JOINING if self.waits_after == 0 else State.STARTING
            self.state = State.ACTIVE if self.generation else asks

    def planned_end(self) -> str:
        """Why its process may have ended with 0 without having done its work; empty: it has done it."""
        came_too_late = self.waits_after == 0 and not self.generation
        return self.leave_reason or ("it came too late" if came_too_late else "")
