"""The library with XLA's handlers: loaded, checked, registered with JAX, and told where the runtime is.

Loading needs no running JAX backend; check() does, and is made once before the first program is built. Thread: any.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

import horoclone
from horoclone import process_sets
from horoclone.errors import Unsupported
from horoclone.jax.finishing import finish
from horoclone.process_sets import ProcessSet, global_process_set, id_of
from horoclone.runtime import attached

TARGET = "horoclone_collective"
HASH_TARGET = "horoclone_hash"
CALL_SITE = "horoclone_call_site"
LIBRARY = Path(horoclone.__file__).with_name("libhoroclone_jax.so")

_library: Any = None
_checked = False
_lock = threading.Lock()


def load() -> None:
    """Loads and registers the library; ImportError says what is wrong with it."""
    global _library
    with _lock:
        if _library is not None:
            return
        try:
            library = ctypes.CDLL(str(LIBRARY))
        except OSError as error:
            raise ImportError(
                f"horoclone's handlers for JAX cannot be loaded: {error}. Reinstall horoclone (in a source tree: "
                "pip install -e .)."
            ) from error
        library.hc_jax_attach.argtypes = [ctypes.c_void_p]
        library.hc_jax_attach.restype = None
        library.hc_jax_process_set.argtypes = [ctypes.c_char_p, ctypes.c_int32]
        library.hc_jax_process_set.restype = None
        library.hc_jax_count.argtypes = [ctypes.POINTER(ctypes.c_int64)] * 3
        library.hc_jax_count.restype = None
        for platform, prefix in PLATFORMS.items():
            register(library, platform, prefix)
        _library = library
        attached.attach(_set_runtime, lambda runtime: finish(library, runtime))


# XLA's name of each platform, and what the names of its handlers begin with. GPUs: until a program for them is built,
# JAX only remembers what is registered, also where no plugin for CUDA is installed.
PLATFORMS = {"cpu": "hc_jax_", "CUDA": "hc_jax_cuda_"}


def register(
    library: Any, platform: str, prefix: str, target: str = TARGET, call_site: str = CALL_SITE
) -> None:
    """Registers the handlers of `library` whose names begin with `prefix` as `target` of XLA's `platform`."""
    parts: dict[str, Any] = {}
    for part in ("type", "info"):
        function = getattr(library, f"{prefix}call_site_{part}")
        function.restype = ctypes.c_void_p
        parts["type_id" if part == "type" else "type_info"] = _capsule(function())
    stages = {
        stage: jax.ffi.pycapsule(getattr(library, f"{prefix}{stage}")) for stage in ("instantiate", "execute")
    }
    try:
        jax.ffi.register_ffi_type(call_site, parts, platform=platform)
        jax.ffi.register_ffi_target(target, stages, platform=platform)
    except Exception as error:  # XLA's own classes; the reason is in the text
        raise ImportError(_unfit(f"jaxlib refuses horoclone's handlers ({error})")) from error


@functools.cache
def register_hash() -> None:
    """Registers the call that hashes memory in programs for the CPU (compared.py)."""
    handler = jax.ffi.pycapsule(_library.hc_jax_hash)
    jax.ffi.register_ffi_target(HASH_TARGET, handler, platform="cpu")


def _capsule(address: int) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(address, None, None)


def _unfit(what: str) -> str:
    return (
        f"{what}. jax {jax.__version__} is installed; horoclone's handlers are made for version 0.3 of XLA's FFI "
        "interface and were tested with jax 0.10.2, 0.11.2 and 0.12.0: pip install 'jax==0.10.2'."
    )


# --- the runtime and its process sets ----------------------------------------------------------------------------


def _set_runtime(address: int) -> None:
    _library.hc_jax_attach(address or None)
    if address:
        refresh()


def members_of(process_set: ProcessSet) -> str:
    """The set as the handlers know it: its ranks, so that a program survives shutdown and init. Registers it there."""
    if process_set is global_process_set:
        return ""
    number = id_of(process_set)
    members = ",".join(map(str, process_set.ranks or ()))
    _library.hc_jax_process_set(members.encode(), number)
    return members


def refresh() -> None:
    """Tells the handlers every registered process set: programs of an earlier life find theirs again."""
    for number, ranks in process_sets.registered().items():
        if number:
            _library.hc_jax_process_set(",".join(map(str, ranks)).encode(), number)


def add_process_set(process_set: Any) -> ProcessSet:
    """Registers one more set, as horoclone.add_process_set does; programs that were compiled for these ranks before can
    use the set."""
    added = process_sets.add_process_set(process_set)
    members_of(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set, as horoclone.remove_process_set does; programs that use the set fail from now on, with an error
    that names it."""
    ranks = ",".join(map(str, process_set.ranks or ()))
    removed = process_sets.remove_process_set(process_set)
    if removed:
        _library.hc_jax_process_set(ranks.encode(), -1)
    return removed


# --- the self-test ---------------------------------------------------------------------------------------------------


def check(loopback: Any) -> None:
    """Once per process: data, dtypes, a completion from another thread and an error's text pass through XLA unharmed.

    `loopback(arrays, root)` calls the handlers' self-test. Raises Unsupported when this jaxlib and they do not fit.
    """
    global _checked
    if _checked:
        return
    with _lock:
        if _checked:
            return
        found: list[BaseException] = []
        # Its own thread: in this one a trace may be going on.
        thread = threading.Thread(target=_self_test, args=(loopback, found), name="horoclone-jax-check")
        thread.start()
        thread.join()
        if found:
            raise Unsupported(
                _unfit(f"the self-test of horoclone's JAX handlers failed ({found[0]})")
            ) from found[0]
        _checked = True


def _self_test(loopback: Any, found: list[BaseException]) -> None:
    try:
        given = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(True), np.zeros((0, 2), np.int32)]
        with jax.default_device(jax.devices("cpu")[0]):
            got = jax.jit(lambda *a: loopback(a, 0))(*given)
            if not all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(got, given, strict=True)):
                raise RuntimeError(f"{given} came back as {got}")
            try:
                jax.block_until_ready(jax.jit(lambda *a: loopback(a, 7))(*given))
            except jax.errors.JaxRuntimeError as error:
                if "self-test" not in str(error):
                    raise
            else:
                raise RuntimeError("an error of the handler did not arrive")
    except BaseException as error:  # to be raised in the thread that asked
        found.append(error)
