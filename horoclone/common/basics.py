"""Under Horovod's name: HorovodBasics, an object whose methods are the functions of horoclone.runtime."""

from __future__ import annotations

from typing import Any

from horoclone import ops, process_sets, runtime
from horoclone.runtime import built, lifecycle


class HorovodBasics:
    """What `hvd.mpi_ops._basics` is. The arguments (Horovod's path to its library) are accepted and not needed."""

    Average = ops.Average
    Sum = ops.Sum
    Adasum = ops.Adasum
    Min = ops.Min
    Max = ops.Max
    Product = ops.Product

    init = staticmethod(lifecycle.init)
    shutdown = staticmethod(lifecycle.shutdown)
    is_initialized = staticmethod(runtime.is_initialized)
    start_timeline = staticmethod(runtime.start_timeline)
    stop_timeline = staticmethod(runtime.stop_timeline)
    size = staticmethod(runtime.size)
    rank = staticmethod(runtime.rank)
    local_size = staticmethod(runtime.local_size)
    local_rank = staticmethod(runtime.local_rank)
    cross_size = staticmethod(runtime.cross_size)
    cross_rank = staticmethod(runtime.cross_rank)
    is_homogeneous = staticmethod(runtime.is_homogeneous)
    mpi_threads_supported = staticmethod(runtime.mpi_threads_supported)
    mpi_enabled = staticmethod(runtime.mpi_enabled)
    mpi_built = staticmethod(built.mpi_built)
    gloo_enabled = staticmethod(runtime.gloo_enabled)
    gloo_built = staticmethod(built.gloo_built)
    nccl_built = staticmethod(built.nccl_built)
    ddl_built = staticmethod(built.ddl_built)
    ccl_built = staticmethod(built.ccl_built)
    cuda_built = staticmethod(built.cuda_built)
    rocm_built = staticmethod(built.rocm_built)
    sycl_built = staticmethod(built.sycl_built)

    def __init__(self, *library: Any) -> None:
        pass

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Id -> world ranks of every registered process set. NotInitialized before init."""
        runtime.native()
        return process_sets.registered()
