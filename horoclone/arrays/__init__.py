"""The operations on NumPy arrays: `import horoclone as hvd`, no framework needed.

They take anything that np.asarray takes; arrays that are not in native byte order are copied, and in-place functions
refuse them. All other rules are in collectives.py, rooted.py and messages.py.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from horoclone.arrays import host_memory
from horoclone.arrays.collectives import Collectives, barrier
from horoclone.arrays.grouped import Grouped
from horoclone.arrays.handles import poll, synchronize
from horoclone.arrays.messages import Messages
from horoclone.arrays.rooted import Rooted

_collectives: Collectives[NDArray[Any]] = Collectives(host_memory)
_grouped: Grouped[NDArray[Any]] = Grouped(host_memory)
_rooted: Rooted[NDArray[Any]] = Rooted(host_memory)
_messages: Messages[NDArray[Any]] = Messages(host_memory)

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
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "gather", "gather_async", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "irecv", "isend", "join", "poll", "recv", "reduce", "reduce_",
    "reduce_async", "reduce_async_", "reducescatter", "reducescatter_async", "scatter", "scatter_async", "send",
    "synchronize",
]  # fmt: skip
