"""Under Horovod's name: what starts workers on the hosts that there are, and others when those are lost or come.

For schedulers that start processes themselves; horoclonerun has its own (launch/elastic_job.py). Workers that find
each other over HTTP say what becomes of them with record_ready() and their ends, and registration.py decides. Workers
that were given the variables of runner.gloo_run.create_slot_env_vars() call hvd.init(), and the roster decides who is
in (generations.py); the driver then only starts and ends them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from horoclone.bootstrap.roster import Limits
from horoclone.runner.common.util import hosts, timeout
from horoclone.runner.elastic.discovery import DiscoveredHosts, HostDiscovery, HostManager
from horoclone.runner.elastic.generations import Generations
from horoclone.runner.elastic.registration import WorkerStateRegistry
from horoclone.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient
from horoclone.runner.util.threads import in_thread

# Scripts and tests replace these; horovod.run() and horovodrun's jobs of this process obey them too.
DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
ELASTIC_TIMEOUT_SECS = 600

Slot = hosts.SlotInfo
CreateWorker = Callable[[Slot, list[threading.Event]], tuple[int, float]]
Assignments = dict[str, list[Slot]]


class Results:
    """error_message: why the job ended, where no worker says it. worker_results: 'host[slot]' -> (exit code, time)."""

    def __init__(self, error_message: str | None, worker_results: dict[str, tuple[int, float]]) -> None:
        self.error_message = error_message
        self.worker_results = worker_results


class ResultsRecorder:
    """Keeps what workers end with, and waits for their threads."""

    def __init__(self) -> None:
        self._error_message: str | None = None
        self._worker_results: dict[str, tuple[int, float]] = {}
        self._threads: list[threading.Thread] = []

    def expect(self, worker_thread: threading.Thread) -> None:
        """get_results() waits for it."""
        self._threads.append(worker_thread)

    def set_error_message(self, error_message: str | None) -> None:
        """The first one that is no None stays."""
        self._error_message = self._error_message or error_message

    def add_result(self, key: str, value: tuple[int, float]) -> None:
        """The first one of each worker stays."""
        self._worker_results.setdefault(key, value)

    def get_results(self) -> Results:
        """When all threads have ended, those that are started meanwhile too."""
        while self._threads:
            self._threads.pop(0).join()
        return Results(self._error_message, self._worker_results)


class ElasticDriver:
    """rendezvous: a RendezvousServer, whose init() is told of each plan. discovery: a HostDiscovery.

    timeout: seconds in which enough slots have to be there (default: HOROVOD_ELASTIC_TIMEOUT, or 600). A host of
    which a worker failed is not used again, or only after a while of cooldown_range. Looks for hosts in a thread of
    its own from the beginning on.
    """

    def __init__(
        self,
        rendezvous: Any,
        discovery: HostDiscovery,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        timeout: float | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        verbose: int = 0,
        min_np: int | None = None,
        max_np: int | None = None,
    ) -> None:
        for name, value in (("min_np", min_np), ("max_np", max_np)):
            if value is not None:
                new = name.replace("np", "num_proc")
                warnings.warn(f"{name} is deprecated, use {new} instead", DeprecationWarning, stacklevel=2)
        self._min_num_proc = (min_num_proc if min_np is None else min_np) or 1
        self._max_num_proc = max_num_proc if max_np is None else max_np
        self._rendezvous, self._verbose, self._reset_limit = rendezvous, verbose, reset_limit
        self._host_manager = HostManager(discovery, cooldown_range)
        self._timeout = timeout or float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", ELASTIC_TIMEOUT_SECS))
        self._wait_hosts_cond = threading.Condition()
        self._plan_lock = threading.RLock()  # guards the next four
        self._host_assignments: Assignments = {}
        self._world_size = 0
        self._running: dict[tuple[str, int], Slot] = {}
        self._ends: dict[tuple[str, int], tuple[int, float]] = {}  # of workers of the newest generation
        self._create_worker_fn: CreateWorker | None = None
        self._generations: Generations | None = None
        self._worker_clients: dict[tuple[str, int], WorkerNotificationClient] = {}
        self._timestamp = 0
        self._worker_registry = WorkerStateRegistry(self, self._host_manager, reset_limit)
        self._results = ResultsRecorder()
        self._shutdown = threading.Event()
        self._stop_lock = threading.Lock()
        self._discovery_thread = in_thread(self._discover_hosts, name="hc-discovery")

    # --- for whoever starts the job

    def start(
        self,
        num_proc: int | None = None,
        create_worker_fn: CreateWorker | None = None,
        np: int | None = None,
    ) -> None:
        """Waits for so many slots, and starts a worker in each slot that there is, up to max_num_proc.

        create_worker_fn(slot_info, events) runs one, in a thread of its own, and returns (exit code, time) when it has
        ended. It ends the worker when one of the events is set.
        """
        size = num_proc if np is None else np
        if size is None or create_worker_fn is None:
            raise ValueError("ElasticDriver.start: num_proc and create_worker_fn say what to start")
        self._create_worker_fn = create_worker_fn
        self._activate_workers(size)

    def resume(self) -> None:
        """Plans anew with the hosts that there are now, and starts workers in slots that have none."""
        self._activate_workers(self._min_num_proc)

    def stop(self, error_message: str | None = None) -> None:
        """Ends the job: sets the event of every worker. Once is enough; error_message becomes that of the results."""
        self._results.set_error_message(error_message)
        with self._stop_lock:
            self._shutdown.set()
            with self._wait_hosts_cond:
                self._wait_hosts_cond.notify_all()
            generations, self._generations = self._generations, None
            if generations is not None:
                generations.close(error_message or "the driver has ended the job")
        self._rendezvous.stop()
        if threading.current_thread() is not self._discovery_thread:
            self._discovery_thread.join()

    def finished(self) -> bool:
        """Whether the job has ended, or is about to."""
        return self._shutdown.is_set()

    def get_results(self) -> Results:
        """When all workers have ended."""
        return self._results.get_results()

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> DiscoveredHosts:
        """The hosts, when they have so many slots. TimeoutException after too long, RuntimeError when the job ends."""
        more = (
            " An elastic job also requires that at least two hosts are available to resolve compatible network "
            "interfaces. If you know which interfaces are compatible in your network, set `--network-interface` to "
            "skip this check."
            if min_hosts > 1
            else ""
        )
        limit = timeout.Timeout(
            self._timeout,
            "Timed out waiting for {activity}. Please check that you have enough resources to run at least "
            f"{min_num_proc} Horovod processes.{more}",
        )
        with self._wait_hosts_cond:
            while True:
                current = self._host_manager.current_hosts
                if (
                    current.count_available_slots() >= min_num_proc
                    and len(current.available_hosts) >= min_hosts
                ):
                    return current
                if self.finished():
                    raise RuntimeError("Job has been shutdown, see above error messages for details.")
                self._wait_hosts_cond.wait(limit.remaining())
                limit.check_time_out_for("minimum number of slots to become available")

    # --- for workers, and for whoever speaks for them

    def register_worker_server(self, host: str, slot: int, addresses: Any, secret_key: bytes) -> None:
        """The worker listens to notices there."""
        self._worker_clients[host, slot] = WorkerNotificationClient(addresses, secret_key, self._verbose)

    def get_worker_client(self, slot_info: Slot) -> WorkerNotificationClient | None:
        """For notices to the worker of that place; None when it has not said where it listens."""
        return self._worker_clients.get((slot_info.hostname, slot_info.local_rank))

    def record_ready(self, host: str, slot: int) -> None:
        """The worker waits for its place in the next rendezvous; returns when all have said something."""
        self._worker_registry.record_ready(host, slot)

    def world_size(self) -> int:
        """Of the newest plan, or generation."""
        with self._plan_lock:
            self._look_at_generation()
            return self._world_size

    def local_size(self, host: str) -> int:
        """How many of it are on this host."""
        return len(self.host_assignments.get(host, ()))

    def get_slot_info(self, host: str, slot: int) -> Slot:
        """The place of the worker there; INVALID_SLOT_INFO (all -1) when it has none, and should end with code 0."""
        if self._host_manager.is_blacklisted(host):
            return hosts.INVALID_SLOT_INFO
        listed = self.host_assignments.get(host, ())
        return next((one for one in listed if one.local_rank == slot), hosts.INVALID_SLOT_INFO)

    def has_rank_assignment(self, host: str, slot: int) -> bool:
        """Whether it has one."""
        return self.get_slot_info(host, slot).rank >= 0

    def get_coordinator_info(self) -> Slot | None:
        """The place of rank 0; None before start()."""
        every = [one for listed in self.host_assignments.values() for one in listed]
        return next((one for one in every if one.rank == 0), None)

    @property
    def host_assignments(self) -> Assignments:
        """Host -> places, of the newest plan, or generation."""
        with self._plan_lock:
            self._look_at_generation()
            return self._host_assignments

    # --- plans

    def _activate_workers(self, min_num_proc: int) -> None:
        current = self.wait_for_available_slots(min_num_proc)
        with self._plan_lock:
            pending = self._update_host_assignments(current)
            self._worker_registry.reset(self._world_size)
            for slot in pending:
                self._start_worker_process(slot)

    def _plan(self, current: DiscoveredHosts) -> list[Slot]:
        listed = [hosts.HostInfo(host, current.get_slots(host)) for host in current.host_assignment_order]
        return hosts.get_host_assignments(listed, self._min_num_proc, self._max_num_proc)

    def _update_host_assignments(self, current: DiscoveredHosts) -> list[Slot]:
        """Takes up a new plan; the places where nobody runs."""
        plan = self._plan(current)
        before, after = set(self._host_assignments), {slot.hostname for slot in plan}
        if before and not before & after:
            raise RuntimeError("No hosts from previous set remaining, unable to broadcast state.")
        occupied = {
            (slot.hostname, slot.local_rank) for one in self._host_assignments.values() for slot in one
        }
        self._take_up(plan)
        self._rendezvous.init(plan)
        return [slot for slot in plan if (slot.hostname, slot.local_rank) not in occupied]

    def _take_up(self, plan: Iterable[Slot]) -> None:
        self._host_assignments = {}
        for slot in plan:
            self._host_assignments.setdefault(slot.hostname, []).append(slot)
        self._world_size = sum(map(len, self._host_assignments.values()))

    def _look_at_generation(self) -> None:
        """The roster's newest generation is the plan, where there is one."""
        found = self._generations.slots() if self._generations is not None else []
        if found:
            self._take_up(found)

    def _discover_hosts(self) -> None:
        is_first = True
        while not self.finished():
            try:
                with self._wait_hosts_cond:
                    update = self._host_manager.update_available_hosts()
                    if update != HostUpdateResult.no_update:
                        self._notify_workers_host_changes(self._host_manager.current_hosts, update)
                        self._wait_hosts_cond.notify_all()
                if update != HostUpdateResult.no_update and self._generations is not None:
                    self._fill_up()
            except RuntimeError as error:
                logging.warning("%s", error)
                if is_first:  # it never worked: a mistake, no outage
                    self._results.set_error_message(str(error))
                    self._shutdown.set()
                    with self._wait_hosts_cond:
                        self._wait_hosts_cond.notify_all()
            is_first = False
            self._shutdown.wait(DISCOVER_HOSTS_FREQUENCY_SECS)

    def _notify_workers_host_changes(self, current: DiscoveredHosts, update: int) -> None:
        """Tells rank 0, where the plan would change. Workers of the roster hear of it from there."""
        then: Assignments = {}
        if current.count_available_slots() >= self._min_num_proc:
            for slot in self._plan(current):
                then.setdefault(slot.hostname, []).append(slot)
        if then == self.host_assignments:
            return
        coordinator = self.get_coordinator_info()
        client = self.get_worker_client(coordinator) if coordinator else None
        if client is None:
            return
        self._timestamp = max(self._timestamp + 1, int(time.time()))  # two within a second are two
        try:
            client.notify_hosts_updated(self._timestamp, update)
        except (OSError, EOFError):
            logging.warning("rank 0 could not be told that hosts came or went")

    # --- workers

    def _start_worker_process(self, slot: Slot) -> None:
        events = [self._shutdown, self._host_manager.get_host_event(slot.hostname)]
        given = replace(slot, variables=partial(self._variables, slot))
        key = slot.hostname, slot.local_rank

        def run_worker() -> None:
            assert self._create_worker_fn is not None
            try:
                exit_code, at_s = self._create_worker_fn(given, events)
            except Exception:
                logging.exception("the worker of %s[%d] could not be run", *key)
                exit_code, at_s = 1, time.time()
            try:
                self._handle_worker_exit(slot, exit_code, at_s)
            except RuntimeError as error:
                logging.warning("%s", error)

        self._running[key] = slot
        thread = threading.Thread(target=run_worker, name=f"hc-worker-{key[0]}-{key[1]}", daemon=True)
        self._results.expect(thread)
        thread.start()

    def _variables(self, slot: Slot) -> dict[str, str]:
        with self._plan_lock:
            if self.finished():
                raise RuntimeError("the job has ended: no more workers are started")
            if self._generations is None:
                limits = Limits(
                    self._world_size, self._min_num_proc, self._max_num_proc, self._timeout, self._reset_limit
                )
                self._generations = Generations(limits, self._host_assignments, self._stopped)
            return self._generations.variables(slot)

    def _stopped(self, text: str) -> None:
        """The roster has ended the job. On the thread of its server, which stop() waits for."""
        in_thread(self.stop, (text,))

    def _handle_worker_exit(self, slot: Slot, exit_code: int, at_s: float) -> None:
        key = slot.hostname, slot.local_rank
        name = f"{slot.hostname}[{slot.local_rank}]"
        with self._plan_lock:
            self._running.pop(key, None)
            generations = self._generations
        if generations is not None and generations.knows(key):
            self._member_ended(generations, key, exit_code, at_s)
            return
        if not self.has_rank_assignment(*key):
            return  # its host has failed, or is not there any more
        record = self._worker_registry.record_failure if exit_code else self._worker_registry.record_success
        rendezvous = record(*key)
        if self.finished() and self._worker_registry.last_rendezvous() == rendezvous:
            self._results.add_result(name, (exit_code, at_s))

    def _member_ended(
        self, generations: Generations, key: tuple[str, int], exit_code: int, at_s: float
    ) -> None:
        """A worker of the roster has ended: its host is closed if it failed, as by Horovod, and slots get new ones."""
        with self._plan_lock:
            was_out = self._host_manager.is_blacklisted(key[0]) or self.finished()
            beside = [one for one in self._running if one[0] == key[0]]
            is_planned, left = generations.ended(key, exit_code, beside if exit_code and not was_out else ())
            if not is_planned and not was_out:
                self._ends[key] = exit_code, at_s
            if exit_code and not was_out and not generations.is_finishing():
                self._host_manager.blacklist(key[0])
            ends = left == 0 or (generations.is_finishing() and not self._running)
        if ends:
            self._end_with_results()
        elif not self.finished() and not generations.is_finishing():
            if left < 0 and not self._host_manager.current_hosts.available_hosts:
                self._end_with_results()  # every host has failed before there was a job
            else:
                self._fill_up()
                self._wait_for_company()

    def _end_with_results(self) -> None:
        last = {(one.hostname, one.local_rank) for one in self._last_generation()}
        for (host, slot), value in self._ends.items():
            if not last or (host, slot) in last:
                self._results.add_result(f"{host}[{slot}]", value)
        self.stop()

    def _last_generation(self) -> list[Slot]:
        return self._generations.slots() if self._generations is not None else []

    def _fill_up(self) -> None:
        """Workers of the roster: those whose place is gone leave, and places without a worker get one."""
        with self._plan_lock:
            generations, current = self._generations, self._host_manager.current_hosts
            if generations is None or self.finished() or generations.is_finishing():
                return
            slots = {
                (host, local): None
                for host in current.host_assignment_order
                for local in range(current.get_slots(host))
            }
            gone = [key for key in self._running if key not in slots]
            reason = "its host, or its slot, is not there any more"
            generations.displace({key: reason if key in gone else "" for key in self._running})
            staying = len(self._running) - len(gone)
            room = len(slots) if self._max_num_proc is None else self._max_num_proc - staying
            free = [key for key in slots if key not in self._running][: max(0, room)]
            counts = {host: current.get_slots(host) for host in current.host_assignment_order}
            size = staying + len(free)
            for number, (host, local) in enumerate(free, staying):
                across = [name for name, count in counts.items() if count > local]
                place = Slot(host, number, local, across.index(host), size, counts[host], len(across))
                self._start_worker_process(place)
            generations.expect(size)

    def _wait_for_company(self) -> None:
        """The last thread of a worker stays until another is started, or the job ends: get_results() waits for it."""
        limit = timeout.Timeout(self._timeout, "Timed out waiting for {activity}.")
        with self._wait_hosts_cond:
            while not self._running and not self.finished() and not limit.timed_out():
                self._wait_hosts_cond.wait(min(1.0, DISCOVER_HOSTS_FREQUENCY_SECS))
        if not self._running and not self.finished():
            self._end_with_results()
