"""Ray Train's own TorchTrainer on horoclone: TorchTrainer(..., torch_config=HorocloneConfig()).

Ray Train starts, watches and ends the workers. Its controller, an actor, calls the backends below: they open the
rendezvous there and tell each worker its place. Imports torch and `ray.train`; no other module of this package does.
Thread: the controller's; what the workers call is said.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import importlib
import os
import secrets as random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from horoclone import errors
from horoclone.launch.environment import member_variables, rank_variables
from horoclone.launch.hosts import Placement
from horoclone.launch.numbers import seconds, whole
from horoclone.membership.records import ID_BYTES, Limits
from horoclone.membership.service import MembershipService
from horoclone.ray import secrets
from horoclone.ray.runner import LEAVE_S, Coordinator, MiniSettings
from horoclone.ray.worker import here, kill_perhaps_later, leave

_TorchBackend: Any = TorchConfig().backend_cls
_TorchContext: Any = TorchConfig().train_func_context


@dataclass
class HorocloneConfig(TorchConfig):
    """For TorchTrainer(torch_config=): hvd.init() and torch.distributed of the workers run on horoclone.

    backend: of the process group that Ray Train makes; "horoclone", or another of torch's. elastic: Ray Train replaces
    a lost worker only, and the others go on in their processes by hvd.elastic.run; there is no process group then.
    min_workers: with how many they go on until the new one is there (call ray.train.report(), which waits for all, only
    while hvd.size() is whole then); None: all, they wait for it for elastic_timeout seconds. Unsupported for elastic
    with a Ray that always restarts all workers. Where some have returned and one is lost beside which they trained
    last, fit() raises: nobody can do what it had still to do.
    """

    backend: str | None = "horoclone"
    elastic: bool = False
    min_workers: int | None = None
    elastic_timeout: float = 600

    def __post_init__(self) -> None:
        whole("Ray", "`min_workers`", self.min_workers)
        seconds("Ray", "`elastic_timeout`", self.elastic_timeout)
        if self.min_workers is not None and not self.elastic:
            raise ValueError("`min_workers` is for HorocloneConfig(elastic=True)")
        if self.elastic and not hasattr(Backend, "has_replica_groups"):
            raise errors.Unsupported(
                f"Ray {ray.__version__} restarts every worker when one is lost: HorocloneConfig(elastic=True) needs a "
                "newer one; 2.60 is tested"
            )
        if self.elastic and not TorchTrainer.__module__.startswith("ray.train.v2."):
            raise errors.Unsupported(
                "Ray Train's first version, which RAY_TRAIN_V2_ENABLED=0 asks for, restarts every worker when one is "
                "lost: HorocloneConfig(elastic=True) needs its second, so take that variable out of the environment"
            )

    @property
    def backend_cls(self) -> type[Any]:
        """What Ray Train calls."""
        return ElasticBackend if self.elastic else FixedBackend

    @property
    def train_func_context(self) -> type[Any]:
        """Around the training function, in a worker."""
        return TrainingContext


class TrainingContext(_TorchContext):
    """Ray Train takes every SystemExit for a failure; that of a worker which the others do not need is none. Who
    returns tells the coordinator of an elastic job, as its process stays."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return True
            why = f": {error.__cause__}" if error.__cause__ is not None else ""
            raise RuntimeError(f"the training function ended with SystemExit({error.code!r}){why}") from error
        lifecycle = sys.modules.get("horoclone.runtime.lifecycle")
        if error is None and lifecycle is not None:
            lifecycle.member.finished()
        return bool(super().__exit__(kind, error, trace))


def _introduce(variables: Mapping[str, str], secret: bytes) -> None:
    """In a worker: what hvd.init() and init_process_group() read."""
    os.environ.update(variables)
    secrets.keep(secret)


def _register() -> None:
    """In a worker: the backend is known to torch."""
    importlib.import_module("horoclone.torch")


class _Rendezvous(_TorchBackend):
    """Ray Train has one instance in a process, and sends it from the driver to the controller before on_start()."""

    def __init__(self) -> None:
        super().__init__()
        self._coordinator: Coordinator | None = None
        self._shared: dict[str, str] = {}  # variables of all workers

    def _open(self, worker_group: Any, service: MembershipService | None = None) -> list[Placement]:
        """For the workers of a new group; their places by rank."""
        self._close()
        coordinator = self._coordinator = Coordinator(MiniSettings())
        # As Ray Train counts local ranks: workers of one address are on one host.
        found = worker_group.execute(here)
        places = [place._replace(node_id=place.address, hostname=place.address) for place in found]
        placements = coordinator.placements(places)
        one_host = all(place.address == here().address for place in places)
        self._shared = coordinator.establish_rendezvous(one_host, service)
        return placements

    def _tell(self, worker_group: Any, variables: Sequence[Mapping[str, str]]) -> None:
        """variables: of each worker of the group, beside the common ones."""
        assert self._coordinator is not None
        secret = self._coordinator.secret
        ray.get([
            worker_group.execute_single_async(number, _introduce, {**own, **self._shared}, secret)
            for number, own in enumerate(variables)
        ])  # fmt: skip

    def _of_rank(self, placement: Placement) -> dict[str, str]:
        return rank_variables(placement, self._shared["HOROCLONE_RENDEZVOUS"], self._shared["HOROCLONE_JOB"])

    def _close(self) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close()


def _let_leave(worker_group: Any) -> None:
    """Those that live end their runtimes. Ray Train kills them all after that."""
    leaving = worker_group.execute_async(leave)
    ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)


class FixedBackend(_Rendezvous):
    """Of a group that Ray Train starts and ends as a whole."""

    def on_start(self, worker_group: Any, backend_config: HorocloneConfig) -> None:
        """The workers have started."""
        placements = self._open(worker_group)
        self._tell(worker_group, [self._of_rank(placement) for placement in placements])
        worker_group.execute(_register)
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: HorocloneConfig) -> None:
        """The workers are about to be ended."""
        try:
            _let_leave(worker_group)
            super().on_shutdown(worker_group, backend_config)
        finally:
            self._close()


class ElasticBackend(_Rendezvous):
    """Of a group in which Ray Train replaces single workers, each of which it calls a replica group. The members that
    are left go on by hvd.elastic.run, as in every elastic job; who is in says the coordinator in our server."""

    has_replica_groups = True
    share_cuda_visible_devices = False  # a worker that comes later is told its own only

    def __init__(self) -> None:
        super().__init__()
        self._service: MembershipService | None = None
        self._group: Any = None
        self._placements: list[Placement] = []  # by Ray Train's world rank
        # by the same rank: names, actors; the service's mutex guards
        self._members: dict[int, tuple[bytes, Any]] = {}

    def on_start(self, worker_group: Any, backend_config: HorocloneConfig) -> None:
        """All workers have started, or one in place of a lost one."""
        timeout_s = backend_config.elastic_timeout
        if hasattr(worker_group, "get_replica_groups"):
            size, least = len(worker_group), backend_config.min_workers
            if least is not None and least > size:
                raise ValueError(
                    f"HorocloneConfig(min_workers={least}) is more than the {size} workers that there are"
                )
            limits = Limits(size, least or size, size, timeout_s)
            self._service = MembershipService(limits, random.token_bytes)
            self._service.tell = self._end_fenced
            self._placements = self._open(worker_group, self._service)
            self._group, self._members = worker_group, {}
        else:
            self._look_whether_it_can_go_on()
            for worker, place in zip(worker_group.get_workers(), worker_group.execute(here), strict=True):
                rank = _rank_of(worker)
                self._placements[rank] = self._placements[rank]._replace(host=place.address)
        self._tell(worker_group, [self._announce(worker, timeout_s) for worker in worker_group.get_workers()])

    def on_shutdown(self, worker_group: Any, backend_config: HorocloneConfig) -> None:
        """All workers are about to be ended, or one, which has failed."""
        if hasattr(worker_group, "get_replica_groups"):
            try:
                _let_leave(worker_group)
            finally:
                self._close()
            return
        for worker in worker_group.get_workers():
            self._failed(_rank_of(worker))
        self._wake()

    def _failed(self, rank: int) -> None:
        """Ray Train calls it failed, and replaces it."""
        assert self._service is not None
        status, coordinator = self._group.get_latest_poll_status(), self._service.coordinator
        error = None if status is None else status.errors.get(rank)
        text = " ".join(f"{type(error).__name__}: {error}".split()) if error else "Ray Train does not say why"
        with self._service.mutex:
            name, _ = self._members.pop(rank, (b"", None))
            if not name:  # it was lost before it was announced
                return
            coordinator.dead(name, f"it failed: {text}", time.monotonic())
            # What was to be done after its function has returned, as to store a checkpoint.
            is_lost = hasattr(error, "health_check_failure")
            if coordinator.finishing and coordinator.members[name].generation and not is_lost:
                coordinator.stop(1, f"rank {rank} failed when others had finished: {text}")

    def _look_whether_it_can_go_on(self) -> None:
        """An error of the controller's is one after which Ray Train ends the job, however many failures it allows."""
        assert self._service is not None
        with self._service.mutex:
            coordinator = self._service.coordinator
            if coordinator.finishing and coordinator.stopped is not None:
                raise RuntimeError(coordinator.stopped.text)

    def _announce(self, worker: Any, timeout_s: float) -> dict[str, str]:
        """The variables of a worker for which the others wait from now on."""
        assert self._service is not None
        rank = _rank_of(worker)
        placement, name, now = self._placements[rank], random.token_bytes(ID_BYTES), time.monotonic()
        is_near = placement.host == here().address
        with self._service.mutex:
            coordinator = self._service.coordinator
            coordinator.start(name, placement.host, placement.local_rank, now, is_near, rank)
            self._members[rank] = name, worker.actor
        self._wake()
        own = self._of_rank(placement)
        return {**own, **member_variables(own["HOROCLONE_RENDEZVOUS"], name, timeout_s)}

    def _end_fenced(self) -> None:
        """The others go on without them, and Ray Train replaces them once they have ended. Thread: the server's, with
        the service's mutex held."""
        assert self._service is not None
        fenced, self._service.coordinator.fenced = self._service.coordinator.fenced, []
        for name, actor in self._members.values():
            if name in fenced:
                kill_perhaps_later(actor)

    def _wake(self) -> None:
        if self._coordinator is not None and self._coordinator.rendezvous is not None:
            self._coordinator.rendezvous.wake()


def _rank_of(worker: Any) -> int:
    return int(worker.distributed_context.world_rank)
