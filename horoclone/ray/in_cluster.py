"""The driver's part of a job of a Ray Client: an actor in the cluster, which ends when the client is gone."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
import ray.exceptions

from horoclone.ray.adapter import Adapter
from horoclone.ray.client_life import GRACE, Beats, silence_s
from horoclone.ray.log_queue import Callback, LogQueue

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class InCluster(Adapter):
    """An adapter (its class, and what it is made with) in an actor, for a program that is a Ray Client."""

    def __init__(self, adapter: type[Adapter], settings: Any, params: Mapping[str, Any]) -> None:
        self._limit_s = silence_s()
        self._beats = Beats()
        self._stop = weakref.finalize(self, self._beats.close)  # also for one that is forgotten
        self._actor = ray.remote(adapter).options(num_cpus=0).remote(settings, **params)
        self._actor.end_with_client.remote(self._beats.key, self._limit_s)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*args, **kwargs))
        except ray.exceptions.RayActorError as error:
            silent_s = self._beats.longest_s()
            if silent_s < self._limit_s:
                raise
            raise RuntimeError(
                f"this Ray Client could not be heard for {silent_s:.0f} s, so its job was ended: call shutdown() and "
                f"start(), and set {GRACE} before ray.init() to more than the {self._limit_s:g} s "
                "that a job goes on without its client"
            ) from error

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """As RayExecutor.start()."""
        try:
            self._ask("start", executable_cls, executable_args, executable_kwargs, extra_env_vars)
        except BaseException:
            self.end()
            raise

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """As RayExecutor.execute()."""
        with LogQueue(callbacks) as here:
            return list(self._ask("execute", fn, here.passing_on))

    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> list[_T]:
        """As RayExecutor.run()."""
        with LogQueue(callbacks) as here:
            return list(self._ask("run", fn, args, kwargs, here.passing_on))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As RayExecutor.run_remote()."""
        return list(self._ask("run_remote", fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """As RayExecutor.execute_single()."""
        return self._ask("execute_single", fn)

    def shutdown(self) -> None:
        """As RayExecutor.shutdown()."""
        try:
            ray.get(self._actor.shutdown.remote())
        except ray.exceptions.RayActorError:
            logger.warning("the job had ended before: its part in the cluster is gone")
        finally:
            self.end()

    def end(self) -> None:
        """Ends the actor, whatever it does."""
        self._stop()
        ray.kill(self._actor)
