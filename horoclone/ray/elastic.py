"""Under Horovod's name: ElasticRayExecutor, the older executor of elastic jobs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray

from horoclone.ray.adapter import Adapter
from horoclone.ray.discovery import ChangingDiscovery, ClusterDiscovery
from horoclone.ray.elastic_v2 import ElasticAdapter
from horoclone.ray.in_cluster import InCluster
from horoclone.ray.log_queue import Callback
from horoclone.runner.common.util import timeout
from horoclone.runner.elastic.settings import ElasticSettings

_T = TypeVar("_T")


class RayHostDiscovery(ClusterDiscovery):
    """The nodes of the cluster, with as many slots as workers of this size fit on them."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float | None = 1
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self.cpus_per_slot, self.gpus_per_slot = cpus_per_slot, gpus_per_slot


class TestDiscovery(ChangingDiscovery):
    """For tests: the nodes that there are change."""

    __test__ = False

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        cluster = (use_gpu, cpus_per_slot, gpus_per_slot)
        super().__init__(cluster, min_hosts, max_hosts, change_frequency_s, verbose, _graceful)


class ElasticRayExecutor:
    """Runs an elastic job on a Ray cluster. RayExecutor(min_workers=...) does the same.

    settings: of create_settings(). env_vars: of the workers. override_discovery: slots are those of the cluster, else
    what settings.discovery says. ValueError for GPUs that do not fit together.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Any = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Makes settings. timeout_s: for a worker to start. The rest is as of a RayExecutor. min_np, max_np: the older
        names."""
        for name, value in (("min_np", min_np), ("max_np", max_np)):
            if value is not None:
                new = name.replace("np", "num_proc")
                warnings.warn(f"{name} is deprecated, use {new} instead", DeprecationWarning, stacklevel=2)
        smallest = min_num_proc if min_np is None else min_np
        settings = ElasticSettings(
            None,
            smallest,
            max_num_proc if max_np is None else max_np,
            elastic_timeout,
            reset_limit,
            num_proc=smallest,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            start_timeout=timeout.Timeout(timeout_s, "Timed out waiting for {activity}."),
            **kwargs,
        )
        settings.timeout_s = timeout_s  # type: ignore[attr-defined]
        return settings

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot and not use_gpu:
            raise ValueError(
                "gpus_per_slot is set, but use_gpu is False. use_gpu must be True if gpus_per_slot is set."
            )
        if use_gpu and gpus_per_slot is not None and gpus_per_slot < 1:
            raise ValueError(f"gpus_per_slot must be >= 1: Got {gpus_per_slot}.")
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot)
        self.settings, self.use_gpu, self.cpus_per_slot = settings, use_gpu, cpus_per_slot
        self.gpus_per_slot, self.env_vars = gpus_per_slot or int(use_gpu), dict(env_vars or {})
        self._params = {
            "min_workers": settings.min_num_proc or 1,
            "max_workers": settings.max_num_proc,
            "use_gpu": use_gpu,
            "cpus_per_worker": cpus_per_slot,
            "gpus_per_worker": gpus_per_slot,
            "override_discovery": False,
            "reset_limit": settings.reset_limit,
            "cooldown_range": getattr(settings, "cooldown_range", None),
            "elastic_timeout": settings.elastic_timeout,
        }
        self.driver: Any = None

    def start(self) -> None:
        """Waits until there is room for the smallest job; TimeoutException after elastic_timeout seconds."""
        if ray.util.client.ray.is_connected():
            driver: Adapter = InCluster(ElasticAdapter, _Sent(self.settings), self._params)
        else:
            driver = ElasticAdapter(self.settings, **self._params)
        driver.start(extra_env_vars=self.env_vars)
        self.driver = driver

    def run(self, worker_fn: Callable[[], _T], callbacks: Sequence[Callback] | None = None) -> list[_T]:
        """Calls worker_fn() on every worker and returns the values of those that have finished, by rank.

        callbacks: called in the driver with what rank 0 gives to ray_logger.log(). RuntimeError when the job fails.
        """
        if self.driver is None:
            raise RuntimeError("this ElasticRayExecutor has not been started: call start() first")
        return list(self.driver.run(worker_fn, callbacks=callbacks))

    def shutdown(self) -> None:
        """Does nothing, as run() leaves nothing; for scripts that end all executors alike."""
        driver, self.driver = self.driver, None
        if isinstance(driver, InCluster):
            driver.end()  # also in the midst of a run


class _Sent:
    """Settings with their discovery, for an actor in the cluster: pickled ElasticSettings leave it out."""

    def __init__(self, settings: Any) -> None:
        self.__dict__.update(vars(settings))
