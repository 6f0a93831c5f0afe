"""Whether a host of an elastic job is still the same machine, by its address and by what the machine reports.

Slots that are closed for failures belong to one machine. A name that leads to another machine, or to one that was
booted again, has another identity. Thread: hc-host-identity checks hosts that are closed; the job's loop takes the
result.
"""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from horoclone.launch.host_sources import addresses
from horoclone.launch.hosts import is_local
from horoclone.launch.link import SshOptions, ssh_command
from horoclone.launch.machine import ASK

ADDRESS, MACHINE = "address", "machine"  # kinds of identities
LOOK_EVERY_S = 5.0  # for a closed host's address
ASK_EVERY_S = 30.0  # for what its machine says, over ssh
ASK_S = 20.0


class HostIdentity(NamedTuple):
    host: str
    kind: str
    text: str


class HostIdentities:
    """Identities of hosts, as they are found. wake is called when there is one to be taken."""

    def __init__(
        self,
        ssh: SshOptions,
        wake: Callable[[], None],
        resolve: Callable[[str], Iterable[str]] = addresses,
        ask: Callable[[str], str] | None = None,
    ) -> None:
        self._ssh, self._wake, self._resolve, self._ask = ssh, wake, resolve, ask or self._ask_over_ssh
        self._present: frozenset[str] = frozenset()
        self._closed: frozenset[str] = frozenset()
        self._found: queue.SimpleQueue[HostIdentity] = queue.SimpleQueue()
        self._due: dict[tuple[str, str], float] = {}  # host, kind -> when it is looked at next
        self._last: dict[tuple[str, str], str] = {}
        self._news = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._asking: subprocess.Popen[str] | None = None

    def watch(self, present: Iterable[str], closed: Iterable[str]) -> None:
        """The hosts that there are now, and those of which some slot is not used."""
        now_there, shut = frozenset(present), frozenset(closed)
        if (now_there, shut) == (self._present, self._closed):
            return
        self._present, self._closed = now_there, shut
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hc-host-identity", daemon=True)
            self._thread.start()
        self._news.set()

    def take(self) -> list[HostIdentity]:
        found = []
        while not self._found.empty():
            found.append(self._found.get())
        return found

    def close(self) -> None:
        self._stop = True
        self._news.set()
        if self._asking is not None and self._asking.poll() is None:
            self._asking.kill()
        if self._thread is not None:
            self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stop:
            wait_s = self.look(time.monotonic())
            self._news.wait(wait_s)
            self._news.clear()

    def look(self, now: float) -> float | None:
        """Looks at what is due; in how many seconds the next is, None: not before watch() says something new."""
        present, closed = self._present, self._closed
        for host, kind in list(self._due):
            if host not in present:
                del self._due[host, kind]  # when it comes back it is looked at at once
        for host in sorted(present):
            if self._stop or is_local(host):
                continue
            if now >= self._due.get((host, ADDRESS), now) and (
                host in closed or (host, ADDRESS) not in self._due
            ):
                self._due[host, ADDRESS] = now + LOOK_EVERY_S
                self._tell(host, ADDRESS, self._address_of(host))
            if host in closed and now >= self._due.get((host, MACHINE), now):
                self._due[host, MACHINE] = now + ASK_EVERY_S
                self._tell(host, MACHINE, self._ask(host))
        due = [at for (host, _), at in self._due.items() if host in closed]
        return max(0.1, min(due) - time.monotonic()) if due else None

    def _tell(self, host: str, kind: str, text: str) -> None:
        if text and self._last.get((host, kind)) != text:
            self._last[host, kind] = text
            self._found.put(HostIdentity(host, kind, text))
            self._wake()

    def _address_of(self, host: str) -> str:
        try:
            return " ".join(sorted(set(self._resolve(host.rpartition("@")[2]))))
        except (OSError, UnicodeError):
            return ""  # an alias of ssh's, or nobody knows now

    def _ask_over_ssh(self, host: str) -> str:
        command = [*ssh_command(host, self._ssh)[:-1], ASK]
        try:
            self._asking = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError:
            return ""
        with self._asking as process:
            if self._stop:  # close() may have come before there was a process to end
                process.kill()
            try:
                said, _ = process.communicate(timeout=ASK_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return ""
        return said.strip() if process.returncode == 0 else ""
