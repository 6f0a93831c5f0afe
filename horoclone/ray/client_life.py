"""Whether a Ray Client lives: its process says so once a second, and an actor in the cluster that hears nothing ends.

Ray waits 30 s for a client that has gone to come back, and keeps its actors so long (docs/decisions/ray.md). The signs
of life go through Ray's key-value store: a call of the actor would wait behind large arguments of other calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # between two signs of life, and between two looks at them
LET_GO_S = 1.0  # for what an actor does before it ends
SILENCE_S = 7.0  # where the client does not say how long it may be silent
GRACE = "RAY_CLIENT_RECONNECT_GRACE_PERIOD"  # of Ray: seconds that a client has to come back
_NAMESPACE = "horoclone"


def silence_s(environment: Mapping[str, str] = os.environ) -> float:
    """How long a client may be silent: as long as Ray waits for it, where that was asked for."""
    try:
        return max(SILENCE_S, float(environment.get(GRACE, "")))
    except ValueError:
        return SILENCE_S


class Silence:
    """How long nothing new was heard. Pure: times come in. It grows by two looks at most from one look to the next: a
    process that was itself stopped for a while has not listened."""

    def __init__(self, now: float) -> None:
        self.seconds = 0.0
        self._last: object = None
        self._before = now

    def heard(self, value: object, now: float) -> float:
        """value: the last sign of life; None: there was none. The seconds since there was another one."""
        is_new = value is not None and value != self._last
        self.seconds = 0.0 if is_new else self.seconds + min(now - self._before, 2 * BEAT_S)
        self._last, self._before = value, now
        return self.seconds

    def not_asked(self, now: float) -> None:
        """The store did not answer: that says nothing about the client."""
        self._before = now


class Beats:
    """The signs of life of this process. Thread: hc-ray-client gives them until close()."""

    def __init__(self) -> None:
        self.key = f"client/{secrets.token_hex(8)}"
        self._longest_s = 0.0  # between two of them that have come through
        self._is_over = threading.Event()
        _put(self.key, "0")
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._beat, name="hc-ray-client", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        number = 0
        while not self._is_over.wait(BEAT_S) and ray.util.client.ray.is_connected():
            number += 1
            with contextlib.suppress(Exception):  # Ray connects again, or the job ends with the connection
                _put(self.key, str(number))
                now = time.monotonic()
                self._longest_s, self._last = max(self._longest_s, now - self._last), now

    def longest_s(self) -> float:
        """How long, at most, none of them has come through."""
        return max(self._longest_s, time.monotonic() - self._last)

    def close(self) -> None:
        """No more of them. Thread: any, the first call counts."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(BEAT_S)  # it would write the key once more
        if ray.util.client.ray.is_connected():
            with contextlib.suppress(Exception):
                _delete(self.key)


def end_without(key: str, limit_s: float, let_go: Callable[[], None]) -> None:
    """In an actor: its process ends once the client of this key was silent for limit_s, and Ray then ends the actors
    that it owns. let_go() comes before: Ray keeps placement groups until its part of the client ends. Thread: own."""

    is_gone = threading.Event()

    def let_all_go() -> None:
        for each in (let_go, lambda: _delete(key)):
            with contextlib.suppress(Exception):  # the cluster may be going as well
                each()
        is_gone.set()

    def look() -> None:
        silence = Silence(time.monotonic())
        while True:
            time.sleep(BEAT_S)  # the store tells nobody that a value is new
            try:
                value = _get(key)
            except Exception:  # the store is away for a moment, or the cluster ends, and this process with it
                silence.not_asked(time.monotonic())
                continue
            if silence.heard(value, time.monotonic()) >= limit_s:
                logger.error("the Ray Client of this job was silent for %g s: the job ends", limit_s)
                threading.Thread(target=let_all_go, daemon=True).start()
                is_gone.wait(LET_GO_S)
                os._exit(1)

    threading.Thread(target=look, name="hc-ray-client", daemon=True).start()


def _put(key: str, value: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key.encode(), value.encode(), True, namespace=_NAMESPACE.encode())


def _get(key: str) -> Any:
    from ray.experimental.internal_kv import _internal_kv_get

    return _internal_kv_get(key.encode(), namespace=_NAMESPACE.encode())


def _delete(key: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key.encode(), namespace=_NAMESPACE.encode())
