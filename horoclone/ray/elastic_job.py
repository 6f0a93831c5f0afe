"""One elastic job on a Ray cluster: starts a worker, an actor, in each place, and another one where it is lost.

Who is in the job is the membership coordinator's matter (runner/elastic/generations.py), who should be in that of the
launcher's policy (launch/elastic_policy.py), as in a job of horoclonerun; here actors are started and ended, and each
tells the other. One loop on the caller's thread: an actor that is up, the end of its function and changes of nodes are
events.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horoclone.launch.discovery import Lookout, Settled
from horoclone.launch.elastic_policy import Cooldown, Place, Plan, Policy
from horoclone.launch.hosts import Host
from horoclone.launch.usage import LaunchError
from horoclone.membership.coordinator import Limits
from horoclone.ray import nodes
from horoclone.ray.strategy import is_own_fault
from horoclone.ray.utils import detect_nics, nics_to_env_var
from horoclone.ray.worker import EXITED, BaseHorovodWorker, Where
from horoclone.runner.common.util.hosts import SlotInfo
from horoclone.runner.common.util.timeout import TimeoutException
from horoclone.runner.elastic.discovery import source_of
from horoclone.runner.elastic.generations import Generations, Key

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
START_S = 30.0  # for an actor to come up, where the settings do not say
TOGETHER_S = 10.0  # so long do the first workers wait for those that have not come up
DOUBT_S = 30.0  # so long may Ray call a node alive that has ended with its workers
RAY_S = 0.3  # so long may Ray take to say why a worker is lost that the others have lost already
LOST = 255
_FAILED = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
    "The first process to do so was:\nProcess name: {}\nExit code: {}\n"
)


class Wishes(NamedTuple):
    """What the executor was asked for. cpus, gpus: of a worker. executable: arguments of start_executable()."""

    settings: Any
    smallest: int
    largest: int | None
    timeout_s: float
    resets: int | None
    cooldown: Cooldown
    cpus: float
    gpus: float
    variables: Mapping[str, str]
    executable: tuple[Any, Any, Any]


def wait_for_slots(wishes: Wishes) -> None:
    """Returns when the cluster has room for the smallest job. TimeoutException when it has none in time."""
    deadline = time.monotonic() + wishes.timeout_s
    while True:
        found = wishes.settings.discovery.find_available_hosts_and_slots()
        if sum(found.values()) >= wishes.smallest:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutException(
                "Timed out waiting for minimum number of slots to become available. Please check that you have enough "
                f"resources to run at least {wishes.smallest} Horovod processes with {wishes.cpus:g} CPU and "
                f"{wishes.gpus:g} GPU each: for {wishes.timeout_s:g} s there were {sum(found.values())} slots; "
                f"{nodes.described()}"
            )
        time.sleep(min(LOOK_EVERY_S, left_s))  # Ray tells nobody that a node has come


@dataclass(eq=False)
class _Worker:
    """number: of the job, each is given once. where: None until it is up."""

    number: int
    place: Place
    actor: Any
    since: float
    where: Where | None = None
    lost_s: float = math.inf  # since when the others are known to have lost it

    @property
    def key(self) -> Key:
        return self.place.host, self.place.local

    def __str__(self) -> str:
        where = str(self.where) if self.where is not None else self.place.host
        return f"slot {self.place.local} of {where}"


class _End(NamedTuple):
    """How the function of a worker ended. error: what it, or Ray, has raised."""

    code: int
    text: str
    value: Any = None
    error: BaseException | None = None


class ElasticJob:
    """Use once: ElasticJob(wishes, queue).run(function). queue: for ray_logger, or None."""

    def __init__(self, wishes: Wishes, log: Any) -> None:
        self._wishes, self._log = wishes, log
        self._policy = Policy(Plan(wishes.smallest, wishes.largest), wishes.cooldown)
        self._source = source_of(wishes.settings.discovery)
        self._settled = Settled()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lookout = Lookout(self._source, self._wake, LOOK_EVERY_S)
        self._workers: dict[int, _Worker] = {}
        self._next = 0
        self._size = 0  # of the first generation
        self._generations: Generations | None = None
        self._values: dict[Key, Any] = {}
        self._first_up_s = self._nobody_since = math.inf
        self._finishing = False
        self._failure: tuple[str, BaseException | None] | None = None
        self._strange: tuple[str, ...] = ()  # hosts of the discovery that are no nodes
        self._lost_s: dict[str, float] = {}  # host -> when a worker was lost there, perhaps with its node
        self._start_s = float(getattr(wishes.settings, "timeout_s", None) or START_S)
        self._function: Any = None
        self._slots: list[SlotInfo] = []  # of the last generation

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """function(executable) on every worker; values of those that have finished, by rank. RuntimeError when the job
        fails; nothing of it is left in either case."""
        self._function = function
        try:
            self._take_hosts(self._source.find())
            self._lookout.start()
            while not self._is_over():
                self._turn()
        finally:
            self._close()
        if self._failure is not None:
            raise RuntimeError(self._failure[0]) from self._failure[1]
        order = [(slot.hostname, slot.local_rank) for slot in self._slots]
        return [self._values[key] for key in order if key in self._values]

    # --- the loop

    def _wake(self) -> None:
        self._events.put(lambda: None)

    def _turn(self) -> None:
        now = time.monotonic()
        self._start_workers(now)
        try:
            self._events.get(timeout=self._left_s(now))()
        except queue.Empty:
            pass
        for found in self._lookout.take():
            if isinstance(found, LaunchError):
                logger.warning("%s; the nodes stay as they were", found)
            else:
                self._take_hosts(found)
        self._look(time.monotonic())

    def _left_s(self, now: float) -> float:
        starting = [one.since + self._start_s for one in self._workers.values() if one.where is None]
        limit_s = self._nobody_since + self._wishes.timeout_s
        lost = [one.lost_s + RAY_S for one in self._workers.values()]
        due_s = min([limit_s, self._first_up_s + TOGETHER_S, self._policy.next_s(now), *starting, *lost])
        return max(0.0, min(due_s - now, LOOK_EVERY_S))

    def _look(self, now: float) -> None:
        """At what only time brings, and at the membership coordinator."""
        for worker in [one for one in self._workers.values() if one.where is None]:
            if now >= worker.since + self._start_s:
                logger.warning("%s did not start within %g s; another place is tried", worker, self._start_s)
                self._policy.left(worker.number, now)
                self._end(worker, is_lost=True)
        generations = self._generations
        if generations is not None:
            fenced = generations.take_fenced()
            for worker in self._workers.values():
                if worker.key in fenced:
                    _kill_perhaps_later(worker.actor)
            self._end_the_lost(generations.lost(), now)
            self._judge(generations, now)
            if now >= self._first_up_s + TOGETHER_S:
                self._first_up_s = math.inf
                generations.expect(sum(one.where is not None for one in self._workers.values()))
        self._nobody_since = math.inf if self._workers else min(self._nobody_since, now)
        if now >= self._nobody_since + self._wishes.timeout_s and not self._finishing:
            strange = f"; {', '.join(self._strange)} of the discovery are no nodes" if self._strange else ""
            text = (
                f"no node had room for a worker for {self._wishes.timeout_s:g} s (elastic_timeout){strange}"
            )
            self._fail(f"{text}; {nodes.described()}", None)

    def _end_the_lost(self, lost: Mapping[Key, str], now: float) -> None:
        """Ray takes long to see that a node is gone; the others have seen it, and went on without it."""
        for worker in [one for one in self._workers.values() if one.key in lost]:
            if worker.number not in self._workers:
                continue  # it went with one before
            text = f"was lost: {lost[worker.key]}"
            if worker.lost_s == math.inf and not self._answers(worker.place.host):
                self._end_of_a_node(worker.place.host, f"{text}; its node does not answer")
            elif now >= worker.lost_s + RAY_S:
                self._over(worker, _End(LOST, text))
            worker.lost_s = min(worker.lost_s, now)

    def _answers(self, host: str) -> bool:
        node = nodes.named(nodes.alive()).get(host)
        return node is not None and nodes.answers(node)

    def _end_of_a_node(self, host: str, text: str) -> None:
        """The others learn of all its workers at once: of one that they have not missed yet nobody else tells them."""
        for worker in [one for one in self._workers.values() if one.place.host == host]:
            self._over(worker, _End(LOST, text))

    def _is_over(self) -> bool:
        return self._failure is not None or (self._finishing and not self._workers)

    def _take_hosts(self, found: list[Host]) -> None:
        now = time.monotonic()
        there = nodes.named(nodes.alive())
        for name, node in there.items():
            if self._policy.seen_as(name, "node", str(node.get("NodeID"))):
                logger.warning("%s is another node now: its slots are used again", name)
        displaced = self._policy.found(self._settled.take(found, now))
        if self._generations is not None:
            self._generations.displace(
                {one.key: displaced.get(number, "") for number, one in self._workers.items()}
            )

    # --- workers

    def _room(self, there: Mapping[str, Mapping[str, Any]], now: float) -> dict[str, int]:
        """Name of a node -> how many more workers fit there now, as far as Ray says. None where one was lost and the
        node does not answer: a worker that is sent there would be waited for, and places elsewhere stay unused."""
        free = nodes.free(self._wishes.cpus, self._wishes.gpus)
        room = {}
        for name, node in there.items():
            if now < self._lost_s.get(name, -math.inf) + DOUBT_S and not nodes.answers(node):
                continue
            starting = sum(
                1 for one in self._workers.values() if one.where is None and one.place.host == name
            )
            room[name] = free.get(str(node.get("NodeID")), 0) - starting if free is not None else 1 << 15
        return room

    def _start_workers(self, now: float) -> None:
        if self._finishing or self._failure is not None or not self._policy.to_start(now):
            return
        there = nodes.named(nodes.alive())
        self._strange = tuple(host for host in self._policy.hosts() if host not in there)
        for place in self._policy.to_start(now, self._room(there, now)):
            self._start_worker(place, there[place.host], now)
        self._size = self._size or len(self._workers)

    def _start_worker(self, place: Place, node: Mapping[str, Any], now: float) -> None:
        where = NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
        options = ray.remote(BaseHorovodWorker).options(
            num_cpus=self._wishes.cpus, num_gpus=self._wishes.gpus, scheduling_strategy=where
        )
        worker = _Worker(self._next, place, options.remote(place.number, place.number + 1), now)
        self._next += 1
        self._workers[worker.number] = worker
        self._policy.started(worker.number, place, now)
        self._hear(worker.actor.where.remote(), partial(self._is_up, worker))

    def _hear(self, ref: Any, then: Callable[[Any], None]) -> None:
        """then(future) is an event of the loop when the reference has a value, or an error."""
        ref.future().add_done_callback(lambda future: self._events.put(lambda: then(future)))

    def _is_up(self, worker: _Worker, future: Any) -> None:
        if worker.number not in self._workers or self._finishing or self._failure is not None:
            return
        if future.exception() is not None:
            self._ended(worker, future)
            return
        worker.where = future.result()
        now = time.monotonic()
        if self._generations is None:
            wishes = self._wishes
            size = max(self._size, wishes.smallest)
            limits = Limits(size, wishes.smallest, wishes.largest, wishes.timeout_s, wishes.resets)
            self._generations = Generations(limits, self._policy.hosts(), self._stopped, self._wake)
            self._first_up_s = now
        variables = {"PYTHONUNBUFFERED": "1", **self._wishes.variables, **self._variables(worker)}
        secret = variables.pop("HOROCLONE_SECRET").encode()
        actor = worker.actor
        actor.update_env_vars.remote(variables)
        actor.take_secret.remote(secret)
        if self._log is not None:
            actor.set_queue.remote(self._log)
        ready = actor.start_executable.remote(*self._wishes.executable)
        # As an argument, and not by ray.put(): a node fetches that wherever copies are, also from one that has ended.
        self._hear(actor.work.remote(self._function, ready), partial(self._ended, worker))

    def _variables(self, worker: _Worker) -> dict[str, str]:
        place = worker.place
        local_size, cross_rank, cross_size = self._policy.sharing(place)
        size = max(self._size, place.number + 1)
        slot = SlotInfo(place.host, place.number, place.local, cross_rank, size, local_size, cross_size)
        assert self._generations is not None
        own = self._generations.variables(slot) | nics_to_env_var(detect_nics(self._wishes.settings))
        address, _, port = own["HOROCLONE_RENDEZVOUS"].split(",")[0].rpartition(":")
        own |= {
            "HOROVOD_CONTROLLER": "gloo",  # this and the next two for scripts that look, nothing here reads them
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        }
        del own["HOROCLONE_SECRET_FD"]  # the worker knows it better
        return own

    def _ended(self, worker: _Worker, future: Any) -> None:
        """Its function has ended, or Ray has lost it."""
        if worker.number in self._workers and self._failure is None:
            self._over(worker, _end_of(future))

    def _over(self, worker: _Worker, end: _End) -> None:
        now = time.monotonic()
        is_planned, left = False, -1
        generations = self._generations
        was_member = generations is not None and generations.knows(worker.key)
        if generations is not None and was_member:
            if end.code != 0:
                generations.judge_later(worker.key, worker.number, worker.since)
            is_planned, left = generations.ended(worker.key, end.code)
        if is_planned:
            self._policy.left(worker.number, now)
            logger.warning("the worker in %s has left", worker)
            if left == 0:
                self._fail("every worker has left", None)
        elif worker.where is None and (end.error is None or not is_own_fault(end.error)):
            self._policy.left(worker.number, now)  # its node went before it was up: no strike, another place
            logger.warning("the worker in %s %s", worker, end.text)
        elif end.code == 0:
            self._values[worker.key] = end.value
            self._policy.done(worker.number)
            self._finish()
        else:
            if end.code == LOST:
                self._lost_s[worker.place.host] = now
            closed = self._policy.failed(worker.number, None if was_member else False, now)
            logger.warning("the worker in %s %s; %d ranks are left", worker, end.text, max(left, 0))
            self._retire(*closed)
            self._failed(worker, end, left, now)
        self._end(worker, is_lost=end.code == LOST)

    def _failed(self, worker: _Worker, end: _End, left: int, now: float) -> None:
        if self._generations is not None:
            self._judge(self._generations, now)
        has_formed = self._generations is not None and bool(self._generations.slots())
        if left == 0 or (not has_formed and self._policy.all_have_failed()):
            name = f"{worker.place.host}[{worker.place.local}]"
            text = f"the worker in {worker} {end.text}\n{_FAILED.format(name, end.code).rstrip()}"
            self._fail(text, end.error)

    def _judge(self, generations: Generations, now: float) -> None:
        """Workers that have failed, once the others have said whether the job did anything with them."""
        for number, has_progressed in generations.take_judged().items():
            self._retire(*self._policy.judged(number, has_progressed, now))

    def _retire(self, closed: str, others: list[int]) -> None:
        """A slot is not used any more; whoever has come into it meanwhile goes as well."""
        if closed:
            logger.warning("%s", closed)
        for worker in [self._workers[number] for number in others]:
            if self._generations is not None and self._generations.knows(worker.key):
                self._generations.drain([worker.key], closed)
            else:
                self._policy.done(worker.number)
                self._end(worker)

    def _finish(self) -> None:
        """A worker has done its work: the others do theirs, and who has not begun need not."""
        self._finishing = True
        for worker in [one for one in self._workers.values() if one.where is None]:
            self._policy.done(worker.number)
            self._end(worker)

    def _stopped(self, text: str) -> None:
        """The membership coordinator ends the job. On the thread of its server."""
        self._events.put(lambda: self._fail(text, None))

    def _fail(self, text: str, error: BaseException | None) -> None:
        self._failure = self._failure or (text, error)

    def _end(self, worker: _Worker, is_lost: bool = False) -> None:
        self._workers.pop(worker.number, None)
        if is_lost:
            _kill_perhaps_later(worker.actor)
        else:
            ray.kill(worker.actor)

    def _close(self) -> None:
        self._lookout.close()
        for worker in list(self._workers.values()):
            self._end(worker)
        generations = self._generations
        self._slots = generations.slots() if generations is not None else []
        if generations is not None:
            generations.close(self._failure[0] if self._failure is not None else "the job is done")


def _kill_perhaps_later(actor: Any) -> None:
    """Of an actor that may be lost with its node: ray.kill() waits for the node until Ray has seen its end, 30 s."""

    def kill() -> None:
        with contextlib.suppress(Exception):  # the cluster, or our connection to it, may have ended meanwhile
            ray.kill(actor)

    threading.Thread(target=kill, name="hc-ray-kill", daemon=True).start()


def _end_of(future: Any) -> _End:
    error = future.exception()
    if error is None:
        how, value = future.result()
        if how == EXITED:
            return _End(value, f"ended with SystemExit({value})")
        return _End(0, "has finished", value)
    text = " ".join(str(error).split())
    if isinstance(error, ray.exceptions.RayActorError):
        return _End(LOST, f"was lost: {text}", None, error)
    return _End(1, f"failed: {type(error).__name__}: {text}", None, error)
