"""Under Horovod's name: how the workers of a job of a fixed size are placed, by placement groups of Ray.

A group of which a node dies before the workers are up would keep them waiting for ever (ray#30276): after a time limit
the group is taken down and made anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horoclone.ray import nodes
from horoclone.ray.worker import BaseHorovodWorker, Where

logger = logging.getLogger(__name__)

GROUP_S, WORKERS_S = 100.0, 30.0  # where the settings do not say
GROUPS = 3  # so many are made before the job is given up


class HalfDead(Exception):
    """Workers of a group did not come up; the text says which, and why."""


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
    asked_for: Callable[[Any], None] = lambda group: None,
) -> tuple[Any, list[dict[str, float]]]:
    """(group, its bundles), when all bundles are reserved. TimeoutError after pg_timeout seconds. asked_for(group) is
    called before it waits."""
    bundles = [
        {name: value for name, value in resources_per_bundle.items() if value} for _ in range(num_bundles)
    ]
    group = placement_group(bundles, strategy=pg_strategy)
    asked_for(group)
    ready, _ = ray.wait([group.ready()], timeout=pg_timeout)
    if not ready:
        remove_placement_group(group)
        raise TimeoutError(
            "Placement group creation timed out. Make sure your cluster either has enough resources or use an "
            f"autoscaling cluster. Asked for {num_bundles} x {bundles[0] if bundles else {}} ({pg_strategy}) for "
            f"{pg_timeout:g} s; {nodes.described()}"
        )
    ray.get(ready)
    return group, bundles


class BaseStrategy:
    """workers: actors in the order of their ranks; places: where each of them runs."""

    def __init__(
        self,
        settings: Any,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
    ) -> None:
        self.settings = settings
        self.use_gpu, self.cpus_per_worker = use_gpu, cpus_per_worker
        self.gpus_per_worker = (gpus_per_worker or 1) * int(use_gpu)
        self.placement_group: Any = None
        self.workers: list[Any] = []
        self.places: list[Where] = []
        self.owns_group = True

    @property
    def num_workers(self) -> int:
        """How many there will be."""
        raise NotImplementedError

    def create_workers(self) -> tuple[list[Any], list[Any]]:
        """(workers by rank, one of each node). TimeoutError when the resources, or the workers, do not come."""
        limit_s = self._workers_timeout_s()
        for attempt in range(1, GROUPS + 1):
            bundles = self._reserve()
            started = [self._start(bundle, rank) for rank, bundle in enumerate(bundles)]
            try:
                found = _wait_for(started, limit_s)
                break
            except HalfDead as error:
                for worker in started:
                    ray.kill(worker)
                if not self.owns_group or attempt == GROUPS:
                    why = (
                        f"{attempt} placement groups were tried"
                        if self.owns_group
                        else "it is not ours to remake"
                    )
                    raise TimeoutError(f"{error}; {why}; {nodes.described()}") from error
                logger.warning("%s; the placement group is made anew", error)
                self.give_group_back()
            except BaseException:
                for worker in started:
                    ray.kill(worker)
                raise
        order = _by_node(found)
        self.workers, self.places = [started[index] for index in order], [found[index] for index in order]
        if self.use_gpu:
            self._show_gpus()
        return self.workers, self.get_node_workers(self.workers)

    def get_node_workers(self, workers: Sequence[Any]) -> list[Any]:
        """The first one of each node."""
        first: dict[str, Any] = {}
        for worker, place in zip(workers, self.places, strict=True):
            first.setdefault(place.node_id, worker)
        return list(first.values())

    def shutdown(self) -> None:
        """Ends the workers, and gives the resources back."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers, self.places = [], []
        self.give_group_back()

    def _reserve(self) -> list[int]:
        """Makes the placement group; the bundle of each worker, -1 for any."""
        raise NotImplementedError

    def _asked_for(self, group: Any) -> None:
        """From now on it is given back when this job ends, whether it has come or not."""
        self.placement_group = group

    def answers(self, calls: Mapping[Any, int]) -> list[Any]:
        """The values of calls of the workers, each with its rank. TimeoutError names those who are silent: Ray tells
        when a worker is lost, but not when it is stopped or its machine is stuck."""
        limit_s = self._workers_timeout_s()
        done, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)
        ray.get(done)  # raises what one of them has raised, which may be why others are silent
        if waiting:
            rank = min(calls[one] for one in waiting)
            silent = sorted({calls[one] for one in waiting})
            raise TimeoutError(
                f"workers {silent} of {len(self.workers)} have started and do not answer within {limit_s:g} s "
                f"(timeout_s of the settings): look at worker {rank} on {self.places[rank]}; {nodes.described()}"
            )
        return list(ray.get(list(calls)))

    def _workers_timeout_s(self) -> float:
        return float(getattr(self.settings, "timeout_s", None) or WORKERS_S)

    def _group_timeout_s(self) -> float:
        return float(getattr(self.settings, "placement_group_timeout_s", None) or GROUP_S)

    def _start(self, bundle: int, rank: int) -> Any:
        where = PlacementGroupSchedulingStrategy(self.placement_group, bundle)
        options = ray.remote(BaseHorovodWorker).options(
            num_cpus=self.cpus_per_worker, num_gpus=self.gpus_per_worker, scheduling_strategy=where
        )
        return options.remote(world_rank=rank, world_size=self.num_workers)

    def give_group_back(self) -> None:
        """Ray ends the workers in it."""
        group, self.placement_group = self.placement_group, None
        if group is not None and self.owns_group:
            remove_placement_group(group)

    def _show_gpus(self) -> None:
        """Every worker sees all GPUs of the workers on its node, its own first one at the place of its local rank, so
        that they can reach each other's memory."""
        given = self.answers({worker.get_gpu_ids.remote(): rank for rank, worker in enumerate(self.workers)})
        calls = {}
        for node in dict.fromkeys(place.node_id for place in self.places):
            here = [rank for rank, place in enumerate(self.places) if place.node_id == node]
            listed = [given[rank][turn] for turn in range(self.gpus_per_worker) for rank in here]
            text = ",".join(map(str, dict.fromkeys(listed)))
            for rank in here:
                calls[self.workers[rank].update_env_vars.remote({"CUDA_VISIBLE_DEVICES": text})] = rank
        self.answers(calls)


class ColocatedStrategy(BaseStrategy):
    """As many workers on each of so many nodes."""

    def __init__(
        self,
        *,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
    ) -> None:
        super().__init__(settings, use_gpu, cpus_per_worker, gpus_per_worker)
        self.num_hosts, self.num_workers_per_host = num_hosts, num_workers_per_host

    @property
    def num_workers(self) -> int:
        """Of all nodes."""
        return self.num_hosts * self.num_workers_per_host

    def _reserve(self) -> list[int]:
        of_host = {
            "CPU": self.cpus_per_worker * self.num_workers_per_host,
            "GPU": self.gpus_per_worker * self.num_workers_per_host,
        }
        self.placement_group, _ = create_placement_group(
            of_host, self.num_hosts, self._group_timeout_s(), "STRICT_SPREAD", self._asked_for
        )
        return [host for host in range(self.num_hosts) for _ in range(self.num_workers_per_host)]


class PGStrategy(BaseStrategy):
    """Workers on as few nodes as can be, or in the placement group that the caller runs in.

    force_create_placement_group: a group of their own in any case.
    """

    def __init__(
        self,
        settings: Any,
        num_workers: int,
        use_gpu: bool,
        cpus_per_worker: int,
        gpus_per_worker: int | None,
        placement_group: Any = None,
        force_create_placement_group: bool = False,
    ) -> None:
        super().__init__(settings, use_gpu, cpus_per_worker, gpus_per_worker)
        self._num_workers = num_workers
        self._given = placement_group
        self._forced = force_create_placement_group

    @property
    def num_workers(self) -> int:
        """As it was asked for."""
        return self._num_workers

    def _reserve(self) -> list[int]:
        given = None if self._forced else self._given or get_current_placement_group()
        if given is not None:
            self.placement_group, self.owns_group = given, False
            return [-1] * self._num_workers
        of_worker = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}
        self.placement_group, _ = create_placement_group(
            of_worker, self._num_workers, self._group_timeout_s(), "PACK", self._asked_for
        )
        return list(range(self._num_workers))


def _wait_for(workers: Sequence[Any], limit_s: float) -> list[Where]:
    """Where each of them has come up. HalfDead when one does not in time, or cannot any more."""
    asked = {worker.where.remote(): number for number, worker in enumerate(workers)}
    found: dict[int, Where] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < len(workers):
        waiting = [ref for ref, number in asked.items() if number not in found]
        done, _ = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            missing = sorted(asked[ref] for ref in waiting)
            raise HalfDead(f"workers {missing} of {len(workers)} did not start within {limit_s:g} s")
        for ref in done:
            try:
                found[asked[ref]] = ray.get(ref)
            except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as error:
                if is_own_fault(error):
                    raise
                raise HalfDead(
                    f"worker {asked[ref]} of {len(workers)} was lost while it started: {error}"
                ) from error
    return [found[number] for number in range(len(workers))]


def is_own_fault(error: BaseException) -> bool:
    """Whether the actor's constructor raised: it would do so anywhere else, too."""
    return "The actor died because of an error raised in its creation task" in str(error)


def _by_node(places: Sequence[Where]) -> list[int]:
    """Numbers of workers so that those of a node follow each other; nodes in the order of their first worker."""
    order = {node: index for index, node in enumerate(dict.fromkeys(place.node_id for place in places))}
    return sorted(range(len(places)), key=lambda number: (order[places[number].node_id], number))
