"""The operations on torch tensors, each with its gradient. handles.py and requests.py serve all of them."""

from horoclone.torch.operations.all_gather import allgather, allgather_async, sparse_allreduce_async
from horoclone.torch.operations.all_reduce import allreduce, allreduce_, allreduce_async, allreduce_async_
from horoclone.torch.operations.all_to_all import alltoall, alltoall_async
from horoclone.torch.operations.barriers import barrier, join
from horoclone.torch.operations.broadcasting import broadcast, broadcast_, broadcast_async, broadcast_async_
from horoclone.torch.operations.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from horoclone.torch.operations.handles import poll, synchronize
from horoclone.torch.operations.messages import irecv, isend, recv, send
from horoclone.torch.operations.reduce_scatter import reducescatter, reducescatter_async
from horoclone.torch.operations.rooted import (
    gather,
    gather_async,
    reduce,
    reduce_,
    reduce_async,
    reduce_async_,
    scatter,
    scatter_async,
)

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "gather", "gather_async", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "irecv", "isend", "join", "poll", "recv", "reduce", "reduce_",
    "reduce_async", "reduce_async_", "reducescatter", "reducescatter_async", "scatter", "scatter_async", "send",
    "sparse_allreduce_async", "synchronize",
]  # fmt: skip
