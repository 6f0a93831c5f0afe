"""Decides who should run where in an elastic job, and which hosts and slots are closed (blacklisted) after failures.

Pure: hosts, exits and time come in, what to start and to end comes out. A slot is a place on a host for one worker. A
worker that fails costs its slot a strike; too many in a row without progress close the slot, for some time or for ever,
and a closed slot gets no worker.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from horoclone.launch.hosts import Host
from horoclone.launch.usage import counted

STRIKES = 3  # failures in a row without progress before a slot is closed
LEFT_S = 60.0  # that a slot is not used after its worker left on notice: its host is expected to go
LONGEST_COOLDOWN_S = 3600
FREE_RESTARTS = 2  # of a slot without a pause; then 1 s, 2 s, 4 s, until a worker was there for STEADY_S
LONGEST_PAUSE_S = 60.0
STEADY_S = 10.0


class Cooldown:
    """How long something stays closed: as Horovod's --blacklist-cooldown-range. None: for ever.

    ValueError unless 1 <= lower <= upper <= 3600 (seconds).
    """

    def __init__(self, bounds: tuple[int, int] | None, uniform: Callable[[], float] = random.random) -> None:
        if bounds is not None:
            lower, upper = bounds
            if lower < 1:
                raise ValueError(f"a cooldown of {lower} s: its lower limit must be at least 1")
            if upper > LONGEST_COOLDOWN_S:
                raise ValueError(
                    f"a cooldown of {upper} s: its upper limit must be at most {LONGEST_COOLDOWN_S}"
                )
            if upper < lower:
                raise ValueError(f"a cooldown from {lower} to {upper} s: the first must not be larger")
        self.bounds, self._uniform = bounds, uniform

    def delay_s(self, count: int) -> float:
        """The count-th time (from 1): lower * 2^count, and up to `lower` more so that not all come back at once."""
        if self.bounds is None:
            return math.inf
        lower, upper = self.bounds
        return max(lower, min(upper, lower * 2.0 ** min(count, 32) + self._uniform() * lower))


class Plan(NamedTuple):
    """largest: None for every slot there is. spares: workers beyond that, who wait in init().

    whole_host: Horovod's rule, one failed slot closes its host.
    """

    smallest: int
    largest: int | None
    spares: int = 0
    whole_host: bool = False


class Place(NamedTuple):
    """A slot: number is that of the whole job, in the order in which slots were first seen."""

    host: str
    local: int
    number: int


class _Slot:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.worker: int | None = None
        self.strikes = 0
        self.closures = 0
        self.closed_until = -math.inf
        self.used = False
        self.began_s = -math.inf  # its newest worker
        self.restarts = 0  # in a row, after failures shortly after the start
        self.paused_until = -math.inf


class Policy:
    """worker: the launcher's number of a process; each is started once."""

    def __init__(self, plan: Plan, cooldown: Cooldown) -> None:
        self._plan, self._cooldown = plan, cooldown
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._of: dict[int, _Slot] = {}
        self._unjudged: dict[int, _Slot] = {}  # of workers that have failed
        self._hosts: list[Host] = []
        self._identities: dict[tuple[str, str], str] = {}  # host, kind -> identity

    # --- what happens

    def found(self, hosts: Sequence[Host]) -> dict[int, str]:
        """The hosts that there are now. Those known already keep their order and come first. Gives the workers whose
        place is gone, with the reason: of a host that shrinks those in its highest slots."""
        now = {host.name: host.slots for host in hosts}
        known = [host.name for host in self._hosts if host.name in now]
        order = known + [host.name for host in hosts if host.name not in known]
        self._hosts = [Host(name, now[name]) for name in dict.fromkeys(order)]
        for host in self._hosts:
            for local in range(host.slots):
                if (host.name, local) not in self._slots:
                    self._slots[host.name, local] = _Slot(Place(host.name, local, len(self._slots)))
        lost = {}
        for worker, slot in self._of.items():
            host_name, local, _ = slot.place
            if local >= now.get(host_name, 0):
                lost[worker] = (
                    f"host {host_name} has {counted(now[host_name], 'slot')} now"
                    if host_name in now
                    else (f"host {host_name} is not there any more")
                )
        return lost

    def seen_as(self, host: str, kind: str, identity: str) -> bool:
        """What tells the machine behind this name from another. Where it differs from the one before, the host is a new
        identity, and nothing that failed counts. Gives whether that opened a slot or forgave a failure."""
        before = self._identities.get((host, kind))
        self._identities[host, kind] = identity
        if before in (None, identity):
            return False
        for other in [key for key in self._identities if key[0] == host and key[1] != kind]:
            del self._identities[other]  # they were the other machine's
        slots = [slot for slot in self._slots.values() if slot.place.host == host]
        matters = any(slot.strikes or slot.closures or slot.closed_until > -math.inf for slot in slots)
        for slot in slots:
            slot.strikes = slot.closures = slot.restarts = 0
            slot.closed_until = slot.paused_until = -math.inf
        return matters

    def closed_hosts(self, now: float) -> list[str]:
        """Hosts with a slot that is not used for a time or for ever."""
        return list(dict.fromkeys(slot.place.host for slot in self._present() if slot.closed_until > now))

    def started(self, worker: int, place: Place, now: float = -math.inf) -> None:
        slot = self._slots[place.host, place.local]
        slot.worker, slot.used, slot.began_s = worker, True, now
        self._of[worker] = slot

    def failed(self, worker: int, has_progressed: bool | None, now: float) -> tuple[str, list[int]]:
        """The worker has failed. has_progressed: the job did something with it; None: judged() will say. Gives a text
        if this closes something, and the workers that shall go with it."""
        slot = self._ended(worker)
        pause = self._pause(slot, now)
        if has_progressed is None and not self._plan.whole_host:
            self._unjudged[worker] = slot
            return pause, []
        text, others = self._strike(slot, bool(has_progressed), now)
        return text or pause, others

    def _pause(self, slot: _Slot, now: float) -> str:
        """A slot that fails again and again gets its next worker after a while. A text the first time."""
        slot.restarts = 1 if now - slot.began_s >= STEADY_S else slot.restarts + 1
        pauses = slot.restarts - FREE_RESTARTS
        if pauses < 1:
            return ""
        slot.paused_until = now + min(LONGEST_PAUSE_S, 2.0 ** min(pauses - 1, 32))
        if pauses > 1:
            return ""
        return (
            f"slot {slot.place.local} of host {slot.place.host} has failed {slot.restarts} times, each time shortly "
            f"after its start: from now on a new worker comes after a pause, which doubles up to {LONGEST_PAUSE_S:g} s"
        )

    def judged(self, worker: int, has_progressed: bool, now: float) -> tuple[str, list[int]]:
        """Of a worker whose failure was not judged yet, as failed()."""
        slot = self._unjudged.pop(worker, None)
        return self._strike(slot, has_progressed, now) if slot is not None else ("", [])

    def _strike(self, slot: _Slot, has_progressed: bool, now: float) -> tuple[str, list[int]]:
        slot.strikes = 1 if has_progressed else slot.strikes + 1
        if self._plan.whole_host:
            return self._close(
                [one for one in self._slots.values() if one.place.host == slot.place.host], now
            )
        if slot.strikes < STRIKES:
            return "", []
        return self._close([slot], now)

    def _close(self, slots: list[_Slot], now: float) -> tuple[str, list[int]]:
        open_ones = [slot for slot in slots if slot.closed_until <= now]
        delay_s = 0.0
        for slot in open_ones:  # what is closed already stays so no longer
            slot.closures += 1
            slot.strikes = 0
        if open_ones:
            delay_s = self._cooldown.delay_s(max(slot.closures for slot in open_ones))
        for slot in open_ones:
            slot.closed_until = now + delay_s
        host = slots[0].place.host
        what = f"host {host}" if self._plan.whole_host else f"slot {slots[0].place.local} of host {host}"
        how_long = "" if delay_s == math.inf else f" for {delay_s:.0f} s"
        why = "a worker on it has failed" if self._plan.whole_host else "too many failures"
        text = f"{what} is not used any more{how_long}: {why}" if open_ones else ""
        return text, [slot.worker for slot in slots if slot.worker is not None]

    def left(self, worker: int, now: float) -> None:
        """The worker has left as planned."""
        slot = self._ended(worker)
        slot.closed_until = max(slot.closed_until, now + LEFT_S)

    def going(self, host: str, now: float) -> list[int]:
        """The host says that it is about to go: nobody is started there for a while. Gives its workers."""
        slots = [slot for slot in self._slots.values() if slot.place.host == host]
        for slot in slots:
            slot.closed_until = max(slot.closed_until, now + LEFT_S)
        return [slot.worker for slot in slots if slot.worker is not None]

    def done(self, worker: int) -> None:
        """The worker has ended, and nothing follows from it."""
        self._ended(worker)

    def _ended(self, worker: int) -> _Slot:
        slot = self._of.pop(worker)
        slot.worker = None
        return slot

    # --- what follows

    def hosts(self) -> list[str]:
        return [host.name for host in self._hosts]

    def to_start(self, now: float, room: Mapping[str, int] | None = None) -> list[Place]:
        """The places where a worker shall be started now, in the order of hosts.

        room: host -> how many more processes it can take now, where a scheduler says so.
        """
        slots = self._present()
        running = sum(1 for slot in slots if slot.worker is not None)
        largest = len(slots) if self._plan.largest is None else self._plan.largest + self._plan.spares
        free = [slot for slot in slots if slot.worker is None]
        ready = [slot for slot in free if max(slot.closed_until, slot.paused_until) <= now]
        if room is not None:
            beside = Counter[str]()  # on each host, those before in the list
            fits = []
            for slot in ready:
                if beside[slot.place.host] < room.get(slot.place.host, 0):
                    beside[slot.place.host] += 1
                    fits.append(slot)
            ready = fits
        return [slot.place for slot in ready[: max(0, largest - running)]]

    def next_s(self, now: float) -> float:
        """When a slot that is closed, or pauses, is used again."""
        free = [slot for slot in self._present() if slot.worker is None]
        due = [max(slot.closed_until, slot.paused_until) for slot in free]
        return min((at for at in due if at > now), default=math.inf)

    def can_reach_smallest(self) -> bool:
        """Whether enough slots are, or will some time be, of use."""
        return self.usable() >= self._plan.smallest

    def usable(self) -> int:
        """How many slots are, or will some time be, of use."""
        return sum(one.closed_until < math.inf for one in self._present())

    def all_have_failed(self) -> bool:
        """Whether every slot that was used has had a failure."""
        used = [slot for slot in self._present() if slot.used]
        return all(slot.strikes or slot.closures for slot in used)

    def _present(self) -> list[_Slot]:
        return [self._slots[host.name, local] for host in self._hosts for local in range(host.slots)]

    def sharing(self, place: Place) -> tuple[int, int, int]:
        """(slots of its host, which host of those that have this local slot, how many those are)."""
        hosts = [host for host in self._hosts if host.slots > place.local]
        names = [host.name for host in hosts]
        slots = next((host.slots for host in hosts if host.name == place.host), place.local + 1)
        return slots, names.index(place.host) if place.host in names else 0, max(1, len(names))
