"""The membership coordinator of the workers that a driver starts: in which generation of the job each is, and what it
needs for that.

Who is in is decided here as in a job of horoclonerun: by membership/coordinator.py, and nowhere else. Thread: any.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from horoclone.bootstrap.rendezvous import Server
from horoclone.bootstrap.wire import routable_addresses
from horoclone.launch.environment import rank_variables
from horoclone.launch.hosts import Placement
from horoclone.membership.coordinator import ID_BYTES, NO_MEMBER, Limits
from horoclone.membership.service import MembershipService
from horoclone.runner.common.util.hosts import SlotInfo

MOST_RANKS = 1 << 15
_HERE_ONLY = {"localhost", "127.0.0.1"}

Key = tuple[str, int]  # host, local rank


def rendezvous_addresses(hosts: Iterable[str]) -> list[str]:
    """Where a server for workers of these hosts listens."""
    if set(hosts) <= _HERE_ONLY:
        return ["127.0.0.1"]
    found = routable_addresses("")
    return [one for one in found if not one.startswith("127.")] or found


class _Service(MembershipService):
    """Tells of members that the others have lost at once, and not with the next generation: one that nobody has missed
    yet may have ended with them, and the generation would wait for it."""

    def newly_gone(self) -> list[tuple[int, str]]:
        with self.mutex:
            found = super().newly_gone()
            if found:
                self.tell()
            return found


class Generations:
    """stopped(text): called once, on a thread of the server, when the membership coordinator ends the job. changed():
    called there, with the service's mutex held, when there is another generation, or something else that is new."""

    def __init__(
        self,
        limits: Limits,
        hosts: Iterable[str],
        stopped: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout_s = limits.timeout_s
        self._stopped: Callable[[str], None] | None = stopped
        self._changed = changed
        self._service = _Service(limits, secrets.token_bytes)
        self._service.tell = self._look
        self._job, self._secret = secrets.token_hex(8), secrets.token_hex(32)
        self._server = Server(
            self._secret.encode(), self._job, MOST_RANKS, rendezvous_addresses(hosts), self._service
        )
        self._ids: dict[Key, bytes] = {}  # guarded by the service's mutex: whose process runs there
        # Worker -> its member, when it began and when it ended; guarded likewise.
        self._unjudged: dict[int, tuple[bytes, float, float]] = {}

    def variables(self, slot: SlotInfo) -> dict[str, str]:
        """What hvd.init() of a worker that is started there needs, once for each worker; the secret is among it."""
        id_ = secrets.token_bytes(ID_BYTES)
        with self._service.mutex:
            # Each worker's own thread calls this, in any order: the plan says which rank is whose.
            self._service.coordinator.start(
                id_, slot.hostname, slot.local_rank, time.monotonic(), planned=slot.rank
            )
            self._ids[slot.hostname, slot.local_rank] = id_
        place = Placement(
            slot.rank,
            slot.size,
            slot.local_rank,
            slot.local_size,
            slot.cross_rank,
            slot.cross_size,
            slot.hostname,
        )
        timeout = f"{self._timeout_s:g}"
        return rank_variables(place, ",".join(self._server.addresses), self._job) | {
            "HOROCLONE_SECRET": self._secret,
            "HOROCLONE_SECRET_FD": "",  # of a job in which this driver itself may be a rank
            "HOROCLONE_MEMBER": id_.hex(),
            "HOROCLONE_ELASTIC": "1",
            "HOROVOD_ELASTIC": "1",
            "HOROCLONE_ELASTIC_TIMEOUT": timeout,
            "HOROVOD_ELASTIC_TIMEOUT": timeout,
        }

    def knows(self, key: Key) -> bool:
        """Whether the worker there has been given its variables, and has not ended."""
        with self._service.mutex:
            return key in self._ids

    def ended(self, key: Key, code: int, without: Iterable[Key] = ()) -> tuple[bool, int]:
        """The worker there has ended. without: whom the others go on without because of it.

        Gives whether it left as planned, and how many of the newest generation are left, -1 before the first one.
        """
        now = time.monotonic()
        with self._service.mutex:
            coordinator = self._service.coordinator
            member = coordinator.members[self._ids.pop(key)]
            came_too_late = member.waits_after == 0 and not member.generation
            is_planned = code == 0 and bool(member.leaving or member.unwanted or came_too_late)
            if code == 0 and not is_planned:
                coordinator.finish(now)
            self.drain(without, f"a worker of its host failed (exit code {code})")
            coordinator.dead(member.id, f"it ended with exit code {code}", now)
            left = len(coordinator.live()) if coordinator.record is not None else -1
        self._server.ring()
        return is_planned, left

    def judge_later(self, key: Key, worker: int, since_s: float) -> None:
        """Call it before ended(). worker: the caller's number of the worker there, whose process began at since_s
        (monotonic); take_judged() will name it."""
        with self._service.mutex:
            self._unjudged[worker] = self._ids[key], since_s, time.monotonic()

    def take_judged(self) -> dict[int, bool]:
        """Worker of judge_later() -> whether the job did something with it; each once, as soon as that is known.

        While the ranks train they say at most once a second which commit they have; those of a worker that was lost
        say it when they form the next generation."""
        with self._service.mutex:
            coordinator, known = self._service.coordinator, {}
            for worker, (id_, since_s, ended_s) in list(self._unjudged.items()):
                progressed = coordinator.has_progressed(id_, since_s, ended_s)
                if progressed or coordinator.is_told(id_):
                    known[worker] = progressed
                    del self._unjudged[worker]
            return known

    def take_fenced(self) -> set[Key]:
        """Workers that the others go on without though nobody has seen them end; each once. They are to be ended."""
        with self._service.mutex:
            fenced, self._service.coordinator.fenced = set(self._service.coordinator.fenced), []
            return {key for key, id_ in self._ids.items() if id_ in fenced}

    def lost(self) -> dict[Key, str]:
        """Workers whose connections the others have seen end, with what is known, whose ends nobody has told yet."""
        with self._service.mutex:
            members = {key: self._service.coordinator.members[id_] for key, id_ in self._ids.items()}
            return {key: one.gone for key, one in members.items() if one.out_code == NO_MEMBER}

    def drain(self, keys: Iterable[Key], reason: str) -> None:
        """The workers there leave at their next commit."""
        with self._service.mutex:
            known = {self._ids[key]: reason for key in keys if key in self._ids}
            self._service.coordinator.drain_all(known, time.monotonic())
        self._server.ring()

    def displace(self, reasons: Mapping[Key, str]) -> None:
        """Of all workers: why its place is not named any more; empty: it is. See Coordinator.displace."""
        with self._service.mutex:
            known = {self._ids[key]: reason for key, reason in reasons.items() if key in self._ids}
            self._service.coordinator.displace(known, time.monotonic())
        self._server.ring()

    def expect(self, size: int) -> None:
        """So many are waited for at most before the first generation."""
        with self._service.mutex:
            coordinator = self._service.coordinator
            coordinator.expect(max(size, coordinator.limits.smallest), "", time.monotonic())
        self._server.ring()

    def is_finishing(self) -> bool:
        """Whether a worker has done its work."""
        with self._service.mutex:
            return self._service.coordinator.finishing

    def slots(self) -> list[SlotInfo]:
        """The places of the newest generation by rank; empty before the first one."""
        with self._service.mutex:
            record = self._service.coordinator.record
            members = (
                [] if record is None else [self._service.coordinator.members[id_] for id_ in record.members]
            )
            keys = [(one.host, one.slot) for one in members]
        found = []
        for rank, (host, local_rank) in enumerate(keys):
            beside = [one for _, one in sorted(key for key in keys if key[0] == host)]
            across = list(dict.fromkeys(name for name, one in keys if one == local_rank))
            found.append(
                SlotInfo(host, rank, local_rank, across.index(host), len(keys), len(beside), len(across))
            )
        return found

    def close(self, reason: str) -> None:
        """Whoever still waits for a generation is told that the job has ended."""
        with self._service.mutex:
            self._stopped = None
            self._service.coordinator.stop(1, reason)
        self._server.ring()
        time.sleep(0.05)  # the answers are on their way
        self._server.close()

    def _look(self) -> None:
        """On the server's thread, with the service's mutex held."""
        self._changed()
        stopped, tell = self._service.coordinator.stopped, self._stopped
        if stopped is not None and tell is not None:
            self._stopped = None
            tell(stopped.text)
