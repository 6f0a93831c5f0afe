"""Signals to the launcher, as entries of a list and as something that wakes its loop."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def empty(wakeup: socket.socket) -> None:
    try:
        while wakeup.recv(4096):
            pass
    except BlockingIOError:
        pass


class Signals:
    """Signals to us become entries of a list and wake the loop. Outside the main thread Python allows none: then the
    caller's own handlers stay, and the job ends with its ranks."""

    def __init__(self, received: list[int]) -> None:
        self._received = received
        self._wakeup, self._wakeup_sender = socket.socketpair()
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> socket.socket:
        self._wakeup.setblocking(False)
        self._wakeup_sender.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(
                self._wakeup_sender.fileno(), warn_on_full_buffer=False
            )
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *FORWARDED):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # started by nohup
                self._before[number] = signal.signal(number, self._note)
        return self._wakeup

    def _note(self, number: int, _frame: object) -> None:
        self._received.append(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
        self._wakeup.close()
        self._wakeup_sender.close()
