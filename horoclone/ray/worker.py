"""Under Horovod's name: the actor that is one rank."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from horoclone.ray import ray_logger, secrets

RETURNED, EXITED = "returned", "exited"


class Where(NamedTuple):
    """Where a worker runs. address: of its node, as Ray knows it."""

    node_id: str
    address: str
    hostname: str
    pid: int

    def __str__(self) -> str:
        return f"{self.address} (node {self.node_id[:8]}, pid {self.pid})"


def here() -> Where:
    """Of this process, in a worker or driver of Ray."""
    node_id = str(ray.get_runtime_context().get_node_id())
    return Where(node_id, ray.util.get_node_ip_address(), socket.gethostname(), os.getpid())


def leave() -> None:
    """Ends the runtime of this process, so that the others need not find out that it is gone."""
    lifecycle = sys.modules.get("horoclone.runtime.lifecycle")
    if lifecycle is not None:
        lifecycle.shutdown()


def kill_perhaps_later(actor: Any) -> None:
    """Of an actor that may be lost with its node: ray.kill() waits for the node until Ray has seen its end, 30 s."""

    def kill() -> None:
        with contextlib.suppress(Exception):  # the cluster, or our connection to it, may have ended meanwhile
            ray.kill(actor)

    threading.Thread(target=kill, name="hc-ray-kill", daemon=True).start()


class BaseHorovodWorker:
    """Runs functions that call hvd.init(). Made an actor by ray.remote().

    executable: what start_executable() has made, the argument of functions that execute() calls.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.update_env_vars(
            {"HOROVOD_HOSTNAME": self.hostname(), "HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size}
        )

    def hostname(self) -> str:
        """Returns the name of the machine, or of the container."""
        return socket.gethostname()

    def node_id(self) -> str:
        """Returns the id of the Ray node, in hexadecimal digits."""
        return str(ray.get_runtime_context().get_node_id())

    def where(self) -> Where:
        """Returns node, address, hostname and pid at once."""
        return here()

    def get_gpu_ids(self) -> list[Any]:
        """Returns the GPUs that Ray has given to this worker."""
        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Sets variables in the environment of this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Returns the environment of this process."""
        return dict(os.environ)

    def take_secret(self, secret: bytes) -> None:
        """Takes the secret of the job; the environment does not get it (secrets.py)."""
        secrets.keep(secret)

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the executable, where there is a class for it."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Calls func(executable). RuntimeError in place of SystemExit, for which Ray would end the actor without a
        word; TypeError for a generator, of which Ray would return the first value."""
        try:
            value = func(self.executable)
        except SystemExit as end:
            raise RuntimeError(f"the function ended with SystemExit({end.code!r})") from end
        if isinstance(value, Generator):
            raise TypeError("a generator cannot leave the process of its worker: return a list")
        return value

    def work(self, func: Callable[[Any], Any], ready: object = None) -> tuple[str, Any]:
        """Calls a function of an elastic job, whose init() may end with SystemExit; returns (RETURNED, value) or
        (EXITED, code).

        ready: what it has to wait for; when that failed this fails as well.
        """
        try:
            value = func(self.executable)
        except SystemExit as end:
            return EXITED, end.code if isinstance(end.code, int) else int(end.code is not None)
        self.leave()
        return RETURNED, value

    def leave(self) -> None:
        """Ends the runtime, so that the others need not find out that this process is gone."""
        leave()

    def set_queue(self, queue: Any) -> None:
        """Sets the queue into which ray_logger.log() puts what it is given."""
        ray_logger.configure(queue)
