"""Under Horovod's name: where the dispatchers and workers of a data service say that they are there.

horovod.tensorflow.data brings up such a service without it; this is for scripts that do so themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

from horoclone.runner.common.util import network
from horoclone.runner.common.util.timeout import Timeout, TimeoutException
from horoclone.runner.util.threads import in_thread


class RegisterDispatcherRequest:
    """This dispatcher answers at this address."""

    def __init__(self, dispatcher_id: int, dispatcher_address: str) -> None:
        self.dispatcher_id = dispatcher_id
        self.dispatcher_address = dispatcher_address


class WaitForDispatcherRegistrationRequest:
    """Answered when that dispatcher is there; timeout: seconds."""

    def __init__(self, dispatcher_id: int, timeout: float) -> None:
        self.dispatcher_id = dispatcher_id
        self.timeout = timeout


class WaitForDispatcherRegistrationResponse:
    """At this address."""

    def __init__(self, dispatcher_address: str) -> None:
        self.dispatcher_address = dispatcher_address


class RegisterDispatcherWorkerRequest:
    """This worker of that dispatcher is there."""

    def __init__(self, dispatcher_id: int, worker_id: int) -> None:
        self.dispatcher_id = dispatcher_id
        self.worker_id = worker_id


class WaitForDispatcherWorkerRegistrationRequest:
    """Answered when all workers of that dispatcher are there; timeout: seconds."""

    def __init__(self, dispatcher_id: int, timeout: float) -> None:
        self.dispatcher_id = dispatcher_id
        self.timeout = timeout


class ShutdownRequest:
    """The service is not needed any more."""


class WaitForShutdownRequest:
    """Answered when somebody has said so."""


class ComputeService(network.BasicService):
    """dispatchers, workers_per_dispatcher: how many there will be. ValueError unless both are at least 1."""

    NAME = "Compute service"

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Sequence[str] | None = None
    ) -> None:
        for what, count in (
            ("dispatchers", dispatchers),
            ("workers per dispatcher", workers_per_dispatcher),
        ):
            if count <= 0:
                raise ValueError(f"The number of {what} must be larger than 0: {count}")
        self._dispatchers, self._workers_each = dispatchers, workers_per_dispatcher
        self._changed = threading.Condition()
        self._addresses_of: dict[int, str] = {}  # this and the rest guarded by _changed
        self._workers_of: dict[int, set[int]] = {one: set() for one in range(dispatchers)}
        self._is_over = False
        super().__init__(self.NAME, key, nics)

    def _handle(self, req: Any, client_address: network.Address) -> Any:
        """Errors are answers, too: the client raises them."""
        try:
            return self._answer(req, client_address)
        except (IndexError, ValueError, TimeoutException) as error:
            return error

    def _answer(self, req: Any, client_address: network.Address) -> Any:
        if isinstance(req, RegisterDispatcherRequest):
            self._register(self._checked(req.dispatcher_id), req.dispatcher_address)
        elif isinstance(req, WaitForDispatcherRegistrationRequest):
            wanted = self._checked(req.dispatcher_id)
            limit = self._limit(req.timeout, "the dispatcher")
            self._wait(lambda: wanted in self._addresses_of, limit, f"dispatcher {wanted} to register")
            return WaitForDispatcherRegistrationResponse(self._addresses_of[wanted])
        elif isinstance(req, RegisterDispatcherWorkerRequest):
            with self._changed:
                self._workers_of[self._checked(req.dispatcher_id)].add(req.worker_id)
                self._changed.notify_all()
        elif isinstance(req, WaitForDispatcherWorkerRegistrationRequest):
            wanted = self._checked(req.dispatcher_id if self._dispatchers > 1 else 0)
            limit = self._limit(req.timeout, "the workers")
            activity = f"workers for dispatcher {wanted} to register"
            self._wait(lambda: len(self._workers_of[wanted]) >= self._workers_each, limit, activity)
        elif isinstance(req, ShutdownRequest):
            in_thread(self.shutdown)
        elif isinstance(req, WaitForShutdownRequest):
            self._wait(lambda: self._is_over, None, "")
        else:
            return super()._handle(req, client_address)
        return network.AckResponse()

    def _checked(self, dispatcher_id: int) -> int:
        if not 0 <= dispatcher_id < self._dispatchers:
            raise IndexError(f"Dispatcher id must be within [0..{self._dispatchers - 1}]: {dispatcher_id}")
        return dispatcher_id

    def _register(self, dispatcher_id: int, address: str) -> None:
        with self._changed:
            before = self._addresses_of.setdefault(dispatcher_id, address)
            if before != address:
                raise ValueError(
                    f"Dispatcher with id {dispatcher_id} has already been registered under different address "
                    f"{before}: {address}"
                )
            self._changed.notify_all()

    @staticmethod
    def _limit(timeout_s: float, who: str) -> Timeout:
        return Timeout(
            timeout_s,
            f"Timed out waiting for {{activity}}. Try to find out what takes {who} so long to register or increase "
            "timeout.",
        )

    def _wait(self, is_so: Callable[[], bool], limit: Timeout | None, activity: str) -> None:
        with self._changed:
            while not is_so():
                self._changed.wait(None if limit is None else limit.remaining())
                if limit is not None and not is_so():
                    limit.check_time_out_for(activity)

    def shutdown(self) -> None:
        """Tells those who wait for it, and stops listening."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        super().shutdown()


class ComputeClient(network.BasicClient):
    """Speaks to such a service; its methods raise what the service answers with."""

    def __init__(self, compute_addresses: Any, key: bytes, verbose: int = 1) -> None:
        super().__init__(ComputeService.NAME, compute_addresses, key, verbose)

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """IndexError for no such dispatcher, ValueError when it is there under another address."""
        self._send(RegisterDispatcherRequest(dispatcher_id, dispatcher_address))

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Its address. TimeoutException after so many seconds."""
        answer = self._send(WaitForDispatcherRegistrationRequest(dispatcher_id, timeout))
        return answer.dispatcher_address  # type: ignore[no-any-return]

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """IndexError for no such dispatcher."""
        self._send(RegisterDispatcherWorkerRequest(dispatcher_id, worker_id))

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Until all its workers are there. TimeoutException after so many seconds."""
        self._send(WaitForDispatcherWorkerRegistrationRequest(dispatcher_id, timeout))

    def shutdown(self) -> None:
        """The service is not needed any more."""
        self._send(ShutdownRequest())

    def wait_for_shutdown(self) -> None:
        """Until somebody has said so. A service that is gone has been shut down, or its process has ended."""
        with contextlib.suppress(OSError, EOFError):
            self._send(WaitForShutdownRequest())

    def _send(self, req: Any, stream: Any = None) -> Any:
        answer = super()._send(req, stream)
        if isinstance(answer, Exception):
            raise answer
        return answer
