"""The operations on torch tensors and the topology, under Horovod's name; scripts import it.

The operations themselves are in horoclone/torch/operations.
"""

from horoclone import ops
from horoclone.common.basics import HorovodBasics
from horoclone.errors import HorovodInternalError as HorovodInternalError  # Horovod has it here, too
from horoclone.ops import *  # noqa: F403 - the reductions
from horoclone.runtime import exported
from horoclone.runtime.exported import *  # noqa: F403 - topology, process sets, init() and shutdown()
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
    *ops.__all__, *exported.__all__, "allgather", "allgather_async", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "join", "poll", "reducescatter",
    "reducescatter_async", "sparse_allreduce_async", "synchronize",
]  # fmt: skip

_basics = HorovodBasics()  # a private name that many scripts know
