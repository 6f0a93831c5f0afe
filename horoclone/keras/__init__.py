"""horoclone for Keras: `import horoclone.keras as hvd`. It offers what `horovod.keras` does, under the same names.

Keras 3 on TensorFlow, JAX or torch; with TF_USE_LEGACY_KERAS=1, tf_keras. Only the backend that Keras runs is loaded.
"""

from __future__ import annotations

from typing import Any

from horoclone import checkpoint, ops
from horoclone.errors import (
    Aborted,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    Mismatch,
    NotInitialized,
    PeerLost,
    Timeout,
    Unsupported,
)
from horoclone.keras import callbacks, elastic
from horoclone.keras.distribute import Compression, PartialDistributedOptimizer, make_distributed
from horoclone.keras.saving import load_model
from horoclone.keras.values import (
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    reducescatter,
)
from horoclone.ops import *  # noqa: F403 - the reductions
from horoclone.ops import Average
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
from horoclone.runtime.observe import flight_record, metrics

__all__ = [
    *ops.__all__, "Aborted", "Compression", "DistributedOptimizer", "HorovodInternalError",
    "HostsUpdatedInterrupt", "Mismatch", "NotInitialized", "PartialDistributedOptimizer",
    "PeerLost", "ProcessSet", "Timeout", "Unsupported", "add_process_set", "allgather",
    "allgather_object", "allreduce", "broadcast", "broadcast_global_variables", "broadcast_object",
    "broadcast_variables", "callbacks", "ccl_built", "checkpoint", "cross_rank", "cross_size", "cuda_built",
    "ddl_built", "elastic", "flight_record", "global_process_set", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "load_model", "local_rank", "local_size", "metrics", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "reducescatter", "remove_process_set",
    "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline", "sycl_built",
]  # fmt: skip


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer reduce gradients over the ranks of `process_set` before it applies them.

    The optimizer itself is changed, built or not, and returned: its class is now one of the same name derived from
    the old one. name: of the operation in reports. compression: the form of gradients on the wire. sparse_as_dense:
    turns IndexedSlices into dense gradients first. gradient_predivide_factor: splits Average into 1/f before and
    f/size after the sum. op: Average or Sum. groups (num_groups in older scripts): a number of groups, or lists of
    variables, reduced together. backward_passes_per_step: batches added up locally for one update, averaged with
    average_aggregated_gradients. scale_local_gradients: local variables' gradients are divided by the size.
    device_dense and device_sparse have no effect.

    Raises ValueError for wrong arguments and for an optimizer that is distributed already, Unsupported for Adasum.
    """
    return make_distributed(**locals())
