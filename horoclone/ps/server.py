"""The program of a server: decides, with the register, which partitions it holds; csrc/server does everything else.

Thread: run() is the caller's; what must wait (a copy for a new backup, a file) runs on a few threads of its own, one at
a time for each partition.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horoclone import errors
from horoclone.ps import files
from horoclone.ps.register import NEW_S, PAUSE_S, SAY_S, Register, Unreachable
from horoclone.ps.view import Holder, Layout, View
from horoclone.runtime import logs, native_module

log = logs.logger("horoclone.ps")
NONE, BACKUP, PRIMARY, UNDECIDED = range(4)  # hc_role
ASKED, BACKUP_LOST, PRIMARY_LOST = range(3)  # hc_event_kind
EVENT_S = 0.5  # between two looks at the register, for a partition without a second copy for example
MAX_PAUSE_S = 10.0  # between tries for a second copy that fail: one that lacks memory is not helped by haste
STRANDED_S = 5.0  # after that any server takes a second copy, not only the one that should have it
THREADS = 4  # and two for each partition: one may be waiting for the register


class Server:
    """One server in this process. Raises Mismatch when the others were started differently, Timeout, Unreachable."""

    def __init__(
        self,
        register: Register,
        index: int,
        servers: int,
        *,
        replicas: int = 2,
        memory: int = 1 << 34,
        silence_s: float = 10.0,
        interfaces: str = "",
    ) -> None:
        if not 0 <= index < servers:
            raise ValueError(f"server {index} of {servers}")
        if replicas not in (1, 2) or replicas > servers:
            raise ValueError(f"replicas={replicas} with {servers} servers: 1, or 2 on at least two servers")
        self.register, self.layout = register, Layout(servers, replicas)
        # Generations of a server grow, so that an entry of an earlier life that is written again is known as one.
        # first: servers that live write it, and it shows that the secrets are the same
        self.register.get("layout")
        before = self.register.get(f"server/{index}")
        self.me = Holder(index, max(time.time_ns(), before["generation"] + 1 if before else 0))
        self._native = native_module.core().ParameterServer(
            index,
            self.layout.partitions,
            register.secret,
            f"ps:{register.name}",
            self.me.generation,
            memory,
            silence_s,
            interfaces,
        )
        self._silence_s = silence_s
        self._locks = [threading.Lock() for _ in range(self.layout.partitions)]
        self._pool = ThreadPoolExecutor(THREADS + 2 * servers, thread_name_prefix="hc-ps-program")
        self._lonely: dict[int, float] = {}  # partition without a backup -> since when
        self._busy: set[int] = set()  # partitions for which a copy is being asked
        self._pauses: dict[int, tuple[float, float]] = {}  # after a failure: (until, how long)
        self._is_whole = False
        self._known: dict[int, View] = {}  # the newest view of each partition that has a copy here
        self._told: dict[str, Any] = {}  # what this server has written about itself
        self._had: list[int] = []  # see _place
        self._saved: Any = None
        self._said = -SAY_S  # when it was last told whom a partition waits for, or of another layout
        self._refused: errors.Mismatch | None = None  # why run() ends
        self._stopping = threading.Event()
        try:
            self._announce()
        except BaseException:
            self._native.stop()
            raise

    def _announce(self) -> None:
        """The layout itself is written later, see _begin: servers that run, and tell a register that was started again
        theirs, go first. Until then servers that start propose one to each other."""
        known = self.register.get("layout")
        if known is None and not self.register.compare_set("proposal", None, self.layout.to_json()):
            known = self.register.get("proposal")
        if known not in (None, self.layout.to_json()):
            raise self._mismatch(known)
        before = self._entry(self.me.server)
        if before is not None:
            self._had = sorted({*before["had"], *before["copies"]})
        self._tell(self._place())

    def _tell(self, place: dict[str, Any]) -> None:
        self._told = place
        self.register.set(f"server/{self.me.server}", place)

    def _mismatch(self, known: Any) -> errors.Mismatch:
        return errors.Mismatch(
            f"parameter server {self.register.name!r} was started with {known}, and this server with "
            f"{self.layout.to_json()}; start it alike, or under another --name"
        )

    def _held(self) -> list[int]:
        """Partitions of which this server has a copy, perhaps one that is not whole."""
        return [n for n in range(self.layout.partitions) if self._native.role(n) != NONE]

    def _is_our_register(self) -> bool:
        """Whether what the register says is about servers of this layout. A server that has a copy writes the layout
        where there is none. Mismatch for one that has none and finds another layout."""
        layout, held = self.layout.to_json(), self._held()
        if held and self.register.compare_set("layout", None, layout):
            return True
        known = self.register.get("layout")
        if known in (None, layout):
            return True
        if not held:
            raise self._mismatch(known)
        self._say_now_and_then(
            logging.ERROR,
            "the register was started again, and others began with %s under the name of this parameter server, "
            "which has %s and goes on with the workers that it has; new ones go to the others. Save the tables of "
            "the one that you give up (Table.save), stop it, and start it under another --name",
            known,
            layout,
        )
        return False

    def _say_now_and_then(self, level: int, text: str, *what: object) -> None:
        """What stays so for a while, and is found at every look at the register."""
        if time.monotonic() > self._said + SAY_S:
            log.log(level, text, *what)
            self._said = time.monotonic()

    def _place(self) -> dict[str, Any]:
        """copies: the partitions of which this server had a copy that counts when the register knew nothing of it. had:
        those of which an earlier life of it had one, or of which it has one that may not be whole."""
        held = self._held()
        return {
            "layout": self.layout.to_json(),
            "generation": self.me.generation,
            "endpoint": self._native.endpoint().hex(),
            "copies": [number for number in held if number in self._known],
            "had": sorted({*self._had, *(number for number in held if number not in self._known)}),
        }

    def _entry(self, server: int) -> Any:
        """What a server has written about itself. None where one of another layout has written it: the one of this
        layout may be alive, and have rows."""
        place = self.register.get(f"server/{server}")
        return place if place is not None and place.get("layout") == self.layout.to_json() else None

    def _remind(self, views: Mapping[int, View | None]) -> None:
        """Tells a register that was started again what it has forgotten; this server's own entry comes last."""
        entry = self._entry(self.me.server)
        is_known = entry is not None
        if not is_known:
            log.warning("the register has forgotten this server, and is told what it knows")
        elif entry != self._told and entry["generation"] <= self.me.generation:
            log.warning("the register went back to what this server was before, and is told anew")
            self._tell(self._told)
        for partition, view in views.items():
            known = self._known.get(partition)
            if (
                view is None
                and known
                and known.primary == self.me
                and self._native.role(partition) == PRIMARY
            ):
                self.register.compare_set(f"view/{partition}", None, known.to_json())
        if is_known:
            self._saved = self.register.get("saved") or self._saved
            return
        if self._saved is not None:
            self.register.compare_set("saved", None, self._saved)
        self._tell(self._place())

    def _begin(self, partition: int) -> bool:
        """Begins a partition that the register does not know, as soon as every server has said that it has no rows of
        it; whether it has begun. The first one writes the layout, but not while the register is new: servers that
        run may be about to tell it another layout, and need not be among those that this one waits for."""
        had = False
        for server in range(self.layout.servers):
            place = self._entry(server)
            if place is None or partition in place["copies"]:
                what = "come" if place is None else "told the register which copy of it counts"
                text = "partition %d begins once server %d has %s"
                self._say_now_and_then(logging.WARNING, text, partition, server, what)
                return False
            had = had or partition in place["had"]
        known, layout = self.register.get("layout"), self.layout.to_json()
        if known is None and self.register.is_new():
            text = "partition %d begins once the register, which was just started, is %g s old"
            self._say_now_and_then(logging.WARNING, text, partition, NEW_S)
            return False
        if known is None and self.register.compare_set("layout", None, layout):
            known = layout
        if known != layout:
            return False
        self._begin_with(partition, None, View(1, self.me, None, time.time() if had else 0.0))
        return True

    def _begin_empty(self, partition: int, view: View) -> None:
        """Where every server that had a copy has been started again since: the rows are gone, and everybody has to
        know."""
        for holder in (view.primary, view.backup):
            place = self._entry(holder.server) if holder else None
            if holder is not None and (place is None or place["generation"] == holder.generation):
                return  # that life may still be going on, and have a register to tell that was started again
        self._begin_with(partition, view, View(view.epoch + 1, self.me, None, time.time()))

    def _begin_with(self, partition: int, old: View | None, new: View) -> None:
        if self._change(partition, old, new):
            if new.lost:
                log.error("partition %d: all its copies died; it begins empty", partition)
            self._native.set_role(partition, PRIMARY)

    # --- the register ---

    def _view(self, partition: int) -> View:
        view = self._look(partition)
        if view is None:
            raise errors.HorovodInternalError(f"partition {partition} has no view in the register")
        return view

    def _change(self, partition: int, old: View | None, new: View) -> bool:
        is_there = self.register.compare_set(f"view/{partition}", old and old.to_json(), new.to_json())
        if is_there and new.has(self.me):
            self._known[partition] = new
        return is_there

    def _look(self, partition: int) -> View | None:
        """What the register says, if it says anything; remembered for a register that forgets.

        An epoch never goes back: where somebody has written an old value again, who has a copy writes the newest."""
        value = self.register.get(f"view/{partition}")
        view = View.from_json(value) if value else None
        known = self._known.get(partition)
        if view is not None and known is not None and view.epoch < known.epoch:
            log.warning(
                "partition %d: the register went back from view %d to %d, and is told the newer one",
                partition,
                known.epoch,
                view.epoch,
            )
            return known if self.register.compare_set(f"view/{partition}", value, known.to_json()) else None
        if view is not None and view.has(self.me):
            self._known[partition] = view
        return view

    def _decide(self, partition: int) -> None:
        """This server has lost the other copy, or was asked by a worker that has: goes on alone if nobody else does."""
        forgotten_since = 0.0
        while not self._stopping.is_set():
            try:
                if not self._is_our_register():  # what it says of this number is about other rows
                    self._stopping.wait(PAUSE_S)
                    continue
                view = self._look(partition)
                if view is None:  # forgotten: whoever is primary has its time to tell it
                    forgotten_since = forgotten_since or time.monotonic()
                    known = self._known.get(partition)
                    is_time = time.monotonic() > forgotten_since + NEW_S and not self.register.is_new()
                    if known and is_time:
                        self._change(partition, None, known.alone(self.me))
                    self._stopping.wait(PAUSE_S)
                    continue
                if view.primary == self.me and view.backup is None:
                    break
                if not view.has(self.me):
                    return self._give_up(partition, view)
                if self._change(partition, view, view.alone(self.me)):
                    log.warning("partition %d: this server goes on alone", partition)
                    break
            except Unreachable as error:  # nobody is answered until it is decided
                log.warning("partition %d: %s", partition, error)
                self._stopping.wait(PAUSE_S)
        else:  # it is stopping and nothing was decided: what it acknowledged alone the other copy would not have
            return
        self._native.set_role(partition, PRIMARY)

    def _give_up(self, partition: int, view: View) -> None:
        log.warning("partition %d: server %d has it now", partition, view.primary.server)
        self._known.pop(partition, None)
        self._native.set_role(partition, NONE)

    # --- events ---

    def run(
        self, until: threading.Event | None = None, when_whole: Callable[[bool], None] | None = None
    ) -> None:
        """Serves until stop() or the event. Raises Mismatch when this server, which has no rows, came before those of
        another layout that run could tell a new register theirs.

        when_whole(True) is called once every row that this server should have a copy of has all its copies: another
        server may then be stopped without a loss. when_whole(False), once that is over.
        """
        over = until or self._stopping
        watch = threading.Thread(target=self._watch, args=(over, when_whole), name="hc-ps-watch", daemon=True)
        watch.start()
        while not self._stopping.is_set() and not over.is_set() and self._refused is None:
            event = self._native.next_event(EVENT_S)
            if event is not None:
                self._submit(self._handle, *event)
        if self._refused is not None:
            raise self._refused

    def _watch(self, over: threading.Event, when_whole: Callable[[bool], None] | None) -> None:
        """Looks at the register, on a thread of its own: one that is cut off answers nobody for many seconds."""
        while not self._stopping.is_set() and not over.is_set():
            pause_s = EVENT_S
            try:
                # Whoever counts on this server's copies asks the register, which does not speak of them then.
                if not self._is_our_register():
                    if when_whole is not None and self._is_whole:
                        when_whole(False)
                    self._is_whole = False
                    self._stopping.wait(pause_s)
                    continue
                views = {number: self._look(number) for number in range(self.layout.partitions)}
                self._remind(views)
                if not self._look_for_work(views):
                    pause_s = 4 * PAUSE_S
                is_whole = all(self._is_safe(number, view) for number, view in views.items())
                if when_whole is not None and is_whole != self._is_whole:
                    when_whole(is_whole)
                self._is_whole = is_whole
            except Unreachable as error:  # what was so is so, for all that this server knows
                log.warning("%s", error)
            except errors.Mismatch as error:
                self._refused = error
                return
            except Exception:
                log.exception("a look at the register failed")
            self._stopping.wait(pause_s)

    def _handle(self, number: int, kind: int, partition: int, text: str) -> None:
        try:
            if kind == ASKED:
                self._native.answer(number, 0, json.dumps(self._answer(json.loads(text))))
                return
            log.warning("partition %d: the other copy is lost: %s", partition, text)
            with self._locks[partition]:
                wanted = UNDECIDED if kind == BACKUP_LOST else BACKUP
                if self._native.role(partition) == wanted:
                    self._decide(partition)
        except Exception as error:  # on a thread of a pool: nobody else would hear of it
            if kind == ASKED:
                self._native.answer(number, 8, f"server {self.me.server}: {error}")
            else:
                log.exception("partition %d", partition)

    def _answer(self, question: dict[str, Any]) -> Any:
        what = question["what"]
        if what == "describe":
            return json.loads(self._native.describe())
        partition = int(question["partition"])
        if what == "save":
            written = files.write(
                self._native, question["path"], question["spec"], partition, question["save"]
            )
            if self._native.role(partition) != PRIMARY:
                raise errors.PeerLost(
                    f"partition {partition} went to another server during the save; save again"
                )
            return written
        with self._locks[partition]:
            if what == "promote":
                view = self._view(partition)
                if view.backup == self.me and view.epoch == question["epoch"]:
                    self._decide(partition)
            elif what == "attach":
                self._attach(partition, Holder(*question["holder"]), bytes.fromhex(question["endpoint"]))
            else:
                raise ValueError(f"unknown question {what!r}")
        return self._view(partition).to_json()

    def _attach(self, partition: int, other: Holder, endpoint: bytes) -> None:
        view = self._view(partition)
        if view.primary != self.me or view.backup is not None:
            return
        # From here on every change waits for the new copy; only then may the register say that it counts.
        self._native.attach(partition, endpoint, *other, timeout_s=600.0)
        try:
            if self._change(partition, view, view.joined_by(other)):
                log.info("partition %d: server %d has a copy", partition, other.server)
                return
        except Unreachable:
            # Perhaps it was written. Once this copy is let go the role is decided anew, by the same register.
            log.warning(
                "partition %d: the register did not answer while server %d joined", partition, other.server
            )
        self._native.set_role(partition, UNDECIDED)
        self._decide(partition)

    # --- second copies ---

    def _look_for_work(self, views: Mapping[int, View | None]) -> bool:
        """Begins this server's own partitions, and asks for a copy of each one that has one copy only and should have
        two. False while one of its own cannot begin yet."""
        has_begun = True
        for partition, view in views.items():
            if partition in self._busy or self._native.role(partition) != NONE:
                continue
            if time.monotonic() < self._pauses.get(partition, (0.0, 0.0))[0]:
                continue
            if self.layout.home(partition) == self.me.server:
                if view is None:
                    has_begun &= self._begin(partition)
                else:
                    self._begin_empty(partition, view)
            if view is None or view.backup is not None or self.layout.replicas == 1:
                self._lonely.pop(partition, None)
                continue
            since = self._lonely.setdefault(partition, time.monotonic())
            ours = self.me.server in (self.layout.home(partition), self.layout.second(partition))
            if ours or time.monotonic() - since > STRANDED_S:
                self._busy.add(partition)
                self._submit(self._join, partition, view)
        return has_begun

    def _is_safe(self, partition: int, view: View | None) -> bool:
        """Whether the copy of it that should be here is here, or on another server in its place. view: in which a copy
        that is not finished is not yet."""
        ours = (self.layout.home(partition), self.layout.second(partition))
        if self.me.server not in ours[: self.layout.replicas]:
            return True
        role = self._native.role(partition)
        if role in (PRIMARY, UNDECIDED):
            return bool(role == PRIMARY)
        if view is None or view.backup is None:
            return False
        of_this = [holder for holder in (view.primary, view.backup) if holder.server == self.me.server]
        return of_this == ([self.me] if role == BACKUP else [])  # not of an earlier life of this server

    def _join(self, partition: int, view: View) -> None:
        try:
            place = self._entry(view.primary.server)
            if place is None or place["generation"] != view.primary.generation:
                return
            core = native_module.core()
            client = core.ParameterClient(
                self.me.server,
                secrets.randbits(62) | 1,
                1,
                self.register.secret,
                f"ps:{self.register.name}",
                self._silence_s,
            )
            client.connect(bytes.fromhex(place["endpoint"]), *view.primary, timeout_s=self._silence_s)
            question = {
                "what": "attach",
                "partition": partition,
                "holder": list(self.me),
                "endpoint": self._native.endpoint().hex(),
            }
            now = View.from_json(json.loads(client.ask(view.primary.server, json.dumps(question), 600.0)))
            if now.has(self.me):
                self._known[partition] = now
            client.close()
            self._pauses.pop(partition, None)
        except Exception as error:
            pause = min(MAX_PAUSE_S, 2 * self._pauses.get(partition, (0.0, EVENT_S))[1])
            self._pauses[partition] = time.monotonic() + pause, pause
            log.info("partition %d: no copy yet, another try in %.0f s: %s", partition, pause, error)
        finally:
            self._busy.discard(partition)

    def _submit(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._pool.submit(call, *arguments)
        except RuntimeError:
            if not self._stopping.is_set():
                raise

    def stop(self) -> None:
        """Ends run() and every connection."""
        self._stopping.set()
        self._native.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> dict[str, Any]:
        """What it holds: partitions with roles and rows, workers, memory in bytes."""
        return dict(json.loads(self._native.describe()))
