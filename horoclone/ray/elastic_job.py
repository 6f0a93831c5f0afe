"""The processes of an elastic job on a Ray cluster: an actor in each place.

What has to run and what follows from an end is the supervisor's matter (launch/supervisor.py), as in a job of
horoclonerun. One loop on the caller's thread: an actor that is up, the end of its function and changes of nodes are
events.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horoclone.bootstrap.rendezvous import Server
from horoclone.bootstrap.wire import routable_addresses
from horoclone.launch.elastic_options import Elastic
from horoclone.launch.report import HOROVODS_FAILURE
from horoclone.launch.supervisor import Supervisor, Worker
from horoclone.ray import nodes
from horoclone.ray.strategy import is_own_fault
from horoclone.ray.utils import detect_nics, nics_to_env_var
from horoclone.ray.worker import EXITED, BaseHorovodWorker, Where, kill_perhaps_later
from horoclone.runner.common.util.timeout import TimeoutException

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
START_S = 30.0  # for an actor to come up, where the settings do not say
TOGETHER_S = 10.0  # that the first workers wait for those that have not come up
DOUBT_S = 30.0  # that Ray may call a node alive which has ended with its workers
RAY_S = 0.3  # that Ray may take to say why a worker is lost that the others have lost already
LOST = 255


class JobSpec(NamedTuple):
    """What the executor was asked for. cpus, gpus: of a worker. executable: arguments of start_executable()."""

    settings: Any
    elastic: Elastic
    cpus: float
    gpus: float
    variables: Mapping[str, str]
    executable: tuple[Any, Any, Any]


def wait_for_slots(spec: JobSpec) -> None:
    """Returns when the cluster has room for the smallest job. TimeoutException when it has none in time."""
    smallest, limit_s = spec.elastic.plan.smallest, spec.elastic.timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        found = spec.settings.discovery.find_available_hosts_and_slots()
        if sum(found.values()) >= smallest:
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutException(
                "Timed out waiting for minimum number of slots to become available. Please check that you have enough "
                f"resources to run at least {smallest} Horovod processes with {spec.cpus:g} CPU and "
                f"{spec.gpus:g} GPU each: for {limit_s:g} s there were {sum(found.values())} slots; "
                f"{nodes.described()}"
            )
        time.sleep(min(LOOK_EVERY_S, left_s))  # Ray tells nobody that a node has come


class _End(NamedTuple):
    """How the function of a worker ended. error: what it, or Ray, has raised."""

    code: int
    text: str
    value: Any = None
    error: BaseException | None = None
    at_s: float = 0.0


@dataclass(eq=False)
class _Actor:
    """The process of a worker. where: None until it is up."""

    worker: Worker
    handle: Any
    where: Where | None = None
    end: _End | None = None
    lost_s: float = math.inf  # since when the others are known to have lost it


class ElasticJob:
    """Use once: ElasticJob(spec, queue).run(function). queue: for ray_logger, or None."""

    def __init__(self, spec: JobSpec, log: Any) -> None:
        self._spec, self._log = spec, log
        self._supervisor = Supervisor(spec.elastic, self, self._wake)
        self._secret = secrets.token_hex(32).encode()
        self._server: Server | None = None
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._actors: dict[Worker, _Actor] = {}
        self._there: Mapping[str, Mapping[str, Any]] = {}  # nodes by name, of the last look
        self._first_up_s = math.inf
        self._nodes_seen_s = -math.inf
        self._has_failed = False
        self._strange: list[str] = []  # hosts of the discovery that are no nodes
        self._lost_s: dict[str, float] = {}  # host -> when a worker was lost there, perhaps with its node
        self._start_s = float(getattr(spec.settings, "timeout_s", None) or START_S)
        self._function: Any = None

    def run(self, function: Callable[[Any], Any]) -> list[Any]:
        """function(executable) on every worker; values of those that have finished, by rank. RuntimeError when the job
        fails; nothing of it is left in either case."""
        self._function = function
        supervisor = self._supervisor
        try:
            self._see_nodes(time.monotonic())
            hosts = supervisor.find_hosts()
            addresses = _addresses(host.name for host in hosts)
            self._server = supervisor.serve(self._secret, secrets.token_hex(8), addresses)
            supervisor.watch_hosts()
            while not self._is_over():
                self._turn()
        finally:
            self._close()
        self._raise_failure()
        finished = [self._actors[worker] for worker in supervisor.ranks() if worker.has_finished]
        return [actor.end.value for actor in finished if actor.end is not None]

    def _raise_failure(self) -> None:
        reason, failed = self._supervisor.reason, []
        for worker in self._supervisor.last:
            end = self._actors[worker].end
            if end is not None and end.code != 0 and not worker.dismissed:
                failed.append((end.at_s, worker.number, worker, end))
        if failed:
            _, _, worker, first = min(failed)
            name = f"{worker.place.host}[{worker.place.local}]"
            text = f"the worker in {self.named(worker)} {first.text}\n{HOROVODS_FAILURE.format(name, first.code)}"
            raise RuntimeError(f"{reason}\n{text}" if reason else text) from first.error
        if self._has_failed or reason:
            raise RuntimeError(reason)

    # --- the supervisor calls these (launch/supervisor.py, ProcessBackend)

    def start(self, worker: Worker) -> None:
        node, spec = self._there[worker.place.host], self._spec
        where = NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False)
        options = ray.remote(BaseHorovodWorker).options(
            num_cpus=spec.cpus, num_gpus=spec.gpus, scheduling_strategy=where
        )
        number = worker.place.number
        actor = _Actor(worker, options.remote(number, number + 1))
        self._actors[worker] = actor
        self._hear(actor.handle.where.remote(), partial(self._is_up, actor))

    def kill(self, worker: Worker) -> None:
        kill_perhaps_later(self._actors[worker].handle)

    def dismiss(self, worker: Worker) -> None:
        actor = self._actors[worker]
        ray.kill(actor.handle)
        self._events.put(lambda: self._over(actor, _End(LOST, "is not needed any more")))

    def room(self, now: float) -> Mapping[str, int] | None:
        """As far as Ray says. None where one was lost and the node does not answer: a worker that is sent there would
        be waited for, and places elsewhere stay unused."""
        self._there = nodes.named(nodes.alive())
        self._strange = [host for host in self._supervisor.policy.hosts() if host not in self._there]
        free = nodes.free(self._spec.cpus, self._spec.gpus)
        room = {}
        for name, node in self._there.items():
            if now < self._lost_s.get(name, -math.inf) + DOUBT_S and not nodes.answers(node):
                continue
            starting = sum(actor.worker.place.host == name for actor in self._starting())
            room[name] = free.get(str(node.get("NodeID")), 0) - starting if free is not None else 1 << 15
        return room

    def more_hosts_to_come(self) -> bool | None:
        return True

    def is_ending(self) -> bool:
        return self._has_failed

    def fail(self, now: float) -> None:
        self._has_failed = True

    def formed(self, number: int, ranks: Sequence[Worker], is_first: bool) -> None:
        pass

    def named(self, worker: Worker) -> str:
        where = self._actors[worker].where
        return f"slot {worker.place.local} of {where if where is not None else worker.place.host}"

    def no_room_text(self, limit_s: float) -> str:
        strange = f"; {', '.join(self._strange)} of the discovery are no nodes" if self._strange else ""
        return (
            f"no node had room for a worker for {limit_s:g} s (elastic_timeout){strange}; {nodes.described()}"
        )

    def say(self, text: str) -> None:
        logger.warning("%s", text)

    # --- the loop

    def _wake(self) -> None:
        self._events.put(lambda: None)

    def _turn(self) -> None:
        now = time.monotonic()
        self._see_nodes(now)
        self._supervisor.step(now)
        if self._is_over():
            return
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=self._left_s(now))()
        self._look(time.monotonic())

    def _is_over(self) -> bool:
        if self._has_failed:
            return True
        return not self._supervisor.running() and self._supervisor.is_over(time.monotonic())

    def _left_s(self, now: float) -> float:
        starting = [actor.worker.began_s + self._start_s for actor in self._starting()]
        lost = [self._actors[worker].lost_s + RAY_S for worker in self._supervisor.running()]
        due_s = min([self._supervisor.next_s(now), self._first_up_s + TOGETHER_S, *starting, *lost])
        return max(0.0, min(due_s - now, LOOK_EVERY_S))

    def _starting(self) -> list[_Actor]:
        actors = [self._actors[worker] for worker in self._supervisor.running() if worker in self._actors]
        return [actor for actor in actors if actor.where is None]

    def _see_nodes(self, now: float) -> None:
        if now >= self._nodes_seen_s + LOOK_EVERY_S:
            self._nodes_seen_s = now
            for name, node in nodes.named(nodes.alive()).items():
                self._supervisor.seen_as(name, "node", str(node.get("NodeID")))

    def _look(self, now: float) -> None:
        """At what only time brings."""
        for actor in self._starting():
            if now >= actor.worker.began_s + self._start_s:
                self._over(actor, _End(LOST, f"did not start within {self._start_s:g} s"))
        self._end_the_lost(self._supervisor.lost(), now)
        if now >= self._first_up_s + TOGETHER_S:
            self._first_up_s = math.inf
            self._supervisor.expect_announced()

    def _end_the_lost(self, lost: Mapping[Worker, str], now: float) -> None:
        """Ray takes long to see that a node is gone; the others have seen it, and went on without it."""
        for worker in [one for one in lost if not one.ended]:
            if worker.ended:
                continue  # it went with one before
            actor, host, text = self._actors[worker], worker.place.host, f"was lost: {lost[worker]}"
            if actor.lost_s == math.inf and not self._answers(host):
                # The others learn of all its workers at once: of one that they have not missed yet nobody else tells.
                for beside in [one for one in self._supervisor.running() if one.place.host == host]:
                    self._over(self._actors[beside], _End(LOST, f"{text}; its node does not answer"))
            elif now >= actor.lost_s + RAY_S:
                self._over(actor, _End(LOST, text))
            actor.lost_s = min(actor.lost_s, now)

    def _answers(self, host: str) -> bool:
        node = nodes.named(nodes.alive()).get(host)
        return node is not None and nodes.answers(node)

    # --- actors

    def _hear(self, ref: Any, then: Callable[[Any], None]) -> None:
        """then(future) is an event of the loop when the reference has a value, or an error."""
        ref.future().add_done_callback(lambda future: self._events.put(lambda: then(future)))

    def _is_up(self, actor: _Actor, future: Any) -> None:
        worker, spec = actor.worker, self._spec
        if worker.ended or worker.dismissed or self._has_failed:
            return
        if future.exception() is not None:
            self._over(actor, _end_of(future))
            return
        actor.where = future.result()
        if not any(one.id for one in self._supervisor.workers.values()):
            self._first_up_s = time.monotonic()
        own = self._supervisor.announce(worker) | nics_to_env_var(detect_nics(spec.settings))
        handle = actor.handle
        handle.update_env_vars.remote({"PYTHONUNBUFFERED": "1", **spec.variables, **own})
        handle.take_secret.remote(self._secret)
        if self._log is not None:
            handle.set_queue.remote(self._log)
        ready = handle.start_executable.remote(*spec.executable)
        # As an argument, and not by ray.put(): a node fetches that wherever copies are, also from one that has ended.
        self._hear(handle.work.remote(self._function, ready), lambda done: self._over(actor, _end_of(done)))

    def _over(self, actor: _Actor, end: _End) -> None:
        """Its function has ended, or Ray has lost it."""
        worker, now = actor.worker, time.monotonic()
        if worker.ended or self._has_failed:
            return
        actor.end = end._replace(at_s=now)
        never_up = actor.where is None and (end.error is None or not is_own_fault(end.error))
        if never_up and not worker.dismissed:
            self._supervisor.withdrawn(worker, end.text, now)
        else:
            if end.code == LOST:
                self._lost_s[worker.place.host] = now
            self._supervisor.exited(worker, end.code, end.text, now)
        if end.code == LOST:
            kill_perhaps_later(actor.handle)
        else:
            ray.kill(actor.handle)

    def _close(self) -> None:
        supervisor = self._supervisor
        supervisor.close()
        for worker in supervisor.running():
            if worker in self._actors:
                ray.kill(self._actors[worker].handle)
        supervisor.stop(
            1, supervisor.reason or ("the job has failed" if self._has_failed else "the job is done")
        )
        if self._server is not None:
            time.sleep(0.05)  # the answers are on their way
            self._server.close()


def _addresses(hosts: Iterable[str]) -> list[str]:
    """Where a server for workers on these hosts listens."""
    if hosts and set(hosts) <= {"localhost", "127.0.0.1"}:
        return ["127.0.0.1"]
    found = routable_addresses("")
    return [one for one in found if not one.startswith("127.")] or found


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
