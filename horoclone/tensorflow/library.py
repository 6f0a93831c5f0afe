"""Loads libhoroclone_tensorflow.so, which registers our ops with TensorFlow, and tells it where the runtime is.

The library is built without TensorFlow: when it is loaded it finds TensorFlow's C API in the process and tests it.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import tensorflow as tf

import horoclone
from horoclone.errors import HorovodVersionMismatchError
from horoclone.runtime import attached

OLDEST = (2, 16)
MADE_FOR = "2.16 or newer (tested with 2.16 and 2.21)"
_PATH = Path(horoclone.__file__).parent / "libhoroclone_tensorflow.so"


class _WithSpans:
    """The op functions; while TensorFlow's profiler runs, an op that is run eagerly has a span `horoclone.allreduce`
    with the tensor's name. In a graph TensorFlow shows start and end of the op by itself, with its node's name."""

    def __init__(self, functions: Any) -> None:
        from tensorflow.python.profiler import trace  # not before the version is known to be one of ours

        self._functions = functions
        self._is_profiling = trace.enabled

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        span = f"horoclone.{name.removeprefix('horovod_')}"

        def call(label: str = "", **arguments: Any) -> Any:
            if not self._is_profiling() or not tf.executing_eagerly():
                return function(**arguments)
            with tf.profiler.experimental.Trace(span, tensor=label):
                return function(**arguments)

        setattr(self, name, call)  # found there from now on
        return call


def _load() -> Any:
    """The module of op functions that TensorFlow makes from the library.

    HorovodVersionMismatchError (an ImportError) when this TensorFlow cannot be used, with the reason as its cause.
    """
    found = tuple(map(int, re.findall(r"\d+", tf.__version__)[:2]))
    if found < OLDEST:
        raise HorovodVersionMismatchError("tensorflow", MADE_FOR, tf.__version__)
    try:
        functions = tf.load_op_library(str(_PATH))
    except tf.errors.OpError as error:
        raise ImportError(
            f"{_PATH.name} cannot be loaded: {error.message}. Reinstall horoclone; in a source tree: pip install -e ."
        ) from error
    native = ctypes.CDLL(str(_PATH))  # the copy that TensorFlow has loaded
    native.hc_tensorflow_problem.restype = ctypes.c_char_p
    problem = native.hc_tensorflow_problem()
    if problem is not None:
        raise HorovodVersionMismatchError("tensorflow", MADE_FOR, tf.__version__) from ImportError(
            problem.decode()
        )
    set_runtime = native.hc_tensorflow_set_runtime
    set_runtime.argtypes, set_runtime.restype = [ctypes.c_uint64], None
    attached.attach(set_runtime)
    return functions


functions: Any = _WithSpans(_load())
