"""Under Horovod's name: elastic jobs of a RayExecutor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from horoclone.launch.elastic_options import Elastic
from horoclone.launch.elastic_policy import Cooldown, Plan
from horoclone.launch.numbers import seconds, whole
from horoclone.ray.adapter import Adapter, BaseParams
from horoclone.ray.discovery import ChangingDiscovery, ClusterDiscovery
from horoclone.ray.elastic_job import ElasticJob, JobSpec, wait_for_slots
from horoclone.ray.log_queue import Callback, LogQueue
from horoclone.runner.elastic.discovery import source_of

_T = TypeVar("_T")


class RayHostDiscovery(ClusterDiscovery):
    """The nodes of the cluster, with as many slots as workers of this size fit on them."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_worker: float = 1, gpus_per_worker: float | None = 1
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)
        self.cpus_per_worker, self.gpus_per_worker = cpus_per_worker, gpus_per_worker


class TestDiscovery(ChangingDiscovery):
    """For tests: the nodes that there are change."""

    __test__ = False

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        cluster = (use_gpu, cpus_per_worker, gpus_per_worker)
        super().__init__(cluster, min_hosts, max_hosts, change_frequency_s, verbose, _graceful)


@dataclass
class ElasticParams(BaseParams):
    """Of an elastic job; docs/elastic.md says what they mean."""

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("min_workers", "max_workers", "reset_limit"):
            whole("Ray", f"`{name}`", getattr(self, name))
        seconds("Ray", "`elastic_timeout`", self.elastic_timeout)
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ValueError(
                f"`max_workers` ({self.max_workers}) is less than `min_workers` ({self.min_workers})."
            )
        cooldown_of(self.cooldown_range)

    @property
    def elastic(self) -> bool:
        """True."""
        return True

    @property
    def adapter(self) -> type[Adapter]:
        """ElasticAdapter."""
        return ElasticAdapter


def cooldown_of(bounds: Sequence[int] | None) -> Cooldown:
    """ValueError for a range that is none."""
    if bounds is not None and len(bounds) != 2:
        raise ValueError(f"`cooldown_range` is two numbers of seconds: Got {bounds}.")
    return Cooldown((bounds[0], bounds[1]) if bounds is not None else None)


class ElasticAdapter(Adapter):
    """An elastic job: each run() starts its workers, and ends them."""

    def __init__(self, settings: Any, **params: Any) -> None:
        self.settings, self.params = settings, ElasticParams(**params)
        params_ = self.params
        if params_.override_discovery:
            settings.discovery = RayHostDiscovery(
                params_.use_gpu, params_.cpus_per_worker, params_.gpus_per_worker
            )
        self._spec: JobSpec | None = None

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Waits until there is room for min_workers. TimeoutException when there is none within elastic_timeout."""
        params = self.params
        elastic = Elastic(
            source_of(self.settings.discovery),
            0,  # as many as there is room for
            Plan(params.min_workers, params.max_workers),
            cooldown_of(params.cooldown_range),
            params.elastic_timeout,
            params.reset_limit,
        )
        self._spec = JobSpec(
            self.settings,
            elastic,
            params.cpus_per_worker,
            (params.gpus_per_worker or 0) * int(params.use_gpu),
            {name: str(value) for name, value in (extra_env_vars or {}).items()},
            (executable_cls, executable_args, executable_kwargs),
        )
        wait_for_slots(self._spec)

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """fn(executable) on every worker; values of those that have finished, by rank. RuntimeError when it fails."""
        if self._spec is None:
            raise RuntimeError("this RayExecutor has not been started: call start() first")
        with LogQueue(callbacks) as queue:
            return ElasticJob(self._spec, queue.queue).run(fn)

    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[_T]:
        """fn(*args, **kwargs) on every worker, else as execute()."""
        given, named = tuple(args or ()), dict(kwargs or {})
        return self.execute(lambda _: fn(*given, **named), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """NotImplementedError."""
        raise NotImplementedError(
            "ObjectRefs cannot be returned from Elastic runs as the workers are ephemeral"
        )

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """NotImplementedError."""
        raise NotImplementedError(
            "Elastic mode does not support execute_single. Please use the execute method instead"
        )

    def shutdown(self) -> None:
        """start() may follow."""
        self._spec = None
