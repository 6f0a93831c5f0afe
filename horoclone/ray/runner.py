"""Under Horovod's name: RayExecutor, and jobs of a fixed size."""

from __future__ import annotations

import os
import secrets as random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import ray

from horoclone.bootstrap.rendezvous import Server
from horoclone.bootstrap.wire import routable_addresses
from horoclone.launch.environment import rank_variables
from horoclone.launch.hosts import Placement
from horoclone.launch.numbers import whole
from horoclone.membership.service import MembershipService
from horoclone.ray import secrets
from horoclone.ray.adapter import Adapter, BaseParams
from horoclone.ray.calls import Calls
from horoclone.ray.elastic_v2 import ElasticParams
from horoclone.ray.in_cluster import InCluster
from horoclone.ray.log_queue import Callback, LogQueue
from horoclone.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy
from horoclone.ray.utils import detect_nics, map_blocking, nics_to_env_var
from horoclone.ray.worker import Where
from horoclone.runner.common.util import timeout

_T = TypeVar("_T")

LEAVE_S = 5.0  # for workers to leave the job before they are ended


@dataclass
class MiniSettings:
    """What RayExecutor.create_settings() makes. timeout_s: for workers to start; placement_group_timeout_s: for Ray to
    reserve what they need. key and the ssh settings are not read: nothing is started by ssh."""

    nics: Any = None
    verbose: int = 1
    key: Any = field(default=None, repr=False)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False

    @property
    def start_timeout(self) -> timeout.Timeout:
        """A new one, of timeout_s."""
        return timeout.Timeout(
            self.timeout_s,
            "Timed out waiting for {activity}. Please check connectivity between servers. You may need to increase "
            "timeout_s of the settings if you have too many servers.",
        )


class Coordinator:
    """Numbers the ranks of a job, and opens the rendezvous at which they meet.

    node_id_by_rank: node -> its ranks, in the order of register(). secret: for the workers, and nobody else.
    """

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.node_id_by_rank: dict[str, list[int]] = defaultdict(list)
        self.secret = secrets.draw()
        self.rendezvous: Server | None = None
        self.global_rendezv_port: int | None = None
        self._hostnames: set[str] = set()

    @property
    def world_size(self) -> int:
        """How many are registered."""
        return sum(map(len, self.node_id_by_rank.values()))

    @property
    def hostnames(self) -> set[str]:
        """Of all of them."""
        return self._hostnames

    @property
    def node_id_string(self) -> str:
        """'node:ranks,node:ranks'."""
        return ",".join(f"{node}:{len(ranks)}" for node, ranks in self.node_id_by_rank.items())

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """The worker of this rank is there."""
        self._hostnames.add(hostname)
        self.node_id_by_rank[node_id].append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, Any]]:
        """Rank -> HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE, HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE."""
        across: dict[int, list[int]] = defaultdict(list)  # local rank -> ranks that have it
        for ranks in self.node_id_by_rank.values():
            for local_rank, rank in enumerate(ranks):
                across[local_rank].append(rank)
        return {
            rank: {
                "HOROVOD_CROSS_RANK": across[local_rank].index(rank),
                "HOROVOD_CROSS_SIZE": len(across[local_rank]),
                "HOROVOD_LOCAL_RANK": local_rank,
                "HOROVOD_LOCAL_SIZE": len(ranks),
            }
            for ranks in self.node_id_by_rank.values()
            for local_rank, rank in enumerate(ranks)
        }

    def placements(self, places: Sequence[Where]) -> list[Placement]:
        """Registers the workers of a job, by rank."""
        for rank, place in enumerate(places):
            self.register(place.hostname, place.node_id, rank)
        found = []
        for rank, numbers in sorted(self.finalize_registration().items()):
            own = {name.removeprefix("HOROVOD_").lower(): value for name, value in numbers.items()}
            found.append(Placement(rank=rank, size=len(places), host=places[rank].hostname, **own))
        return found

    def establish_rendezvous(
        self, one_host: bool = False, service: MembershipService | None = None
    ) -> dict[str, str]:
        """Opens it; the variables that are the same for all ranks. one_host: nobody on another machine will come.
        service: of an elastic job."""
        nics = detect_nics(self.settings)
        found = ["127.0.0.1"] if one_host and not nics else routable_addresses(",".join(nics))
        addresses = [one for one in found if not one.startswith("127.")] or found
        job = random.token_hex(8)
        self.rendezvous = Server(self.secret, job, max(1, self.world_size), addresses, service)
        host, _, port = self.rendezvous.addresses[0].rpartition(":")
        self.global_rendezv_port = int(port)
        return {
            "HOROCLONE_RENDEZVOUS": ",".join(self.rendezvous.addresses),
            "HOROCLONE_JOB": job,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,  # this and the next three for scripts that look
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            **nics_to_env_var(nics),
        }

    def close(self) -> None:
        """Nobody can meet there any more."""
        server, self.rendezvous = self.rendezvous, None
        if server is not None:
            server.close()


@dataclass
class StaticParams(BaseParams):
    """Of a job of a fixed size. ValueError unless exactly one of num_workers and num_hosts is there, and positive."""

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.num_workers is None) == (self.num_hosts is None):
            raise ValueError(
                f"Either `num_workers` or `num_hosts` must be set, and not both: Got num_workers={self.num_workers}, "
                f"num_hosts={self.num_hosts}."
            )
        for name in ("num_workers", "num_hosts", "num_workers_per_host"):
            whole("Ray", f"`{name}`", getattr(self, name))

    @property
    def elastic(self) -> bool:
        """False."""
        return False

    @property
    def adapter(self) -> type[Adapter]:
        """StaticAdapter."""
        return StaticAdapter


class StaticAdapter(Adapter):
    """A job of a fixed size: its workers are started once, and run one function after the other."""

    def __init__(self, settings: Any, **params: Any) -> None:
        self.settings, self.params = settings, StaticParams(**params)
        self.workers: list[Any] = []
        self.strategy: BaseStrategy | None = None
        self.coordinator: Coordinator | None = None
        self._calls: Calls | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """As RayExecutor.start()."""
        if self._calls is not None:
            raise RuntimeError("this RayExecutor has been started already: call shutdown() first")
        self.strategy = self._strategy()
        try:
            self.workers, _ = self.strategy.create_workers()
            self._introduce(self.strategy, extra_env_vars or {})
            given = (executable_cls, executable_args, executable_kwargs)
            map_blocking(lambda worker: worker.start_executable.remote(*given), self.workers)
        except BaseException:
            self.shutdown()
            raise

    def _strategy(self) -> BaseStrategy:
        params = self.params
        if params.num_hosts is not None:
            return ColocatedStrategy(
                settings=self.settings,
                num_hosts=params.num_hosts,
                num_workers_per_host=params.num_workers_per_host,
                use_gpu=params.use_gpu,
                cpus_per_worker=params.cpus_per_worker,
                gpus_per_worker=params.gpus_per_worker,
            )
        return PGStrategy(
            self.settings,
            params.num_workers or 1,
            params.use_gpu,
            params.cpus_per_worker,
            params.gpus_per_worker,
            force_create_placement_group=not params.use_current_placement_group,
        )

    def _introduce(self, strategy: BaseStrategy, extra: Mapping[str, Any]) -> None:
        """Tells every worker its place, the rendezvous, and the secret."""
        coordinator = self.coordinator = Coordinator(self.settings)
        places = strategy.places
        placements = coordinator.placements(places)
        here = ray.util.get_node_ip_address()
        shared = coordinator.establish_rendezvous(all(place.address == here for place in places))
        calls = {}
        for placement, worker in zip(placements, self.workers, strict=True):
            variables = rank_variables(placement, shared["HOROCLONE_RENDEZVOUS"], shared["HOROCLONE_JOB"])
            variables = {"PYTHONUNBUFFERED": "1", **variables, **shared, **extra}
            calls[worker.update_env_vars.remote(variables)] = placement.rank
            calls[worker.take_secret.remote(coordinator.secret)] = placement.rank
        strategy.answers(calls)
        assert coordinator.rendezvous is not None
        self._calls = Calls(places, coordinator.rendezvous)

    def _started(self) -> Calls:
        if self._calls is None:
            raise RuntimeError("this RayExecutor has not been started: call start() first")
        return self._calls

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """As RayExecutor.execute()."""
        calls = self._started()
        with LogQueue(callbacks) as queue:
            self._tell_where_to_log(queue.queue)
            try:
                return calls.results(self._submit(fn))
            finally:
                self._tell_where_to_log(None)

    def _tell_where_to_log(self, queue: Any) -> None:
        """Calls of an actor keep their order, so nobody need wait for these."""
        for worker in self.workers:
            worker.set_queue.remote(queue)

    def _submit(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._started().check()
        sent = ray.put(fn)  # once, whatever the number of workers
        return [worker.execute.remote(sent) for worker in self.workers]

    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[_T]:
        """As RayExecutor.run()."""
        return self.execute(without_executable(fn, args, kwargs), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As RayExecutor.run_remote()."""
        refs = self._submit(without_executable(fn, args, kwargs))
        self._started().watch(refs)
        return refs

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """As RayExecutor.execute_single()."""
        calls = self._started()
        calls.check()
        return calls.results([self.workers[0].execute.remote(fn)])[0]

    def let_go(self) -> None:
        """The placement group, if it is ours."""
        strategy = self.strategy
        if strategy is not None:
            strategy.give_group_back()

    def shutdown(self) -> None:
        """As RayExecutor.shutdown()."""
        calls, self._calls = self._calls, None
        if calls is not None and not calls.failure:
            leaving = [worker.leave.remote() for worker in self.workers]
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        if self.strategy is not None:
            self.strategy.shutdown()
        if self.coordinator is not None:
            self.coordinator.close()
        self.workers, self.strategy, self.coordinator = [], None, None


def without_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    """fn with these arguments, for a worker, which passes its executable."""
    given, named = tuple(args or ()), dict(kwargs or {})
    return lambda _: fn(*given, **named)


class RayExecutor:
    """Runs a job on a Ray cluster: of num_workers workers, of num_workers_per_host on each of num_hosts nodes, or
    elastic, with at least min_workers and at most max_workers (None: as many as there is room for).

    settings: of create_settings(). use_current_placement_group: inside of a placement group the workers are placed
    there. reset_limit, cooldown_range, elastic_timeout (seconds): as of an elastic job of horoclonerun.
    override_discovery: slots are those of the cluster, else what settings.discovery (a HostDiscovery) says.
    ValueError for parameters that do not fit together. In a Ray Client the job is driven from inside the cluster, and
    ends 7 s after the client has gone (or RAY_CLIENT_RECONNECT_GRACE_PERIOD in its environment, where that is longer).
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Any = None,
    ) -> MiniSettings:
        """Makes settings. timeout_s: for workers to start once Ray has reserved their resources, for which it has
        placement_group_timeout_s. nics: names of the interfaces to use, a set, list or text; None: what works.

        ssh_str is written to ssh_identity_file where that does not exist, as in Horovod; nothing here uses ssh.
        """
        if ssh_str and ssh_identity_file and not os.path.exists(ssh_identity_file):
            with open(os.open(ssh_identity_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(ssh_str)
        return MiniSettings(
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            nics=nics,
        )

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers and (not min_workers or min_workers <= 0):
            raise ValueError(
                "`max_workers` provided without any positive `min_workers`. Elastic workloads require a positive "
                "`min_workers`."
            )
        if min_workers and (num_workers or num_hosts):
            raise ValueError(
                "Both `min_workers` and `num_workers` (or `num_hosts`) provided. Only one of the above is allowed as "
                "workloads cannot be elastic and non-elastic."
            )
        of_worker: dict[str, Any] = {
            "cpus_per_worker": cpus_per_worker,
            "use_gpu": use_gpu,
            "gpus_per_worker": gpus_per_worker,
        }
        self.params: StaticParams | ElasticParams
        if min_workers is not None:
            self.params = ElasticParams(
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
                **of_worker,
            )
        else:
            self.params = StaticParams(
                num_workers=num_workers,
                num_hosts=num_hosts,
                num_workers_per_host=num_workers_per_host,
                use_current_placement_group=use_current_placement_group,
                **of_worker,
            )
        self.settings = settings
        self.settings.elastic = self.params.elastic
        self.adapter: Any = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts the workers (an elastic job's are started by run()).

        executable_cls(*executable_args, **executable_kwargs) is made in each of them, for functions that execute()
        calls. extra_env_vars: set before that. TimeoutError when the resources, or the workers, do not come.
        """
        if self.adapter is not None:
            raise RuntimeError("this RayExecutor has been started already: call shutdown() first")
        adapter: Any = self.params.adapter
        params = asdict(self.params)
        if ray.util.client.ray.is_connected():
            self.adapter = InCluster(adapter, self.settings, params)
        else:
            self.adapter = adapter(self.settings, **params)
        try:
            self.adapter.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)
        except BaseException:
            self.adapter = None
            raise

    def _started(self) -> Any:
        if self.adapter is None:
            raise RuntimeError("this RayExecutor has not been started: call start() first")
        return self.adapter

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Calls fn(executable) on every worker and returns the values by rank.

        callbacks: each is called in the driver with every value that ray_logger.log() is given on rank 0. What a
        worker raises is raised here; PeerLost, with the rank, its node and the cause, when one is lost.
        """
        return list(self._started().execute(fn, callbacks))

    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[_T]:
        """Calls fn(*args, **kwargs) on every worker; else as execute()."""
        return list(self._started().run(fn, args, kwargs, callbacks))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Does what run() does, and returns at once references for ray.get(), by rank. NotImplementedError for an
        elastic job."""
        return list(self._started().run_remote(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls fn(executable) on rank 0 only and returns its value. NotImplementedError for an elastic job."""
        return self._started().execute_single(fn)

    def shutdown(self) -> None:
        """Ends the workers and gives their resources back. start() may follow."""
        adapter, self.adapter = self.adapter, None
        if adapter is not None:
            adapter.shutdown()
