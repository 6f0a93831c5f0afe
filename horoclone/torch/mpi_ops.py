"""The operations on torch tensors and the facts about this process, under Horovod's name; scripts import it.

The operations themselves are in horoclone/torch/operations.
"""

from horoclone import ops
from horoclone.common.basics import HorovodBasics
from horoclone.errors import HorovodInternalError as HorovodInternalError  # Horovod has it here, too
from horoclone.ops import *  # noqa: F403 - the reductions
from horoclone.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horoclone.runtime import (
    cross_rank,
    cross_size,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_enabled,
    mpi_threads_supported,
    rank,
    size,
    start_timeline,
    stop_timeline,
)
from horoclone.runtime.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
    sycl_built,
)
from horoclone.runtime.life import init, shutdown
from horoclone.torch.operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
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
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)

__all__ = [
    *ops.__all__, "ProcessSet", "add_process_set", "allgather",
    "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built",
    "gloo_enabled", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank",
    "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "sycl_built", "synchronize",
]  # fmt: skip

_basics = HorovodBasics()  # a private name that many scripts know
