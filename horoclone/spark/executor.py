"""The side of a Spark task: it offers itself to the driver as a slot, and runs what starts a rank there.

The task proves the job's secret to the driver (task_server.py), says where it is, and waits. When the driver wants a
rank here, the connection is handed to slot.py, a process of its own, which is to the driver what launch/remote.py is on
a host behind ssh. When its rank has ended the task offers itself again, until the driver says that the job is over, or
is gone. Thread: the task's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import horoclone
from horoclone import errors
from horoclone.bootstrap import wire
from horoclone.bootstrap.client import Client
from horoclone.launch.call import pack_function, unpack_function
from horoclone.launch.link import package_home
from horoclone.launch.process import dies_with_parent, sealed_memory
from horoclone.runner.common.util.host_hash import host_hash
from horoclone.spark.task import GPUS

START, END = b"S", b"E"  # the driver's words to a task
REACH_S = 30.0  # for the driver to be found
AGAIN_S = 5.0  # the same, once it has been there
LOOK_S = 1.0
SECRET_FD, FUNCTION_FD = "HOROCLONE_SECRET_FD", "HOROCLONE_SLOT_FUNCTION_FD"
OWN_PYTHON, OWN_FOLDER = "HOROCLONE_SLOT_PYTHON", "HOROCLONE_SLOT_FOLDER"
# How Spark's JVM and its Python workers know each other; of no use to a rank.
_SPARKS_OWN = (
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_PORT",
    "PYTHON_WORKER_FACTORY_SOCK_PATH",
)


@dataclass(frozen=True)
class Offer:
    """What a task needs to find its driver. It travels in the closure of the task, which Spark keeps to itself."""

    addresses: tuple[str, ...]
    secret: bytes
    job: str
    python: str | None  # of the ranks; None: the one that runs the task


class _Knock(Client):
    """A connection to the driver's task server that has proved the secret."""

    def open(self, again: bool) -> socket.socket:
        """again: the driver has been there, so that it has gone where nobody listens any more."""
        self._met = again
        self._connect(time.monotonic() + self._timeout_s)
        connection, self._connection = self._connection, None
        assert connection is not None
        return connection.socket


class _DriverGone(Exception):
    pass


def serve(offer: Offer, function: bytes, partition: int, attempt: int, gpus: list[str]) -> None:
    """Until the job is over. RuntimeError when the driver cannot be found at all.

    function: as launch.api.pickled_call gives it.
    """
    parent, has_met = os.getppid(), False
    while True:
        try:
            connection = _knock(offer, has_met)
        except errors.HorovodInternalError as error:
            if has_met:
                return  # the driver has closed its task server
            raise RuntimeError(
                f"Spark task {partition} on {socket.gethostname()} cannot reach the driver's program, which listens "
                f"at {', '.join(offer.addresses)}: {error} Executors must be able to connect to the driver; "
                "nics=[...] of horoclone.spark.run chooses its network interfaces."
            ) from None
        has_met = True
        with connection:
            try:
                connection.sendall(wire.frame(_introduction(partition, attempt)))
                if _word(connection, parent) != START:
                    return
                process = _start(offer, function, connection, gpus)
            except (OSError, _DriverGone):
                return
        _wait(process, parent)  # our copy of the connection is closed: its end is that of the process


def _knock(offer: Offer, again: bool) -> socket.socket:
    limit_s = AGAIN_S if again else REACH_S
    connection = _Knock(list(offer.addresses), offer.secret, offer.job, limit_s).open(again)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Where the other host goes without a word, the connection ends after some 10 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _introduction(partition: int, attempt: int) -> bytes:
    hello = {
        "partition": partition,
        "attempt": attempt,
        "host": socket.gethostname(),
        "machine": host_hash(),
        "versions": own_versions(),
        "program": sys.executable,
    }
    return json.dumps(hello).encode()


def own_versions() -> dict[str, str]:
    """What must be alike in the driver and on every node."""
    return {
        "horoclone": horoclone.__version__,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "cloudpickle": importlib.metadata.version("cloudpickle"),
    }


def _word(connection: socket.socket, parent: int) -> bytes:
    """What the driver says; empty when it is gone. The task ends with who has started it, which Spark may kill."""
    connection.settimeout(None)
    while os.getppid() == parent:
        if select.select([connection], [], [], LOOK_S)[0]:
            return connection.recv(1)
    raise _DriverGone


def _start(
    offer: Offer, function: bytes, connection: socket.socket, gpus: list[str]
) -> subprocess.Popen[bytes]:
    path, pickled = unpack_function(function)
    own = [os.path.abspath(entry) for entry in sys.path if entry]  # --py-files and addPyFile are there
    memory = sealed_memory("horoclone-function", pack_function([*own, *path], pickled))
    secret = sealed_memory("horoclone-secret", offer.secret)
    environment: dict[str, str] = {
        name: value for name, value in os.environ.items() if name not in _SPARKS_OWN
    }
    environment |= {
        SECRET_FD: str(secret),
        FUNCTION_FD: str(memory),
        OWN_PYTHON: offer.python or sys.executable,
        OWN_FOLDER: os.getcwd(),
    }
    if gpus:
        environment[GPUS] = ",".join(gpus)
    program = (
        "import sys; sys.path.append(sys.argv.pop()); from horoclone.spark.slot import main; sys.exit(main())"
    )
    try:
        return subprocess.Popen(
            [sys.executable, "-c", program, package_home()],
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            env=environment,
            pass_fds=[memory, secret],
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
    finally:
        os.close(memory)
        os.close(secret)


def _wait(process: subprocess.Popen[bytes], parent: int) -> None:
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
                return
            if os.getppid() != parent:
                return
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def serve_partition(offer: Offer, function: Any, index: int, _rows: Any) -> Any:
    """For mapPartitionsWithIndex. function: a broadcast variable of Spark."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    resources: Mapping[str, Any] = context.resources()
    gpus = list(resources["gpu"].addresses) if "gpu" in resources else []
    serve(offer, bytes(function.value), index, context.attemptNumber(), gpus)
    return iter(())
