"""Waits for the programs that JAX has dispatched and not yet run: the other ranks may need this one's part in them.

JAX returns from a call of a program before the program runs, and whoever does not read the result does not notice when
it does. So a rank can come to its end long before its programs. Thread: the one that ends the runtime; the waiting
itself is done by another, so that Ctrl-C is heard.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from horoclone.runtime.current import say

if TYPE_CHECKING:
    from horoclone._core import Runtime

IN_VAIN_S = 60.0  # without any progress, when every rank does nothing but wait
_LOOK_S = 0.5
_REST_S = 0.1  # that other threads' programs must be quiet
_BUSY_SHARE = 0.3  # of a processor: a process that is not quiet
_OTHERS_LIMIT_S = 10.0

builders: set[int] = set()  # the threads that have built programs with our calls


def finish(library: Any, runtime: Runtime) -> None:
    """Returns when nothing is left to run, or when the runtime has failed. Some wait in vain when the ranks have
    dispatched different programs: the runtime is aborted then."""
    if not _counts(library)[0]:
        return
    runtime.say_ending()
    over = threading.Event()
    threading.Thread(target=_watch, args=(library, runtime, over), name="hc-jax-watch", daemon=True).start()
    try:
        while True:
            before = _counts(library)
            _wait(_last_arrays())
            if builders - {threading.get_ident()}:
                _rest(library)
            sites, begun, ended = _counts(library)
            if (sites, begun, ended) == before and begun == ended:
                return
    finally:
        over.set()


def _counts(library: Any) -> tuple[int, int, int]:
    """Call sites in programs, calls that have come from them, and how many of these have ended."""
    sites, begun, ended = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int64()
    library.hc_jax_count(ctypes.byref(sites), ctypes.byref(begun), ctypes.byref(ended))
    return sites.value, begun.value, ended.value


def _last_arrays() -> list[Any]:
    """The arrays that are there, some of which programs have yet to fill, and for each device one that comes after all
    that this thread has dispatched to it, read or not: a device runs the programs of a thread in their order."""
    arrays: list[Any] = []
    for platform in {None, "cpu"}:
        try:
            arrays += jax.live_arrays(platform)
            for device in jax.local_devices(backend=platform):
                arrays.append(_behind_all(jax.device_put(np.float32(0), device)))
        except Exception:  # there is no such platform here, or a program before has failed
            continue
    return arrays


_behind_all = jax.jit(lambda x: x + x)


def _wait(arrays: list[Any]) -> None:
    over = threading.Event()

    def wait() -> None:
        for array in arrays:
            try:
                array.block_until_ready()
            except Exception:  # its program has failed, or it was donated
                continue
        over.set()

    threading.Thread(target=wait, name="hc-jax-wait", daemon=True).start()
    over.wait()


def _rest(library: Any) -> None:
    """Of programs that another thread has dispatched, and of which nobody keeps a result, nothing tells but that the
    process works and calls come."""
    until = time.monotonic() + _OTHERS_LIMIT_S
    while time.monotonic() < until:
        before, worked = _counts(library), time.process_time()
        time.sleep(_REST_S)
        is_idle = time.process_time() - worked < _BUSY_SHARE * _REST_S
        if is_idle and _counts(library) == before and before[1] == before[2]:
            return


def _watch(library: Any, runtime: Runtime, over: threading.Event) -> None:
    last, since = _counts(library), time.monotonic()
    while not over.wait(_LOOK_S):
        now = _counts(library)
        if now != last or now[1] == now[2]:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > IN_VAIN_S and runtime.all_are_ending():
            text = (
                f"every rank has come to its end, and {now[1] - now[2]} calls in JAX programs have waited "
                f"{IN_VAIN_S:g} s for ranks that did not make them; do all ranks call the same programs?"
            )
            say(text)
            return runtime.abort(text)
