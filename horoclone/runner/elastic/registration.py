"""Under Horovod's name: what the workers of one rendezvous have said, each once: READY, SUCCESS or FAILURE.

When all have, it is decided whether the job is done, has failed, or goes on with the hosts that are left.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from horoclone.runner.elastic import constants

READY = "READY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"

_LOOK_EVERY_S = 0.5  # a driver that is stopped by somebody else is noticed so soon

Key = tuple[str, int]


class WorkerStateRegistry:
    """driver: has finished(), stop() and resume(). host_manager: a HostManager, whose failed hosts do not count.

    Each record_*() returns when all workers of the rendezvous have recorded something, with the number of it.
    """

    def __init__(
        self, driver: Any, host_manager: Any, reset_limit: int | None = None, verbose: bool = False
    ) -> None:
        self._driver, self._host_manager = driver, host_manager
        self._reset_limit, self._reset_count = reset_limit, 0
        self._changed = threading.Condition()
        self._states: dict[Key, str] = {}  # this and the rest guarded by _changed
        self._size = 0
        self._rendezvous_id = 0
        self._is_deciding = False

    def get_recorded_slots(self) -> list[Key]:
        """(host, slot) of those that have recorded something."""
        with self._changed:
            return list(self._states)

    def get(self, state: str) -> set[Key]:
        """(host, slot) of those whose newest state this is."""
        with self._changed:
            return {key for key, found in self._states.items() if found == state}

    def count(self, state: str) -> int:
        """How many those are."""
        return len(self.get(state))

    def reset(self, size: int) -> None:
        """The next rendezvous begins, of so many workers. Those who wait for the one before go on."""
        with self._changed:
            self._states.clear()
            self._size = size
            self._rendezvous_id += 1
            self._is_deciding = False
            self._changed.notify_all()

    def size(self) -> int:
        """Of the newest rendezvous."""
        return self._size

    def last_rendezvous(self) -> int:
        """Its number, from 1."""
        return self._rendezvous_id

    def record_ready(self, host: str, slot: int) -> int:
        """The worker waits for its rank. RuntimeError when it is lost meanwhile."""
        return self._record((host, slot), READY)

    def record_success(self, host: str, slot: int) -> int:
        """The worker has ended, and its work is done."""
        return self._record((host, slot), SUCCESS)

    def record_failure(self, host: str, slot: int) -> int:
        """The worker has failed; this holds whatever it recorded before."""
        return self._record((host, slot), FAILURE)

    def _record(self, key: Key, state: str) -> int:
        if self._driver.finished() or self._host_manager.is_blacklisted(key[0]):
            return self._rendezvous_id
        with self._changed:
            mine = self._rendezvous_id
            if self._states.get(key, READY) == READY or state == FAILURE:
                self._states[key] = state
                self._changed.notify_all()
            decides = len(self._states) == self._size and not self._is_deciding
            self._is_deciding |= decides
        if decides:
            self._decide()
        with self._changed:
            while self._rendezvous_id == mine and not self._driver.finished():
                if state == READY and self._states.get(key) == FAILURE:
                    raise RuntimeError(f"State {READY} overridden by {FAILURE}")
                self._changed.wait(_LOOK_EVERY_S)
        return mine

    def _decide(self) -> None:
        """All have recorded something. Not under the lock: the driver waits for hosts and then calls reset()."""
        try:
            self._go_on()
        except Exception as error:
            logging.exception("no more workers can be started: the job ends")
            self._driver.stop(error_message=str(error))
        with self._changed:
            self._changed.notify_all()

    def _go_on(self) -> None:
        failures = self.get(FAILURE)
        if self.get(SUCCESS) or len(failures) == self._size:
            self._driver.stop()
            return
        for host, _ in failures:
            self._host_manager.blacklist(host)
        if all(self._host_manager.is_blacklisted(host) for host, _ in self.get_recorded_slots()):
            self._driver.stop()
        elif self._reset_limit is not None and self._reset_count >= self._reset_limit:
            self._driver.stop(error_message=constants.RESET_LIMIT_EXCEEDED_MESSAGE.format(self._reset_limit))
        else:
            self._reset_count += 1
            self._driver.resume()
