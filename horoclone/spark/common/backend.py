"""Under Horovod's name: what an estimator trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horoclone.spark.runner import run
from horoclone.spark.session import active_context


def default_num_proc() -> int:
    """spark.default.parallelism of the active SparkContext."""
    return int(active_context().defaultParallelism)


class Backend:
    """Runs a training function on all ranks. Derive from it to train elsewhere than in the Spark application."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Calls fn(*args, **kwargs) on every rank, with env added to their variables; the values by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """How many ranks there will be."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Ranks in tasks of the Spark application.

    num_proc: how many (default: spark.default.parallelism). env: variables for them. kwargs: further arguments of
    horoclone.spark.run, such as stdout, nics or start_timeout.
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        self._num_proc = num_proc or default_num_proc()
        self._env = dict(env or {})
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        both = {**self._env, **(env or {})}
        return run(fn, args, kwargs, num_proc=self._num_proc, env=both, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc
