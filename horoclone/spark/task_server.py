"""The driver's task server: Spark tasks come to it, prove the job's secret, and wait until a rank is to be started in
them.

To the launcher's loop (launch/job.py) each task is a host of one slot, named `task-PARTITION.ATTEMPT@NODE`, and the
connection is what ssh is elsewhere. Threads: hc-spark-tasks waits for tasks and looks after those that wait; a
hc-spark-tasks-in lets each one in; the loop takes them away; others ask.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from horoclone.bootstrap import wire
from horoclone.bootstrap.client import HELLO_S
from horoclone.connection_limits import (
    BACKLOG,
    UnauthenticatedConnections,
    accept,
    has_unread,
    serve_in_thread,
    shut_down,
)
from horoclone.launch.hosts import Host
from horoclone.launch.link import HostEvents, Link
from horoclone.launch.usage import LaunchError
from horoclone.spark.executor import END, START, keep_alive, own_versions

MAX_UNAUTHENTICATED = 64  # connections that have proved nothing yet; who comes displaces the oldest
MAX_BYTES = 1 << 14  # of what a task says about itself
GREETING_S = 120.0  # for a task's Python to start what starts the rank
LOOK_S = 1.0


class Task(NamedTuple):
    """A Spark task that has come. machine: alike for tasks that can share memory."""

    name: str
    partition: int
    attempt: int
    host: str
    machine: str


class TaskLink(Link):
    """The launcher's end of a task; what is at the other end got the secret from Spark."""

    gives_secret = False

    def __init__(
        self, task: Task, connection: socket.socket, events: HostEvents, over: Callable[[], None]
    ) -> None:
        super().__init__(task.name, events, GREETING_S)
        self._task, self._ended_for_server = task, over
        connection.setblocking(False)
        self._connection, self._into = (
            connection,
            connection.dup(),
        )  # one for each direction in the loop's table

    def _ends(self) -> tuple[Any, Any]:
        return self._into, self._connection

    def _channel_ended(self) -> None:
        self._lose("the Spark task was lost: its executor, its Python process or its node has ended")

    def hang_up(self) -> None:
        self._stop_watching()
        try:
            self._connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self.hang_up()
        self._connection.close()
        self._into.close()
        self._ended_for_server()


class TaskServer:
    """Tasks of one job. addresses: where they find it, when it is open. secret, job: what they prove.

    It is the RemoteTransport of the job (launch/link.py) and, if that is elastic, its source of hosts (discovery.py).
    OSError when it cannot listen there.
    """

    changes = True  # as a source of hosts

    def __init__(self, secret: bytes, job: str, bindings: Sequence[str]) -> None:
        self.secret, self._job = secret, job
        self.addresses: Sequence[str] = list(bindings)  # of the rendezvous server, too
        self._news = threading.Condition()  # guards what follows
        self._waiting: dict[str, tuple[Task, socket.socket]] = {}
        self._busy: dict[str, Task] = {}
        self._came: set[int] = set()  # partitions of which a task was there, or still is
        self._trouble = ""  # why a task was refused
        self._unauthenticated = UnauthenticatedConnections(
            MAX_UNAUTHENTICATED, HELLO_S, shut_down, has_unread
        )
        self._changes = self._seen = 0
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._listeners = [self._listen(host) for host in bindings]
        self.own_addresses = [wire.format_address(*one.getsockname()[:2]) for one in self._listeners]
        self._thread = threading.Thread(target=self._serve, name="hc-spark-tasks", daemon=True)
        self._thread.start()

    # --- who starts the job asks

    def wait(self, count: int, limit_s: float, look: Callable[[], None]) -> list[Task]:
        """The tasks of so many partitions, when they have come, by partition. look is called every second, and raises
        when they will not. Of too few when the time is over."""
        deadline = time.monotonic() + limit_s
        with self._news:
            while len(found := self._first_of_each()) < count and time.monotonic() < deadline:
                self._news.wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))
                if self._trouble:
                    raise LaunchError(self._trouble, 1)
                look()
        return found

    def have_come(self, count: int) -> bool:
        """Whether Spark has started a task of each of so many partitions."""
        with self._news:
            return len(self._came) >= count

    def _first_of_each(self) -> list[Task]:
        by_partition: dict[int, Task] = {}
        for task, _ in self._waiting.values():
            by_partition.setdefault(task.partition, task)
        return [by_partition[one] for one in sorted(by_partition)]

    def close(self) -> None:
        """The job is over: tasks that wait are told, those that come find nobody."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
            self._news.notify_all()
        self._wake()
        self._thread.join(5.0)
        for _, connection in waiting:
            _say_end(connection)
        for one in (*self._listeners, self._wakeup, self._wakeup_sender):
            one.close()
        self._selector.close()

    # --- the launcher's loop: a RemoteTransport

    def is_ready(self, host: str) -> bool:
        with self._news:
            return host in self._waiting

    def link(self, host: str, events: HostEvents) -> TaskLink:
        with self._news:
            if host not in self._waiting:
                raise LaunchError(f"{host}: the Spark task was lost before its rank was started", 1)
            task, connection = self._waiting.pop(host)
            self._busy[host] = task
            self._unwatch(connection)
        try:
            connection.sendall(START)
        except OSError:
            pass  # the loop will see its end
        return TaskLink(task, connection, events, lambda: self._free(host))

    def _free(self, host: str) -> None:
        with self._news:
            self._busy.pop(host, None)
            self._changed()

    # --- the launcher's look-out: a source of hosts

    def find(self) -> list[Host]:
        """The tasks that there are, each one host; waits up to 1 s for a change."""
        with self._news:
            self._news.wait_for(lambda: self._closed or self._changes != self._seen, LOOK_S)
            self._seen = self._changes
            tasks = [*self._busy.values(), *(task for task, _ in self._waiting.values())]
        return [Host(task.name, 1) for task in by_machine(tasks)]

    def stop(self) -> None:
        with self._news:
            self._changed()

    # --- the thread

    def _changed(self) -> None:
        self._changes += 1
        self._news.notify_all()

    def _wake(self) -> None:
        try:
            self._wakeup_sender.send(b"x")
        except OSError:
            pass

    def _listen(self, host: str) -> socket.socket:
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _unwatch(self, connection: socket.socket) -> None:
        try:
            self._selector.unregister(connection)
        except (KeyError, ValueError):
            pass

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(LOOK_S):
                if key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                elif key.fileobj in self._listeners:
                    accepted = accept(key.fileobj, self._unauthenticated)  # type: ignore[arg-type]
                    if accepted is not None:
                        serve_in_thread(accepted[0], self._unauthenticated, self._admit, "hc-spark-tasks-in")
                else:
                    self._look_at(key.data, key.fileobj)  # type: ignore[arg-type]

    def _admit(self, peer: socket.socket) -> None:
        """Thread hc-spark-tasks-in, one for each that comes."""
        is_in = False
        try:
            keep_alive(peer)
            if wire.admit(peer, self.secret, self._job, HELLO_S):
                self._unauthenticated.gone(peer)
                is_in = self._take(json.loads(_introduction_of(peer)), peer)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # an unauthenticated peer, or a task that has ended
        finally:
            self._unauthenticated.gone(peer)
            if not is_in:
                peer.close()

    def _take(self, hello: dict[str, Any], peer: socket.socket) -> bool:
        host, partition, attempt = str(hello["host"])[:255], int(hello["partition"]), int(hello["attempt"])
        task = Task(f"task-{partition}.{attempt}@{host}", partition, attempt, host, str(hello["machine"]))
        peer.settimeout(None)
        with self._news:
            self._trouble = self._trouble or _difference(hello, host)
            if self._closed or self._trouble:
                _say_end(peer)
                self._news.notify_all()
                return True
            old = self._waiting.pop(task.name, None)
            if old is not None:  # its connection was lost, and it has come again
                self._unwatch(old[1])
                old[1].close()
            self._waiting[task.name] = task, peer
            self._came.add(partition)
            self._selector.register(peer, selectors.EVENT_READ, task.name)
            self._changed()
        self._wake()
        return True

    def _look_at(self, name: str, connection: socket.socket) -> None:
        """A task that waits says nothing: what can be read is its end. It may have come again meanwhile."""
        with self._news:
            if name in self._waiting and self._waiting[name][1] is connection:
                del self._waiting[name]
                self._unwatch(connection)
                connection.close()
                self._changed()


def by_machine(tasks: Iterable[Task]) -> list[Task]:
    """Machine by machine: first that of the first partition, on each in the order of partitions."""
    groups: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: (task.partition, task.attempt)):
        groups.setdefault(task.machine, []).append(task)
    return [task for group in groups.values() for task in group]


def _introduction_of(peer: socket.socket) -> bytes:
    deadline = time.monotonic() + HELLO_S
    count = int.from_bytes(wire.receive_exactly(peer, 4, deadline), "little")
    if count > MAX_BYTES:
        raise ValueError(f"a task that says {count} bytes about itself")
    return wire.receive_exactly(peer, count, deadline)


def _difference(hello: dict[str, Any], host: str) -> str:
    """What makes ranks there impossible, or an empty text."""
    theirs, ours = hello["versions"], own_versions()
    for name, version in ours.items():
        if theirs.get(name) != version:
            return (
                f"node {host} runs {name} {theirs.get(name)} ({hello['program']}), the driver {name} {version}: both "
                "need the same. PYSPARK_PYTHON, set before the session is made, chooses the executors' Python"
            )
    return ""


def _say_end(connection: socket.socket) -> None:
    try:
        connection.settimeout(1.0)
        connection.sendall(END)
    except OSError:
        pass
    connection.close()


def bindings(master: str, nics: Sequence[str] | None) -> list[str]:
    """Where the driver listens: on loopback where all executors are on its host. ValueError for unknown interfaces."""
    if master.startswith("local") and not nics:
        return ["127.0.0.1"]
    found = wire.routable_addresses(",".join(nics or ()))
    return [one for one in found if not one.startswith("127.")] or found
