"""horoclone for CuPy: `import horoclone.cupy as hvd`. Collectives on arrays on a GPU, behind CuPy's current stream."""

from horoclone import ops
from horoclone.array_handles import poll, synchronize
from horoclone.arrays import barrier
from horoclone.cupy.messages import irecv, isend, recv, send
from horoclone.cupy.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
)
from horoclone.cupy.rooted import (
    gather,
    gather_async,
    reduce,
    reduce_,
    reduce_async,
    reduce_async_,
    scatter,
    scatter_async,
)
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
