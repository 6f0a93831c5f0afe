"""Data pipelines of training ranks, run by other processes: tf.data's service, started and found through one file.

Rank 0 of the compute job runs a rendezvous server (the runtime's own key-value server: every connection proves the key
that the file holds). Dispatchers, workers and training ranks exchange addresses there. The data itself travels over
TensorFlow's gRPC, which authenticates nobody: run it in a network that you trust.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from horoclone import arrays, errors, runtime
from horoclone.bootstrap import wire
from horoclone.bootstrap.rendezvous import Client
from horoclone.runtime import lifecycle

SERVICE = tf.data.experimental.service
JOB = "tf.data"
# Key of the service and training rank -> how many shared datasets it has asked for, which numbers their jobs.
_shared: Counter[tuple[bytes, int]] = Counter()
LOOK_S = 30.0  # how long one request to the rendezvous server waits for the end


class ComputeClient:
    """What dispatchers, workers and training ranks tell each other. Timeout when something does not come in time."""

    def __init__(self, addresses: Sequence[str], key: bytes, timeout_s: float) -> None:
        self._client = Client(list(addresses), key, JOB, timeout_s)

    def register_dispatcher(self, dispatcher: int, address: str) -> None:
        """Says where dispatcher number `dispatcher` listens, as grpc://host:port."""
        self._client.put(f"dispatcher.{dispatcher}", address.encode())

    def wait_for_dispatcher_registration(self, dispatcher: int, timeout: float) -> str:
        """Where it listens."""
        return self._client.get(f"dispatcher.{dispatcher}", timeout).decode()

    def register_worker_for_dispatcher(self, dispatcher: int, worker: int) -> None:
        """Says that worker number `worker` (of all) serves this dispatcher."""
        self._client.put(f"worker.{dispatcher}.{worker}", b"1")

    def wait_for_workers(self, dispatcher: int, workers: Sequence[int], timeout: float) -> None:
        """Returns when these workers serve the dispatcher."""
        deadline = time.monotonic() + timeout
        for worker in workers:
            self._client.get(f"worker.{dispatcher}.{worker}", max(0.1, deadline - time.monotonic()))

    def shutdown(self) -> None:
        """Ends the service: every worker and dispatcher of the compute job stops."""
        self._client.put("shutdown", b"1")

    def wait_for_shutdown(self) -> None:
        """Returns when somebody has called shutdown(). Timeout when the rendezvous server is gone."""
        while True:
            try:
                self._client.get("shutdown", LOOK_S)
                return
            except errors.Timeout:
                self._client.put("alive", b"1")  # raises when nobody answers any more

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()


@dataclass(frozen=True)
class TfDataServiceConfig:
    """Describes a compute job to training ranks.

    dispatchers: 1 for all training ranks together, or one for each. dispatcher_side: "compute" or "training".
    addresses: of the rendezvous server. timeout: seconds to wait for each other.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Sequence[str]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Returns a connection to the rendezvous server. `verbose` is accepted and not needed."""
        return ComputeClient(self.addresses, self.key, self.timeout)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary for JSON, with the key in hexadecimal digits."""
        return {**self.__dict__, "addresses": list(self.addresses), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Makes the object of which to_dict() made this dictionary."""
        return TfDataServiceConfig(**{**config, "key": bytes.fromhex(config["key"])})

    def write(self, filename: str) -> None:
        """Writes the file at once, readable by its owner only: the key is in it."""
        target = Path(filename)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(self.to_dict(), file)
        unfinished.replace(target)

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False, timeout: float = 300.0
    ) -> TfDataServiceConfig:
        """Reads what write() wrote; waits for the file if asked to, Timeout when it does not come."""
        deadline = time.monotonic() + timeout
        while wait_for_file_creation and not os.path.exists(filename):
            if time.monotonic() > deadline:
                raise errors.Timeout(
                    f"{filename} was not written within {timeout:g} s. It comes from rank 0 of the compute job: "
                    "python -m horoclone.tensorflow.data.compute_worker <file>."
                )
            time.sleep(0.1)
        return TfDataServiceConfig.from_dict(json.loads(Path(filename).read_text()))

    def workers_of(self, dispatcher: int) -> range:
        """Returns the numbers (ranks in the compute job) of the workers of a dispatcher."""
        return range(dispatcher * self.workers_per_dispatcher, (dispatcher + 1) * self.workers_per_dispatcher)


def _own_host() -> str:
    """The address under which other hosts reach this one; this host only when it has none."""
    return (wire.routable_addresses() or ["127.0.0.1"])[0]


def _start_dispatcher() -> tuple[Any, str]:
    server = SERVICE.DispatchServer(SERVICE.DispatcherConfig(port=0))
    port = server.target.rpartition(":")[2]
    return server, f"grpc://{_own_host()}:{port}"


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of the dispatcher for this training rank, while the context lasts.

    With dispatcher_side "training" the dispatcher is started here (on rank 0 only when there is one for all).
    """
    client = compute_config.compute_client()
    dispatcher = rank if compute_config.dispatchers > 1 else 0
    server = None
    try:
        if compute_config.dispatcher_side == "training" and rank == dispatcher:
            server, address = _start_dispatcher()
            client.register_dispatcher(dispatcher, address)
        address = client.wait_for_dispatcher_registration(dispatcher, compute_config.timeout)
        client.wait_for_workers(dispatcher, compute_config.workers_of(dispatcher), compute_config.timeout)
        yield address
    finally:
        if server is not None:
            server._stop()
        client.close()


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """The dataset, computed by the service. Also a method of tf.data.Dataset.

    reuse_dataset: the training ranks share one pass over the data, else each has its own; every rank asks for its
    shared datasets (of one service) in the same order. round_robin (with
    reuse_dataset): rank after rank takes a batch, so that all take equally many; the dataset must be infinite.
    RuntimeError with dispatchers on the training side: use the context manager tf_data_service.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "dispatchers on the training side live as long as a context: use `with tf_data_service(config, rank) as "
            "address:` and tf.data.experimental.service.distribute(service=address, ...)"
        )
    in_turns = reuse_dataset and round_robin
    job = None
    if reuse_dataset:
        job = f"{JOB}.{_shared[compute_config.key, rank]}"
        _shared[compute_config.key, rank] += 1
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            SERVICE.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=job,
                consumer_index=rank if in_turns else None,
                num_consumers=size if in_turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """One rank of the compute job: a worker, and the dispatcher where one belongs here. Returns after shutdown()."""
    lifecycle.init()
    index = runtime.rank()
    dispatcher = index // compute_config.workers_per_dispatcher
    client = compute_config.compute_client()
    servers = []
    try:
        if compute_config.dispatcher_side == "compute" and index == compute_config.workers_of(dispatcher)[0]:
            server, address = _start_dispatcher()
            servers.append(server)
            client.register_dispatcher(dispatcher, address)
        address = client.wait_for_dispatcher_registration(dispatcher, compute_config.timeout)
        servers.append(_start_worker(address, compute_config.timeout))
        client.register_worker_for_dispatcher(dispatcher, index)
        client.wait_for_shutdown()
        arrays.barrier()  # rank 0, at whom all look, may go when everybody knows
    finally:
        for server in reversed(servers):
            server._stop()
        client.close()


def _start_worker(dispatcher: str, timeout_s: float) -> Any:
    """A worker whose port the kernel picks: TensorFlow puts it in place of %port%."""
    config = SERVICE.WorkerConfig(
        dispatcher_address=dispatcher.partition("://")[2],
        worker_address=f"{_own_host()}:%port%",
        port=0,
        heartbeat_interval_ms=1000,
        dispatcher_timeout_ms=int(timeout_s * 1000),
    )
    server = SERVICE.WorkerServer(config, start=False)
    server.start()
    return server
