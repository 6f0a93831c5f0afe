"""Carries what workers tell by ray_logger.log() to the callbacks in the driver. Thread hc-callbacks calls them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

Callback = Callable[[Any], Any]
LOOK_S = 1.0  # between two looks whether the run is over
LAST_S = 60.0  # for callbacks that are still at work when it is


def _beside_us() -> dict[str, Any]:
    """The queue's actor is on our own node, where that is one of the cluster: it is lost with us only."""
    if ray.util.client.ray.is_connected():
        return {"num_cpus": 0}
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}


class LogQueue:
    """As a context: queue is for the workers, None without callbacks. At the end all that has come was passed on."""

    def __init__(self, callbacks: Sequence[Callback] | None) -> None:
        self.queue = Queue(actor_options=_beside_us()) if callbacks else None
        self._callbacks = list(callbacks or ())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, name="hc-callbacks", daemon=True)

    @property
    def passing_on(self) -> list[Callback] | None:
        """Callbacks for an executor elsewhere in the cluster, which lead here."""
        return None if self.queue is None else [self.queue.put]

    def __enter__(self) -> LogQueue:
        if self.queue is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.queue is not None:
            self._is_over.set()
            self._thread.join(LAST_S)
            self.queue.shutdown()

    def _pass_on(self) -> None:
        assert self.queue is not None
        while True:
            is_last = self._is_over.is_set()
            try:
                value = self.queue.get(block=False) if is_last else self.queue.get(timeout=LOOK_S)
            except Empty:
                if is_last:
                    return
                continue
            except Exception as error:  # of Ray, when the queue's actor is lost
                logger.warning("callbacks hear nothing more: %s", error)
                return
            for callback in self._callbacks:
                try:
                    callback(value)
                except Exception:
                    logger.exception("a callback has failed on %r", value)
