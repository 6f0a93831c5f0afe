"""Notices that hosts came or went, and who listens to them. Thread: any; the membership coordinator's thread brings
them."""

from __future__ import annotations

import contextlib
import threading
from enum import IntFlag
from typing import Any, Protocol

from horoclone.elastic import member


class HostUpdateResult(IntFlag):
    """What a notice tells; as flags, so that two notices can be one."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class Listener(Protocol):
    """A State, or anything that wants to hear."""

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """timestamp: the number of the generation that is wanted, which only rises."""


class NoticeBoard:
    """Hands notices to listeners. What came before anybody listened is told to the first listener that comes.

    A listener that is registered twice hears each notice once, and listens until it has been removed twice.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._listeners: list[Listener] = []
        self._unheard: tuple[int, int] | None = None
        self._started = False

    def init(self, *_: Any, **__: Any) -> None:
        """Starts to hear of changes, if this job is elastic. Once is enough; what Horovod passes is not needed."""
        with self._mutex:
            if self._started or not member.is_elastic():
                return
            self._started = True
        member.start_notices(self.handle_hosts_updated)

    def register_listener(self, listener: Listener) -> None:
        """listener.on_hosts_updated(timestamp, update) is called for each notice, on the thread that brings it."""
        with self._mutex:
            self._listeners.append(listener)
            unheard, self._unheard = self._unheard, None
        if unheard is not None:
            listener.on_hosts_updated(*unheard)

    def remove_listener(self, listener: Listener) -> None:
        """One registration less; nothing happens when there is none."""
        with self._mutex:
            for place, one in enumerate(self._listeners):
                if one is listener:
                    del self._listeners[place]
                    return

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """A notice has come. Those that nobody hears are kept as one: the newest number, and every kind of change."""
        with self._mutex:
            listeners = {id(listener): listener for listener in self._listeners}
            if not listeners:
                number, update = self._unheard or (0, 0)
                self._unheard = (max(number, timestamp), update | int(update_res))
        with contextlib.ExitStack() as calls:  # all are told where one raises
            for listener in reversed(listeners.values()):
                calls.callback(listener.on_hosts_updated, timestamp, update_res)


notification_manager = NoticeBoard()
