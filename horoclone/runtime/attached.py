"""Hands the runtime to native libraries of framework bindings that submit to the engine themselves, without Python.

TensorFlow's ops and JAX's compiled calls are such libraries. Each holds one pointer to the runtime, which is set here
after every init() and cleared before every shutdown(). Thread: any; life.py calls publish() with its lock held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.Lock()
_setters: list[Callable[[int], None]] = []
_address = 0


def attach(setter: Callable[[int], None]) -> None:
    """Registers a library's setter, for the life of the process.

    It is called with the address of the hc_runtime after each init (at once when that has happened), and with 0 before
    shutdown; when setter(0) has returned, the library may not touch the old runtime any more: it takes a lock that its
    submits share. It is not called in a forked child: there hc_submit refuses by itself.
    """
    with _lock:
        _setters.append(setter)
        if _address:
            setter(_address)


def publish(address: int) -> None:
    """Tells every library the address of the hc_runtime, 0 for none."""
    global _address
    with _lock:
        _address = address
        for setter in _setters:
            setter(address)
