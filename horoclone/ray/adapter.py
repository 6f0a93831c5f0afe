"""Under Horovod's name: what a RayExecutor asks of the two kinds of jobs, and the parameters that both have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from horoclone.ray import client_life

_T = TypeVar("_T")


@dataclass
class BaseParams:
    """gpus_per_worker: None is one where use_gpu is set, else none. ValueError for what does not fit together."""

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_worker and not self.use_gpu:
            raise ValueError(
                "gpus_per_worker is set, but use_gpu is False. use_gpu must be True if gpus_per_worker is set."
            )
        if self.use_gpu and self.gpus_per_worker is not None and self.gpus_per_worker < 1:
            raise ValueError(f"gpus_per_worker must be >= 1: Got {self.gpus_per_worker}.")
        if self.cpus_per_worker < 0 or not (self.cpus_per_worker or self.use_gpu):
            raise ValueError(f"a worker needs a CPU or a GPU: Got cpus_per_worker={self.cpus_per_worker}.")
        self.gpus_per_worker = self.gpus_per_worker or int(self.use_gpu)


class Adapter(ABC):
    """RayExecutor has these methods, too; its docstrings say what they do."""

    def end_with_client(self, key: str, limit_s: float) -> None:
        """In an actor: its process, and so the job, ends when the Ray Client of this key was silent for limit_s."""
        client_life.end_without(key, limit_s, self.let_go)

    def let_go(self) -> None:  # noqa: B027 - most have nothing of that kind
        """Gives back what would outlive this process. On any thread, whatever another one does."""

    @abstractmethod
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Brings the job up."""

    @abstractmethod
    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """fn(executable) on every worker."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., _T],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[_T]:
        """fn(*args, **kwargs) on every worker."""

    @abstractmethod
    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """The same, and gives references to what it will return."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """fn(executable) on rank 0."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers."""
