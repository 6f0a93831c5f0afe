"""Hands the runtime to native libraries of framework bindings that submit to the engine themselves, without Python.

TensorFlow's ops and JAX's compiled calls are such libraries. Each holds one pointer to the runtime, which is set here
after every init() and cleared before every shutdown(). Thread: any; lifecycle.py calls publish() with its lock held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horoclone._core import Runtime

_lock = threading.Lock()
_setters: list[Callable[[int], None]] = []
_finishers: list[Callable[[Runtime], None]] = []
_address = 0


def attach(setter: Callable[[int], None], finisher: Callable[[Runtime], None] | None = None) -> None:
    """Registers a library's setter, for the life of the process.

    It is called with the address of the hc_runtime after each init (at once when that has happened), and with 0 before
    shutdown; when setter(0) has returned, the library may not touch the old runtime any more: it takes a lock that its
    submits share. It is not called in a forked child: there hc_submit refuses by itself.

    finisher(runtime): waits for what the framework has been told to run and has not run yet; called before setter(0).
    """
    with _lock:
        _setters.append(setter)
        if finisher is not None:
            _finishers.append(finisher)
        if _address:
            setter(_address)


def publish(address: int) -> None:
    """Tells every library the address of the hc_runtime, 0 for none."""
    global _address
    with _lock:
        _address = address
        for setter in _setters:
            setter(address)


def finish(runtime: Runtime) -> None:
    """Waits for what the frameworks have still to run."""
    for finisher in list(_finishers):
        finisher(runtime)
