"""horoclone for CuPy: `import horoclone.cupy as hvd`. Collectives on arrays on a GPU, behind CuPy's current stream.

The functions of NumPy's binding over another adapter, memory.py.
"""

from __future__ import annotations

from typing import Any

from horoclone import ops
from horoclone.arrays.collectives import Collectives, barrier
from horoclone.arrays.grouped import Grouped
from horoclone.arrays.handles import poll, synchronize
from horoclone.arrays.messages import Messages
from horoclone.arrays.rooted import Rooted
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
from horoclone.runtime.life import init, shutdown

_collectives: Collectives[Any] = Collectives(memory)  # cupy.ndarray has no types
_grouped: Grouped[Any] = Grouped(memory)
_rooted: Rooted[Any] = Rooted(memory)
_messages: Messages[Any] = Messages(memory)

allgather = _collectives.allgather
allgather_async = _collectives.allgather_async
allreduce = _collectives.allreduce
allreduce_ = _collectives.allreduce_
allreduce_async = _collectives.allreduce_async
allreduce_async_ = _collectives.allreduce_async_
alltoall = _collectives.alltoall
alltoall_async = _collectives.alltoall_async
broadcast = _collectives.broadcast
broadcast_ = _collectives.broadcast_
broadcast_async = _collectives.broadcast_async
broadcast_async_ = _collectives.broadcast_async_
grouped_allgather = _grouped.grouped_allgather
grouped_allgather_async = _grouped.grouped_allgather_async
grouped_allreduce = _grouped.grouped_allreduce
grouped_allreduce_ = _grouped.grouped_allreduce_
grouped_allreduce_async = _grouped.grouped_allreduce_async
grouped_allreduce_async_ = _grouped.grouped_allreduce_async_
grouped_reducescatter = _grouped.grouped_reducescatter
grouped_reducescatter_async = _grouped.grouped_reducescatter_async
join = _collectives.join
reducescatter = _collectives.reducescatter
reducescatter_async = _collectives.reducescatter_async

gather = _rooted.gather
gather_async = _rooted.gather_async
reduce = _rooted.reduce
reduce_ = _rooted.reduce_
reduce_async = _rooted.reduce_async
reduce_async_ = _rooted.reduce_async_
scatter = _rooted.scatter
scatter_async = _rooted.scatter_async

irecv = _messages.irecv
isend = _messages.isend
recv = _messages.recv
send = _messages.send

__all__ = [
    *ops.__all__, "Aborted", "HorovodInternalError", "Mismatch", "NotInitialized",
    "PeerLost", "ProcessSet", "Timeout", "Unsupported", "add_process_set", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "broadcast_object", "broadcast_object_fn", "cross_rank", "cross_size", "cuda_built",
    "gather", "gather_async", "global_process_set", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "init", "irecv", "is_homogeneous",
    "is_initialized", "isend", "join", "local_rank", "local_size", "nccl_built", "poll", "rank", "recv",
    "reduce", "reduce_", "reduce_async", "reduce_async_", "reducescatter", "reducescatter_async",
    "remove_process_set", "scatter", "scatter_async", "send", "shutdown", "size", "start_timeline",
    "stop_timeline", "synchronize",
]  # fmt: skip
