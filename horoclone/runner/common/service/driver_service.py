"""Under Horovod's name: where the tasks of a job say at which addresses they answer, and on which host they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from horoclone.runner.common.util import network

Addresses = dict[str, list[network.Address]]


class RegisterTaskRequest:
    """Task `index` answers at these addresses; tasks with one host_hash share a host."""

    def __init__(self, index: int, task_addresses: Addresses, host_hash: str) -> None:
        self.index = index
        self.task_addresses = task_addresses
        self.host_hash = host_hash


class RegisterTaskToTaskAddressesRequest:
    """At which addresses another task was reached by task `index`."""

    def __init__(self, index: int, task_addresses: Addresses) -> None:
        self.index = index
        self.task_addresses = task_addresses


class AllTaskAddressesRequest:
    """At which addresses does this task answer?"""

    def __init__(self, index: int) -> None:
        self.index = index


class AllTaskAddressesResponse:
    """At these."""

    def __init__(self, all_task_addresses: Addresses) -> None:
        self.all_task_addresses = all_task_addresses


class BasicDriverService(network.BasicService):
    """For tasks 0 to num_proc - 1. A task that registers again takes the place of the one before."""

    def __init__(self, num_proc: int, name: str, key: bytes, nics: Sequence[str] | None) -> None:
        self._num_proc = num_proc
        self._changed = threading.Condition()
        self._all: dict[int, Addresses] = {}  # this and the rest guarded by _changed
        self._for_driver: dict[int, Addresses] = {}
        self._for_tasks: dict[int, Addresses] = {}
        self._host_hashes: dict[int, str] = {}
        super().__init__(name, key, nics)

    def _handle(self, req: Any, client_address: network.Address) -> Any:
        if isinstance(req, RegisterTaskRequest):
            self._check(req.index)
            seen_at = client_address[0]
            with self._changed:
                self._all[req.index] = req.task_addresses
                self._for_driver[req.index] = {
                    nic: found
                    for nic, listed in req.task_addresses.items()
                    if (found := [one for one in listed if one[0] == seen_at])
                }
                self._host_hashes[req.index] = req.host_hash
                self._changed.notify_all()
            return network.AckResponse()
        if isinstance(req, RegisterTaskToTaskAddressesRequest):
            self.register_task_to_task_addresses(req.index, req.task_addresses)
            return network.AckResponse()
        if isinstance(req, AllTaskAddressesRequest):
            return AllTaskAddressesResponse(self.all_task_addresses(req.index))
        return super()._handle(req, client_address)

    def _check(self, index: int) -> None:
        if not 0 <= index < self._num_proc:
            raise ValueError(f"there are tasks 0 to {self._num_proc - 1}, and no task {index}")

    def all_task_addresses(self, index: int) -> Addresses:
        """Where the task answers, as it said itself."""
        with self._changed:
            return dict(self._all[index])

    def task_addresses_for_driver(self, index: int) -> Addresses:
        """Those of them from which it came here; none where an address is translated on the way."""
        with self._changed:
            return dict(self._for_driver[index])

    def task_addresses_for_tasks(self, index: int) -> Addresses:
        """As register_task_to_task_addresses() was told."""
        with self._changed:
            return dict(self._for_tasks[index])

    def register_task_to_task_addresses(self, index: int, task_addresses: Addresses) -> None:
        """The other side of RegisterTaskToTaskAddressesRequest."""
        self._check(index)
        with self._changed:
            self._for_tasks[index] = task_addresses
            self._changed.notify_all()

    def task_indices(self) -> list[int]:
        """Tasks that have registered, in that order."""
        with self._changed:
            return list(self._host_hashes)

    def task_host_hash_indices(self) -> dict[str, list[int]]:
        """Host hash -> tasks there, ascending."""
        found: dict[str, list[int]] = {}
        with self._changed:
            for index, host_hash in sorted(self._host_hashes.items()):
                found.setdefault(host_hash, []).append(index)
        return found

    def task_index_host_hash(self, index: int) -> str:
        """Of one task."""
        self._check(index)
        with self._changed:
            return self._host_hashes[index]

    def wait_for_initial_registration(self, timeout: Any) -> None:
        """Until all have registered. timeout: a Timeout, whose exception it raises."""
        self._wait(lambda: len(self._all) == self._num_proc, timeout, "tasks to start")

    def wait_for_task_to_task_address_updates(self, timeout: Any) -> None:
        """Until all have said whom they reach. timeout: as above."""
        self._wait(
            lambda: len(self._for_tasks) == self._num_proc, timeout, "tasks to update task-to-task addresses"
        )

    def _wait(self, is_so: Callable[[], bool], timeout: Any, activity: str) -> None:
        with self._changed:
            while not is_so():
                self._changed.wait(timeout.remaining())
                if not is_so():
                    timeout.check_time_out_for(activity)


class BasicDriverClient(network.BasicClient):
    """Speaks to such a service."""

    def __init__(
        self, name: str, driver_addresses: Any, key: bytes, verbose: int = 0, match_intf: bool = False
    ) -> None:
        super().__init__(name, driver_addresses, key, verbose, match_intf=match_intf)

    def register_task(self, index: int, task_addresses: Addresses, host_hash: str) -> None:
        """See RegisterTaskRequest."""
        self._send(RegisterTaskRequest(index, task_addresses, host_hash))

    def all_task_addresses(self, index: int) -> Addresses:
        """See AllTaskAddressesRequest."""
        return self._send(AllTaskAddressesRequest(index)).all_task_addresses  # type: ignore[no-any-return]

    def register_task_to_task_addresses(self, index: int, task_addresses: Addresses) -> None:
        """See RegisterTaskToTaskAddressesRequest."""
        self._send(RegisterTaskToTaskAddressesRequest(index, task_addresses))
