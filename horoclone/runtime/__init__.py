"""The runtime of this process: the pointer to it and the topology. lifecycle.py starts and ends it.

Nothing here imports lifecycle.py, so that process sets and bindings can use the pointer without what init() needs.
"""

from horoclone.runtime.current import is_initialized, native
from horoclone.runtime.topology import (
    cross_rank,
    cross_size,
    gloo_enabled,
    is_homogeneous,
    local_rank,
    local_size,
    mpi_enabled,
    mpi_threads_supported,
    rank,
    size,
    start_timeline,
    stop_timeline,
)

__all__ = [
    "cross_rank", "cross_size", "gloo_enabled", "is_homogeneous", "is_initialized", "local_rank", "local_size",
    "mpi_enabled", "mpi_threads_supported", "native", "rank", "size", "start_timeline", "stop_timeline",
]  # fmt: skip
