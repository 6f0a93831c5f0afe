"""horoclone for CuPy: `import horoclone.cupy as hvd`. Collectives on arrays on a GPU, behind CuPy's current stream.

The functions of NumPy's binding over another adapter, memory.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horoclone import ops
from horoclone.arrays.functions import functions_over
from horoclone.cupy import memory
from horoclone.errors import (
    Aborted,
    HorovodInternalError,
    Mismatch,
    NotInitialized,
    PeerLost,
    Timeout,
    Unsupported,
)
from horoclone.evaluation import EvaluationSampler, metric_mean, metric_sum
from horoclone.objects import allgather_object, broadcast_object, broadcast_object_fn
from horoclone.ops import *  # noqa: F403 - the reductions
from horoclone.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horoclone.runtime import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
    start_timeline,
    stop_timeline,
)
from horoclone.runtime.built import cuda_built, nccl_built
from horoclone.runtime.lifecycle import init, shutdown

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


_functions = functions_over(memory)
globals().update(_functions)
__all__ = [
    *ops.__all__, *_functions, "Aborted", "HorovodInternalError", "Mismatch", "NotInitialized", "PeerLost",
    "ProcessSet", "Timeout", "Unsupported", "add_process_set", "allgather_object", "broadcast_object",
    "broadcast_object_fn", "cross_rank", "cross_size", "cuda_built", "global_process_set", "init", "is_homogeneous",
    "is_initialized", "local_rank", "local_size", "nccl_built", "rank", "remove_process_set", "shutdown", "size",
    "start_timeline", "stop_timeline",
    "EvaluationSampler", "metric_mean", "metric_sum",
]  # fmt: skip
