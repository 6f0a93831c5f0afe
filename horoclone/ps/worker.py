"""A worker's side: connections to all servers, and calls that go on at another copy when a server dies.

Thread: calls of one Servers are made one at a time; a second one for other threads is cheap (see Servers.another).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from horoclone import errors
from horoclone.ps.register import NEW_S, PAUSE_S, Register, Unreachable, open_register
from horoclone.ps.view import Layout, View
from horoclone.runtime import current, native_module

PULL, PUSH, ASSIGN, ROWS = range(4)  # hc_verb
ONLY_NEW, ALONE = 1, 2  # flags of a call
CONNECT_S = 5.0  # for a server that lives; one that does not answer has died or is cut off
TAKE_OVER_S = 0.25  # before a lost connection is made again: the register says sooner who is primary now
COPY_S = 600.0  # for a server to write its part of a save


class Servers:
    """The servers of one parameter server, as one worker uses them.

    name: that of `python -m horoclone.ps --name`. store: "HOST:PORT" of the register; None: torchrun's store.
    secret_file: with the secret that the servers were given; None: HOROCLONE_SECRET_FILE, or the job's own. secret: the
    same as bytes (at least 16), where a program has it.
    rank, workers: of this worker, and how many there are; None: those of hvd.init() or the launcher, else 0 of 1.
    timeout_s: for servers to come, and for other workers where a staleness waits for them. silence_s: a server from
    which nothing comes for so long while an answer is due is given up.

    Raises Timeout (nobody came), Mismatch, Unsupported (no secret), ValueError.
    """

    def __init__(
        self,
        name: str,
        store: str | None = None,
        *,
        secret_file: str | None = None,
        secret: bytes | None = None,
        rank: int | None = None,
        workers: int | None = None,
        timeout_s: float = 60.0,
        silence_s: float = 10.0,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.rank, self.workers = _place(rank, workers, environ)
        self.name, self.timeout_s, self.silence_s = name, timeout_s, silence_s
        self.register: Register = open_register(name, store, secret_file, environ, secret)
        self._lock = threading.Lock()
        self._connect(secrets.randbits(62) | 1)

    def _connect(self, worker: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        self._has_begun = False
        late = "server {} of {} has not come within {:g} s"
        self.layout = self._wait_for_layout(deadline)
        self._worker = worker
        self._client = native_module.core().ParameterClient(
            self.rank, worker, self.layout.partitions, self.register.secret, f"ps:{self.name}", self.silence_s
        )
        self._generations: dict[int, int] = {}  # server -> the life that is connected
        self._views: dict[int, View] = {}
        for partition in range(self.layout.partitions):
            who = late.format(self.layout.home(partition), self.layout.servers, self.timeout_s)
            self._views[partition] = View.from_json(
                self.register.wait(f"view/{partition}", bool, deadline, who)
            )
        # To every server, also where this worker has nothing to do now: each must see it die.
        for server in range(self.layout.servers):
            self._reach(server)
        for partition in range(self.layout.partitions):
            self._find(partition, None, deadline)
        self._has_begun = True

    def _wait_for_layout(self, deadline: float) -> Layout:
        """It is there once all servers have come, and a register that can be started again is some seconds old."""
        start = f"within {self.timeout_s:g} s. Start them: python -m horoclone.ps --name {self.name}"
        try:
            return Layout.from_json(
                self.register.wait("layout", bool, deadline, f"no server has come {start}")
            )
        except Unreachable:
            raise
        except errors.Timeout:
            proposal = self.register.get("proposal")
            if proposal is None:
                raise
            servers = range(proposal["servers"])
            places = [self.register.get(f"server/{server}") for server in servers]
            missing = [
                n for n, place in enumerate(places) if place is None or place.get("layout") != proposal
            ]
            said = (
                f"servers {missing} of {len(servers)} have not come {start}"
                if missing
                else f"all {len(servers)} servers have come, but none has begun within {self.timeout_s:g} s: they wait "
                f"until a register that was just started is {NEW_S:g} s old, and for servers that may have rows; their "
                "logs say for which. Set a longer timeout_s"
            )
            raise errors.Timeout(f"parameter server {self.name!r}: {said}") from None

    def another(self) -> Servers:
        """Returns the same worker over connections of its own, for another thread."""
        twin = object.__new__(Servers)
        twin.__dict__.update(self.__dict__)
        twin._lock = threading.Lock()
        twin._connect(self._worker)
        if twin.layout != self.layout:
            twin.close()
            raise self._is_of_others(twin.layout)
        return twin

    # --- calls ---

    def make_table(self, spec: dict[str, Any]) -> list[int]:
        """Makes the table unless it is there, and enters this worker. Returns, by partition, where its steps stand."""
        lost = [partition for partition, view in self._views.items() if view.lost]
        if lost:
            raise errors.StateLost(self._what_is_lost(lost, spec["name"]))
        with self._lock:
            self._run(self._client.make_table(spec), f"table {spec['name']!r}")
            call = self._client.enter(spec["name"], self.rank)
            self._run(call, f"table {spec['name']!r}")
            return list(call.clocks)

    def rows(
        self,
        verb: int,
        table: str,
        ids: int,
        n: int,
        floats: int,
        *,
        data_in: int = 0,
        data_out: int = 0,
        flags: int = 0,
        clocks: list[int] | None = None,
    ) -> None:
        """Calls the servers with memory at addresses: n ids (int64) and `floats` float32 for each. Memory stays the
        caller's."""
        with self._lock:
            call = self._client.rows(verb, table, ids, n, floats, data_in, data_out, flags)
            if clocks is not None:
                call.clocks = clocks
            self._run(call, f"table {table!r}")

    def _run(self, call: Any, what: str) -> None:
        deadline = time.monotonic() + self.timeout_s + self.silence_s
        while True:
            failures = self._client.run(call, max(0.1, min(self.timeout_s, deadline - time.monotonic())))
            for _, server, retry, code, text in failures:
                if not retry:
                    native_module.core().raise_code(
                        code,
                        f"parameter server {self.name!r}, rank {self.rank}, {what}, server {server}: {text}",
                    )
            if not failures:
                return
            for partition, server, _, _, text in failures:
                self._find(partition, (server, text), deadline)

    # --- where a partition is ---

    def _find(self, partition: int, failed: tuple[int, str] | None, deadline: float) -> None:
        """Points the partition's calls to its primary; where that one is gone, asks the backup to go on.

        While the register is away it waits, as the servers do. PeerLost, Unreachable at the deadline.
        """
        why = failed[1] if failed else ""
        known = self._views[partition]
        if failed and known.backup is not None:
            self._let_backup_take_over(partition, known.epoch)
        while True:
            is_late = time.monotonic() > deadline
            try:
                view = self._look(partition, has_failed=failed is not None)
                if self._reach(*view.primary):
                    self._client.route(partition, view.primary.server)
                    return
                if view.backup is not None and self._reach(*view.backup) and not is_late:
                    question = {"what": "promote", "partition": partition, "epoch": view.epoch}
                    if self._ask(view.backup.server, question) is not None:
                        continue
            except Unreachable:
                if is_late:
                    raise
            if is_late:
                raise errors.PeerLost(self._who_cannot_be_reached(partition, why))
            time.sleep(PAUSE_S)

    def _let_backup_take_over(self, partition: int, epoch: int) -> None:
        """A backup that has lost its primary goes on by itself, at once."""
        until = time.monotonic() + TAKE_OVER_S
        with contextlib.suppress(Unreachable):
            while self._look(partition, has_failed=True).epoch == epoch and time.monotonic() < until:
                time.sleep(TAKE_OVER_S / 50)

    def _who_cannot_be_reached(self, partition: int, why: str) -> str:
        view = self._views[partition]
        backup = f" and server {view.backup.server} its backup" if view.backup else " and has its only copy"
        return (
            f"parameter server {self.name!r}, rank {self.rank}: partition {partition} cannot be reached: server "
            f"{view.primary.server} is its primary{backup}"
            + (f"; last: {why}" if why else "")
            + ". Start the servers that died again; if no copy is left, the last save is what there is"
        )

    def has_register(self) -> bool:
        """Returns False when other servers have been started under this name, and what the register says is about their
        rows."""
        return self._layout_of_others() is None

    def _layout_of_others(self) -> Layout | None:
        known = self.register.get("layout")
        layout = Layout.from_json(known) if known else self.layout
        return layout if layout != self.layout else None

    def _is_of_others(self, layout: Layout) -> errors.HorovodInternalError:
        return errors.HorovodInternalError(
            f"parameter server {self.name!r}: the register now speaks of {layout.to_json()}, and this worker began "
            f"with {self.layout.to_json()}; were other servers started under this name when the register was started "
            "anew?"
        )

    def _look(self, partition: int, *, has_failed: bool = False) -> View:
        """has_failed: a call to the partition's primary has."""
        known = self._views[partition]
        others = self._layout_of_others()
        if others is not None:
            if not has_failed and self._client.is_connected(known.primary.server):
                return known  # its servers go on, also so that somebody can save
            raise self._is_of_others(others)
        value = self.register.get(f"view/{partition}")
        if value is None:  # the register was started again, and the servers have not told it yet
            return known
        view = View.from_json(value)
        if view.epoch < known.epoch:  # somebody has written an old value again; the servers write the newest
            return known
        # A loss that is written while this worker connects is told when it makes a table: only with this object can its
        # owner call accept_loss().
        if view.lost > known.lost and self._has_begun:
            raise errors.StateLost(self._what_is_lost([partition], None))
        self._views[partition] = view
        return view

    def _reach(self, server: int, generation: int | None = None) -> bool:
        """Whether there is a connection to that server (in that life)."""
        if self._client.is_connected(server) and generation in (None, self._generations.get(server)):
            return True
        place = self.register.get(f"server/{server}")
        if place is None or generation not in (None, place["generation"]):
            return False
        try:
            self._client.connect(
                bytes.fromhex(place["endpoint"]), server, place["generation"], timeout_s=CONNECT_S
            )
        except errors.HorovodInternalError:
            return False
        self._generations[server] = place["generation"]
        return True

    def _ask(self, server: int, question: dict[str, Any], timeout_s: float | None = None) -> Any:
        try:
            answer = self._client.ask(server, json.dumps(question), timeout_s or self.timeout_s)
        except errors.HorovodInternalError:
            if question["what"] != "promote":
                raise
            return None  # the next look at the register shows what has come of it
        return json.loads(answer)

    def _what_is_lost(self, partitions: list[int], table: str | None) -> str:
        view = self._views[partitions[0]]
        newest = self.register.get(f"view/{partitions[0]}")
        since = time.time() - max(view.lost, View.from_json(newest).lost if newest else 0.0)
        saved = self.register.get("saved") or {}
        saves = [
            f"table {name!r}: {where['path']}, {time.time() - where['time']:.0f} s ago"
            for name, where in saved.items()
            if table in (None, name)
        ]
        return (
            f"parameter server {self.name!r}: all copies of partitions {partitions} died {since:.0f} s ago. Last "
            f"saves: {'; '.join(saves) if saves else 'none'}. Call Servers.accept_loss(), then load one or go on "
            "without those rows"
        )

    def accept_loss(self) -> None:
        """Accepts that lost partitions are empty from now on; then load a save, or go on without. For one worker."""
        for partition in range(self.layout.partitions):
            value = self.register.get(f"view/{partition}")
            view = View.from_json(value) if value else self._views[partition]
            if view.lost:
                found = View(view.epoch + 1, view.primary, view.backup)
                self.register.compare_set(f"view/{partition}", view.to_json(), found.to_json())
                self._views[partition] = found

    # --- all servers ---

    def ask_primaries(self, question: dict[str, Any]) -> list[Any]:
        """Returns the answers of the servers that hold the partitions, by partition."""
        answers = []
        for partition in range(self.layout.partitions):
            self._find(partition, None, time.monotonic() + self.timeout_s)
            server = self._views[partition].primary.server
            answers.append(self._ask(server, {**question, "partition": partition}, COPY_S))
        return answers

    def describe(self) -> list[dict[str, Any]]:
        """Returns of each server that can be reached: partitions with roles and rows, workers, memory in bytes."""
        return [
            self._ask(server, {"what": "describe"})
            for server in range(self.layout.servers)
            if self._reach(server)
        ]

    def close(self) -> None:
        """Leaves the servers, so that nobody waits for this worker any more."""
        self._client.close()


def _place(rank: int | None, workers: int | None, environ: Mapping[str, str]) -> tuple[int, int]:
    if (rank is None) != (workers is None):
        raise ValueError("parameter server: give both rank and workers, or none of them")
    if rank is None or workers is None:
        if current.runtime is not None:
            rank, workers = current.runtime.rank, current.runtime.size
        else:
            rank = int(environ.get("HOROVOD_RANK") or environ.get("RANK") or 0)
            workers = int(environ.get("HOROVOD_SIZE") or environ.get("WORLD_SIZE") or 1)
    if not 0 <= rank < workers:
        raise ValueError(f"parameter server: rank {rank} of {workers} workers")
    return rank, workers
