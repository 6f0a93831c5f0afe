"""Which hosts an elastic job may use: a fixed list, a file, or the output of a script, checked every second.

Thread: hc-discovery checks; it wakes the job's loop, which takes the result.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from horoclone import failpoints
from horoclone.launch.hosts import MAX_SLOTS, Host, parse_host, parse_hostfile
from horoclone.launch.usage import LaunchError

LOOK_EVERY_S = 1.0  # Horovod's DISCOVER_HOSTS_FREQUENCY_SECS
SHELL = shutil.which("bash") or "/bin/sh"
SCRIPT_S = 30.0  # a script that runs for longer is ended
ENDS_S = 0.01  # between looks whether a script that has closed its output has ended
MAX_BYTES = 1 << 20
FLAP_S = 2.0  # a host or slot that is missing for less is not gone


class Source(Protocol):
    """Where hosts come from. changes: whether it is worth another look."""

    changes: bool

    def find(self) -> list[Host]:
        """The hosts in their order; LaunchError with a text when that cannot be said."""
        ...

    def stop(self) -> None:
        """Ends a find() that runs in another thread, where that can be."""


class Fixed:
    """Always these hosts."""

    changes = False

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = list(hosts)

    def find(self) -> list[Host]:
        return list(self._hosts)

    def stop(self) -> None:
        pass


class File:
    """The lines of a hostfile, read anew each time."""

    changes = True

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self) -> list[Host]:
        return parse_hostfile(self._path)

    def stop(self) -> None:
        pass


class Script:
    """What a command of the shell prints: `host:slots` or `host` a line. slots: of a host without a number."""

    changes = True

    def __init__(self, command: str, slots: int | None, limit_s: float = SCRIPT_S) -> None:
        self._command, self._slots, self._limit_s = command, slots, limit_s
        self._lock = threading.Lock()  # guards _process
        # Nobody has waited for it, so that its number is its own.
        self._process: subprocess.Popen[bytes] | None = None

    def find(self) -> list[Host]:
        failpoints.reach("discovery.look")
        code, out, said = self.run()
        if code != 0:
            last = said.strip().splitlines()[-1:]
            text = f": {last[0]}" if last else ""
            raise LaunchError(f"--host-discovery-script {self._command}: exit code {code}{text}", 1)
        return parse_lines(out, self._slots, self._command)

    def run(self) -> tuple[int, str, str]:
        """Its exit code, output and errors. LaunchError when it cannot be started, or does not come to its end."""
        try:
            process = subprocess.Popen(
                [
                    SHELL,
                    "-c",
                    self._command,
                ],  # as Horovod: arguments, pipes, and scripts without a first line #!
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise LaunchError(f"--host-discovery-script {self._command}: {why}", 1) from None
        with self._lock:
            self._process = process
        try:
            out, said = _printed(process, self._limit_s)
        except _Endless as error:
            raise LaunchError(f"--host-discovery-script {self._command}: {error}", 1) from None
        finally:
            self.stop()
            with self._lock:
                self._process = None
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        return process.returncode, out.decode(errors="replace"), said.decode(errors="replace")

    def stop(self) -> None:
        """Ends the script, with what it has started."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)


class _Endless(Exception):
    """A script that does not come to its end; the text says in what."""


def _printed(process: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bytes]:
    """Its output and errors, when it has ended. _Endless when that takes too long, or too much memory."""
    assert process.stdout is not None and process.stderr is not None
    deadline = time.monotonic() + limit_s
    parts = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                stream = process.stdout if key.fileobj is process.stdout else process.stderr
                part = os.read(stream.fileno(), 1 << 16)
                parts[stream] += part
                if not part:
                    selector.unregister(stream)
                elif len(parts[stream]) > MAX_BYTES:
                    raise _Endless(f"it printed more than {MAX_BYTES >> 20} MiB")
            if time.monotonic() >= deadline:
                raise _Endless(f"it ran for more than {limit_s:g} s")
    while not _has_ended(process.pid):
        if time.monotonic() >= deadline:
            raise _Endless(f"it ran for more than {limit_s:g} s")
        time.sleep(ENDS_S)
    return bytes(parts[process.stdout]), bytes(parts[process.stderr])


def _has_ended(pid: int) -> bool:
    """Its number stays its own."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # whoever runs us ignores SIGCHLD
        return True


def parse_lines(text: str, slots: int | None, source: str) -> list[Host]:
    """`host:slots` lines -> hosts, each once, in their order. LaunchError for what is not a host, or has no slots."""
    found: dict[str, Host] = {}
    for line in text.splitlines():
        words = line.split("#", 1)[0].split()
        if words and not words[0].endswith(":0"):  # a host without a free slot is none
            host, has_slots = parse_host(words[0], f"--host-discovery-script {source}: {line.strip()!r}")
            if not has_slots:
                if slots is None:
                    raise LaunchError(
                        f"--host-discovery-script {source}: {line.strip()!r} has no number of slots; print host:slots, "
                        "or give --slots-per-host",
                        1,
                    )
                host = Host(host.name, slots)
            found.setdefault(host.name, host)
    if sum(host.slots for host in found.values()) > MAX_SLOTS:
        raise LaunchError(f"--host-discovery-script {source}: it named more than {MAX_SLOTS} slots", 1)
    return list(found.values())


class FlapFilter:
    """Smooths what was found: new hosts count at once, missing ones when they have been missing for flap_s. Pure."""

    def __init__(self, flap_s: float = FLAP_S) -> None:
        self._flap_s = flap_s
        self._hosts: dict[str, int] = {}
        self._less_since: dict[str, float] = {}

    def take(self, hosts: Sequence[Host], now: float) -> list[Host]:
        """The hosts that count now, old ones first."""
        slots = {host.name: host.slots for host in hosts}
        for name in list(self._hosts):
            if slots.get(name, 0) >= self._hosts[name]:
                self._less_since.pop(name, None)
            elif now - self._less_since.setdefault(name, now) >= self._flap_s:
                del self._less_since[name]
                self._hosts[name] = slots.get(name, 0)
                if not self._hosts[name]:
                    del self._hosts[name]
        for name, count in slots.items():
            self._hosts[name] = max(self._hosts.get(name, 0), count)
        return [Host(name, count) for name, count in self._hosts.items()]


class HostPoller:
    """Looks at a source every second in a thread. `wake` is called when something is there to be taken."""

    def __init__(self, source: Source, wake: Callable[[], None], every_s: float = LOOK_EVERY_S) -> None:
        self._source, self._wake, self._every_s = source, wake, every_s
        self._found: queue.SimpleQueue[list[Host] | LaunchError] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hc-discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[list[Host] | LaunchError]:
        """What was found since the last call, the oldest first."""
        found = []
        while not self._found.empty():
            found.append(self._found.get())
        return found

    def close(self) -> None:
        self._stop.set()
        self._source.stop()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _look(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._found.put(self._source.find())
            except LaunchError as error:
                self._found.put(error)
            except Exception as error:  # the next look may succeed; without this thread nobody would look
                self._found.put(LaunchError(f"the hosts cannot be found: {type(error).__name__}: {error}", 1))
            self._wake()
