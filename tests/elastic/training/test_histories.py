"""Thousands of whole elastic jobs on a simulated clock: no commit is lost or torn, no sample is lost or counts twice.

Real are the membership coordinator, run_fn, states and samplers; there are no processes and no network.

Each process of a job is a thread that runs hvd.elastic.run until it waits: for a collective, or for a generation. One
of them runs at a time, and which one is drawn, as are kills, newcomers, requests to leave, and when anybody hears of
them. So a history has its seed, and is the same each time.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from horoclone.elastic import member, replicas, run, state
from horoclone.elastic.generation import Generation
from horoclone.elastic.run import run_fn
from horoclone.elastic.sampler import ElasticSampler
from horoclone.elastic.state import ObjectState
from horoclone.errors import PeerLost
from horoclone.membership.coordinator import Coordinator
from horoclone.membership.records import ID_BYTES, Evicted, Limits, Record, Stop
from horoclone.runtime import lifecycle, topology

EPOCHS = 3
MAX_TURNS = 20_000  # of a history; one that takes more waits for ever


class Killed(BaseException):
    """Ends the thread of a process that was killed."""


@dataclass
class Rendezvous:
    """One collective of a generation: who has come with what. is_done: all have."""

    name: str
    came: dict[int, Any] = field(default_factory=dict)
    is_done: bool = False


class Process:
    """A thread, and where it waits. wish: what it wants to be told before it goes on; None: it can go on."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.id = number.to_bytes(ID_BYTES, "little")
        self.now: Record | None = None
        self.is_away = False  # it has shut its generation down
        self.calls = 0  # collectives in its generation
        self.offered: tuple[int, ...] = ()
        self.lost_rank: int | None = None
        self.heard = 0  # of notices
        self.leaving = ""
        self.ended = ""  # "killed", "done", "left", "out"
        self.state: ObjectState | None = None
        self.wish: Callable[[], bool] | None = None
        self._is_killed = False
        self._baton = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    # --- the simulator's thread

    def can_run(self) -> bool:
        return not self.ended and (self.wish is None or self.wish())

    def resume(self) -> None:
        """Lets it run until it waits again, or ends."""
        self.world.current = self
        self._baton.release()
        self.world.baton.acquire()
        if self.world.failure is not None:
            raise self.world.failure

    def kill(self) -> None:
        self._is_killed = True
        self.resume()
        assert self.ended == "killed"
        self._thread.join(10)

    # --- its own thread

    def wait(self, wish: Callable[[], bool] | None = None) -> None:
        """Until the simulator lets it go on."""
        self.wish = wish
        self.world.baton.release()
        self._baton.acquire()
        self.wish = None
        if self._is_killed:
            raise Killed

    def _live(self) -> None:
        self._baton.acquire()
        try:
            if self._is_killed:
                raise Killed
            self.world.next_generation()
            self.wait()  # it makes its model
            self.world.train(self)
            self.ended = "done"
        except Killed:
            self.ended = "killed"
        except SystemExit as end:
            self.ended = "left" if not end.code else "out"
        except BaseException as error:
            self.ended = "failed"
            self.world.failure = error
        self.world.baton.release()


class World:
    """A job: what happens to it is drawn from its seed."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.chance = random.Random(seed)
        self.seed, self.clock = seed, 0.0
        self.length, self.batch = self.chance.randint(0, 25), self.chance.randint(1, 3)
        self.commit_every = self.chance.choice([1, 1, 2, 3])
        size = self.chance.randint(1, 4)
        smallest = self.chance.randint(1, size)
        self.largest = self.chance.choice([size, size + 2])
        self.coordinator = Coordinator(Limits(size, smallest, self.largest), self.chance.randbytes)
        self.baton = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.processes: list[Process] = []
        self.meetings: dict[tuple[int, int], Rendezvous] = {}
        self.unheard: list[tuple[float, Process]] = []  # ends that the launcher has not seen yet
        self.records: dict[int, Record] = {}
        self.safe = (0, 0)  # steps at the newest commit that has come to its end on some rank, and its number
        self.is_calm = False
        self.finished: list[list[list[int]]] = []  # of each process that did its work: the samples by epoch
        self.current: Process
        self._patch(patch)
        for _ in range(size):
            self.start()

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        class Quiet:
            """In the place of what one process has of its kind: times, and the board of notices."""

            def __getattr__(self, _: str) -> Callable[..., None]:
                return lambda *_args, **_more: None

        patch.setattr(topology, "size", lambda: len(self.record().members))
        patch.setattr(topology, "rank", lambda: self.record().members.index(self.current.id))
        patch.setattr(member, "is_elastic", lambda: True)
        patch.setattr(member, "offer_commits", lambda commits: setattr(self.current, "offered", commits))
        patch.setattr(member, "leave_requested", lambda: self.current.leaving or None)
        patch.setattr(member, "leave", self._leave)
        patch.setattr(member, "told_by_all", lambda words, name: list(map(list, self.gather(words, name))))
        patch.setattr(lifecycle, "shutdown", lambda: None)
        for module in (state, replicas):
            patch.setattr(module, "is_ours", lambda _: True)
        for module in (run, state):
            patch.setattr(module, "generation", self.generation)
            patch.setattr(module, "watch", Quiet())
        patch.setattr(run, "notification_manager", Quiet())

    # --- what a process calls

    def record(self) -> Record:
        assert self.current.now is not None
        return self.current.now

    def generation(self) -> Generation:
        now = self.record()
        rank = now.members.index(self.current.id)
        return Generation(
            now.number, rank, len(now.members), now.newcomers, now.commit_root, now.commit, now.skip_sync, ()
        )

    def gather(self, mine: Any, name: str) -> tuple[Any, ...]:
        """What every rank brings, by rank. PeerLost where one was killed before all had come, or by chance after."""
        me, now = self.current, self.record()
        key, rank = (now.number, me.calls), now.members.index(me.id)
        me.calls += 1
        meeting = self.meetings.setdefault(key, Rendezvous(name))
        assert meeting.name == name, f"rank {rank} calls {name} where others call {meeting.name}"
        meeting.came[rank] = mine
        meeting.is_done = len(meeting.came) == len(now.members)
        me.wait(lambda: meeting.is_done or self._missing(now, meeting) is not None)
        missing = self._missing(now, meeting)
        if missing is None and self.chance.random() < 0.5:
            missing = self._gone(now)  # its end may be noticed before the result has come
        if missing is not None:
            me.lost_rank = missing
            raise PeerLost(f"rank {missing} is gone", missing)
        return tuple(meeting.came[one] for one in range(len(now.members)))

    def _missing(self, now: Record, meeting: Rendezvous) -> int | None:
        """A rank that has not come and never will."""
        if meeting.is_done:
            return None
        for rank, id_ in enumerate(now.members):
            one = self.process(id_)
            seen = one.now.number if one.now is not None else 0
            has_left = seen > now.number or (seen == now.number and one.is_away)
            if rank not in meeting.came and (one.ended or has_left):
                return rank
        return None

    def _gone(self, now: Record) -> int | None:
        return next((r for r, id_ in enumerate(now.members) if self.process(id_).ended == "killed"), None)

    def process(self, id_: bytes) -> Process:
        return self.processes[int.from_bytes(id_, "little")]

    def next_generation(self) -> None:
        """init(): waits for a generation, and connects with its ranks; again where one of them is lost meanwhile."""
        me = self.current
        while True:
            me.is_away = True
            seen = me.now.number if me.now is not None else 0
            if me.now is not None and me.lost_rank is not None:
                self.coordinator.suspect(seen, me.lost_rank, self.clock)
            me.lost_rank = None
            answer = None
            while not isinstance(answer, Record):
                if me.leaving:
                    self._leave(me.leaving)
                    raise SystemExit(0)
                self.coordinator.form(me.id, seen, me.offered, self.clock)
                me.wait(lambda: bool(me.leaving) or self._is_to_look_again(me))
                answer = self.coordinator.answer(me.id)
                if isinstance(answer, Evicted | Stop):
                    raise SystemExit(answer.code)
            assert self.records.setdefault(answer.number, answer) == answer
            me.now, me.calls, me.is_away = answer, 0, False
            try:
                self.gather(None, "connect")
            except PeerLost:
                continue
            self.coordinator.established(answer.number)
            return

    def _is_to_look_again(self, me: Process) -> bool:
        """There is an answer, or the membership coordinator has released it, and it asks again, as it does every second."""
        return (
            self.coordinator.members[me.id].waits_after is None or self.coordinator.answer(me.id) is not None
        )

    def _leave(self, reason: str) -> None:
        self.coordinator.leave(self.current.id, reason, self.clock)

    def broadcast(self, mine: Any, root_rank: int, name: str) -> Any:
        root, sent = self.gather((root_rank, pickle.dumps(mine)), name)[root_rank]
        assert root == root_rank, "the ranks do not agree on whose state counts"
        return mine if topology.rank() == root else pickle.loads(sent)

    def train(self, me: Process) -> None:
        """A script: epochs over the samples, which are the weights; a commit every so many steps."""
        sampler = ElasticSampler(range(self.length), seed=self.seed)
        me.state = ObjectState(
            self.broadcast, topology.rank, sampler=sampler, epoch=0, steps=0, ranks=0, seen=[], all=[]
        )

        def training(one: Any) -> None:
            if self.record().number > 1:
                assert one.steps >= self.safe[0], f"it begins at step {one.steps}, {self.safe} was committed"
            while one.epoch < EPOCHS:
                share = list(one.sampler)
                for begin in range(0, len(share), self.batch):
                    mine = share[begin : begin + self.batch]
                    taken = self.gather(mine, "step")
                    one.seen += [sample for turn in zip(*taken, strict=True) for sample in turn]
                    one.ranks = len(taken)
                    one.sampler.record_batch(begin, len(mine))
                    one.steps += 1
                    if one.steps % self.commit_every == 0:
                        self._commit(one)
                    elif one.steps % 3 == 1:
                        one.check_host_updates()
                self.check_epoch(one)
                one.all.append(one.seen)
                one.seen = []
                one.epoch += 1
                one.sampler.set_epoch(one.epoch)
                self._commit(one)

        run_fn(training, self.next_generation)(me.state)
        self.finished.append(me.state.all)

    def _commit(self, one: Any) -> None:
        steps = one.steps
        one.commit()
        self.safe = max(self.safe, (steps, one._commit_number))

    def check_epoch(self, one: Any) -> None:
        """Every sample in the order of the seed, and at the end fewer twice than there were ranks in the last step."""
        order = list(range(self.length))
        random.Random(self.seed + one.epoch).shuffle(order)
        assert one.seen[: self.length] == order, (one.epoch, one.seen, order)
        assert len(one.seen) - self.length < max(one.ranks, 1), one.seen

    # --- what happens to it

    def start(self) -> None:
        process = Process(self, len(self.processes))
        self.processes.append(process)
        self.coordinator.start(process.id, f"host{process.number % 2}", process.number, self.clock, near=True)
        self.coordinator.join(
            process.id, b"incarnat", f"host{process.number % 2}", process.number, self.clock
        )

    def alive(self) -> list[Process]:
        return [one for one in self.processes if not one.ended]

    def turn(self) -> None:
        """Something happens. Mostly a process goes on."""
        self.clock += self.chance.choice([0.0, 0.0, 0.001, 0.05])
        for one in self.alive():
            self.coordinator.heard(one.id, self.clock)
        self._hear_of_ends()
        self.coordinator.step(self.clock)
        draw = self.chance.random()
        alive = self.alive()
        if not self.is_calm and draw < 0.03 and len(alive) > 1:
            self._kill(self._victim(alive))
        elif not self.is_calm and draw < 0.035 and len(alive) > 1:
            self._victim(alive).leaving = "SIGTERM"
        elif draw < 0.08 and len(alive) < self.largest and len(self.processes) < 40:
            self.start()
        elif draw < 0.14:
            self._announce(self.chance.choice(alive))
        else:
            ready = [one for one in alive if one.can_run()]
            if ready:
                self.chance.choice(ready).resume()
            else:
                self.clock += 1.0
        for one in alive:
            if one.ended in ("done", "left", "out"):
                if one.ended == "done":
                    self.coordinator.finish(self.clock)
                self.coordinator.dead(one.id, f"it {one.ended}", self.clock)

    def _victim(self, alive: list[Process]) -> Process:
        """Mostly one without whom somebody is left who has the state."""
        members = self.coordinator.live()
        spared = [
            one for one in alive if members and one.id == members[-1].id and self.chance.random() < 0.95
        ]
        return self.chance.choice([one for one in alive if one not in spared] or alive)

    def _kill(self, victim: Process) -> None:
        victim.kill()
        self.coordinator.disconnected(victim.id, self.clock)
        self.unheard.append((self.clock + self.chance.choice([0.0, 0.01, 0.3]), victim))

    def _hear_of_ends(self) -> None:
        """The launcher has seen that a process has ended."""
        for when, one in [(when, one) for when, one in self.unheard if when <= self.clock]:
            self.unheard.remove((when, one))
            self.coordinator.dead(one.id, "it was killed", self.clock)

    def _announce(self, one: Process) -> None:
        """A notice comes to a process, and its own wish to leave to the membership coordinator."""
        if one.leaving:
            self.coordinator.announce(one.id, one.leaving, self.clock)
        seq, wanted, update = self.coordinator.notice()
        if one.state is not None and seq > one.heard and one.now is not None and wanted > one.now.number:
            one.heard = seq
            one.state.on_hosts_updated(wanted, update)

    def play(self) -> str:
        """The whole history; how it ended: "done", "lost" (nobody is left who had the state) or "left" (nobody is left)."""
        troubled = self.chance.randint(20, 600)
        for turn in range(MAX_TURNS):
            self.is_calm = turn > troubled
            if not self.alive():
                break
            self.turn()
        else:
            waiting = [(one.number, one.now and one.now.number, one.calls) for one in self.alive()]
            raise AssertionError(f"these wait for ever: {waiting}")
        for one in self.processes:
            assert one.ended != "failed"
        if self.finished:
            assert all(done == self.finished[0] for done in self.finished), self.finished
            return "done"
        return "lost" if self.coordinator.stopped is not None else "left"


@pytest.mark.in_turn
@pytest.mark.parametrize("first", range(0, 3000, 75))
def test_whatever_happens_each_sample_counts_once_and_no_commit_is_lost(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Losses at any moment, also two at once, in a commit and while a generation forms; newcomers; requests to leave."""
    ends, generations = Counter[str](), 0
    for seed in range(first, first + 75):
        with monkeypatch.context() as patch:
            world = World(seed, patch)
            try:
                end = world.play()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
        ends[end] += 1
        generations += len(world.records)
        if end == "done":
            assert len(world.finished[0]) == EPOCHS, seed
        elif end == "lost":
            stopped = world.coordinator.stopped
            assert stopped is not None and stopped.text.startswith("nobody is left"), seed
    assert ends["done"] > 0.5 * 75, ends
    assert generations > 2.5 * 75, generations
