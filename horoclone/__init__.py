"""horoclone: Horovod's programming model on a core of its own. `import horoclone as hvd` gives the NumPy API.

Every name is loaded on first use (PEP 562): importing the package loads neither NumPy nor the native module, so that
the launcher starts fast and works where those are missing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
"""The version of the package. Ranks of another build are refused in `init()`."""

HOROVOD_VERSION = "0.28.1"
"""The version of Horovod whose behaviour this is: `horovod.__version__`, where `import horovod` finds horoclone."""

_HOMES: dict[str, tuple[str, ...]] = {
    "runtime.lifecycle": ("init", "shutdown"),
    "runtime": (
        "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous",
        "mpi_threads_supported", "mpi_enabled", "gloo_enabled", "start_timeline", "stop_timeline",
    ),
    "runtime.built": (
        "mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "sycl_built",
    ),
    "runtime.observe": ("flight_record", "metrics"),
    "runtime.flat_metrics": ("flat_metrics",),
    "ops": ("Average", "Sum", "Adasum", "Min", "Max", "Product", "And", "Or", "Xor"),
    "process_sets": ("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    "errors": (
        "HorovodInternalError", "PeerLost", "Mismatch", "Timeout", "Aborted", "Unsupported", "NotInitialized",
        "HostsUpdatedInterrupt", "HorovodVersionMismatchError",
    ),
    "arrays": (
        "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_",
        "grouped_allreduce_async", "grouped_allreduce_async_", "allgather", "allgather_async", "grouped_allgather",
        "grouped_allgather_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "alltoall",
        "alltoall_async", "reducescatter", "reducescatter_async", "grouped_reducescatter",
        "grouped_reducescatter_async", "barrier", "join", "poll", "synchronize", "reduce", "reduce_", "reduce_async",
        "reduce_async_", "gather", "gather_async", "scatter", "scatter_async", "send", "recv", "isend", "irecv",
    ),
    "objects": ("broadcast_object", "broadcast_object_fn", "allgather_object"),
    "evaluation": ("EvaluationSampler", "metric_mean", "metric_sum"),
    "launch.api": ("run",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if name == "checkpoint":
        from horoclone import optional

        if optional.is_there(name):
            return optional.load("checkpoint")
    if home is None:
        raise AttributeError(f"module 'horoclone' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"horoclone.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
