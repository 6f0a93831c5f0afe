"""A failover that begins without a launcher: processes behind a service (service.py) find their coordinator by
themselves.

Who comes asks everybody whom the service's name leads to. One of them may be the coordinator of the job; where all say
that they are in no job yet, process 0 becomes its first coordinator. It waits for HOROCLONE_SIZE processes, and looks
again and again whether there is another coordinator after all: its own view of the service may be older than the job.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping

from horoclone import errors
from horoclone.bootstrap import service, wire
from horoclone.bootstrap.client import CONNECT_S
from horoclone.membership import snapshot
from horoclone.membership.client import (
    ABSENT,
    FOREIGN,
    FRESH,
    HEARS,
    REFUSES,
    SILENT,
    Identity,
    MembershipClient,
)
from horoclone.membership.failover import Failover, ask_all
from horoclone.membership.records import Assignment, Limits
from horoclone.membership.timeouts import COORDINATOR_TIMEOUT_S, HAND_OVER_S, LOOK_EVERY_S, REFUSED_S


class PeerDiscovery(Failover):
    """Thread: as Failover. trouble: what the last look has found, for people."""

    def __init__(
        self, who: Identity, place: service.Place, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._place, self._port = place, place.port(environ)
        self._bounds = service.bounds_of(place, environ)
        bindings = service.bindings(self._port, environ)
        try:
            super().__init__(who, bindings, snapshot.MAX_MEMBERS, say, open_to_all=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise errors.Unsupported(
                f"port {self._port} is in use on host {place.host}; is another process of this job running here? "
                "HOROCLONE_PORT (the same for all processes) chooses another one."
            ) from error
        # The port is the same everywhere, so on another host the loopback address would lead to that host itself.
        others = tuple(one for one in self.who.own if not one.startswith("127."))
        self.who = self.who._replace(own=others or self.who.own)
        self._standby.state = FRESH
        self._standby.tell = self._relax
        self._silent_since: dict[str, float] = {}
        self._refused_since = 0.0
        self.trouble = ""

    def learn(self, assignment: Assignment) -> None:
        super().learn(assignment)
        if self._standby.state == FRESH:
            self._standby.state = HEARS

    def _look_around(self) -> bool | None:
        try:
            answers, link = self._ask_everybody()
        except OSError as error:
            self.trouble = f"{self._place.service}: {error.strerror or error}"
            return False
        if link is not None:
            self._move(link, tuple(link.addresses))
            return True
        if not self._place.is_first:
            self._see_whether_refused(answers)
            self.trouble = self._told_by(answers, f"{self._place.first} is to begin it")
            return False
        doubtful = self._doubtful(answers)
        if doubtful:
            self.trouble = self._told_by(doubtful, "somebody may know another membership coordinator")
            return False
        self._found()
        return True

    def _ask_everybody(self) -> tuple[dict[str, int | None], MembershipClient | None]:
        """What each address behind the service has said, and a connection to the coordinator where one of them is it.

        OSError when the resolver does not tell the addresses.
        """
        addresses = [wire.format_address(one, self._port) for one in service.addresses(self._place.service)]
        links = {
            one: MembershipClient(self.who._replace(addresses=(one,)), CONNECT_S, shows=False)
            for one in addresses
            if one not in self.who.own
        }
        answers, found = ask_all(links)
        refusing = next((one for one, state in answers.items() if state == REFUSES), None)
        best = found or refusing  # who is refused hears the reason when it asks for a generation
        return answers, None if best is None else links[best]

    def _told_by(self, answers: dict[str, int | None], what: str) -> str:
        words = {ABSENT: "nobody listens", FOREIGN: "refuses us", SILENT: "no answer", FRESH: "waits as well"}
        who = ", ".join(f"{one} ({words.get(state or 0, 'is in a job')})" for one, state in answers.items())
        job, name = self._place.job, self._place.service
        return f"behind {name} no membership coordinator of job {job!r} is seen, {what}; there are: {who or 'none'}"

    def _see_whether_refused(self, answers: dict[str, int | None]) -> None:
        """Unsupported when process 0 of this very job has refused us for a while."""
        refused = False
        if FOREIGN in answers.values():
            try:
                firsts = service.addresses(self._place.first)
            except OSError:
                firsts = []
            refused = any(answers.get(wire.format_address(one, self._port)) == FOREIGN for one in firsts)
        now = time.monotonic()
        self._refused_since = (self._refused_since or now) if refused else 0.0
        if refused and now - self._refused_since >= REFUSED_S:
            raise errors.Unsupported(
                f"{self._place.first}:{self._port} refuses this process: it has another secret "
                f"(HOROCLONE_SECRET_FILE), or is of another job than {self._place.job!r} (HOROCLONE_JOB). Are two jobs "
                "behind one service?"
            )

    def _doubtful(self, answers: dict[str, int | None]) -> dict[str, int | None]:
        """Those who may be in a job, or know of one. Who stays silent is the address of a pod that is gone."""
        now = time.monotonic()
        self._silent_since = {
            one: self._silent_since.get(one, now) for one, state in answers.items() if state == SILENT
        }
        return {
            one: state
            for one, state in answers.items()
            if state not in (ABSENT, FRESH, FOREIGN)
            and not (state == SILENT and now - self._silent_since[one] >= COORDINATOR_TIMEOUT_S)
        }

    def _found(self) -> None:
        """More than half of the processes have to come at first: of a cut network only one side can begin."""
        place, bounds = self._place, self._bounds
        least = max(bounds.smallest, place.size // 2 + 1) if bounds.majority else bounds.smallest
        limits = Limits(place.size, least, bounds.largest, bounds.timeout_s, None, bounds.majority)
        self._standby.found(limits, tuple(place.host_of(index) for index in range(place.size)))
        self._server.wake()
        link = MembershipClient(self.who._replace(addresses=self.who.own), CONNECT_S, shows=False)
        link.reach(CONNECT_S)
        self._move(link, self.who.own)

    def _relax(self) -> None:
        """The first generation is there: from now on it is the user's smallest number that counts."""
        coordinator = self._standby.coordinator
        if coordinator.record is not None and coordinator.limits.smallest != self._bounds.smallest:
            coordinator.limits = coordinator.limits._replace(smallest=self._bounds.smallest)

    def look_again(self) -> None:
        """While the first generation is not there: is somebody in a job of which this coordinator has not known?"""
        with self._standby.mutex:
            waits = self._standby.is_coordinator and self._standby.coordinator.record is None
        if not waits:
            return
        try:
            answers, link = self._ask_everybody()
        except OSError:
            return
        if link is not None:
            link.close()
        if any(state not in (ABSENT, FRESH, FOREIGN, SILENT) for state in answers.values()):
            self._say(
                "another process behind the service is in this job already; this one looks for its membership "
                "coordinator"
            )
            self._standby.give_up(FRESH)
            self._server.wake()

    def hand_over(self) -> None:
        """A coordinator that ends waits, for a while, until the others have formed a generation without it: then all of
        them know the same, and one of them goes on as the coordinator."""
        if not self._standby.is_coordinator:
            return
        deadline = time.monotonic() + HAND_OVER_S
        with self._standby.mutex:
            coordinator = self._standby.coordinator
            if self.who.id in coordinator.members:
                coordinator.dead(self.who.id, "its process has ended", time.monotonic())
        self._server.wake()
        while time.monotonic() < deadline:
            with self._standby.mutex:
                others = [
                    one
                    for one in coordinator.live()
                    if one.id != self.who.id and coordinator.detector.is_connected(one.id)
                ]
                record = coordinator.record
                is_settled = record is None or (
                    self.who.id not in record.members and coordinator.voters == record.members
                )
            if not others or is_settled or not self._standby.is_coordinator:
                return
            time.sleep(LOOK_EVERY_S)
