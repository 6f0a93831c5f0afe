"""horoclone for JAX: `import horoclone.jax as hvd`. Collectives on pytrees, under jit and outside, and for Optax."""

from typing import TYPE_CHECKING

from horoclone import ops, optional
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
from horoclone.evaluation import EvaluationSampler, metric_mean, metric_sum
from horoclone.jax import elastic, native
from horoclone.jax.compression import Compression
from horoclone.jax.failures import horovod_error_of
from horoclone.jax.native import add_process_set, remove_process_set
from horoclone.jax.operations import allgather, allreduce, alltoall, barrier, broadcast, reducescatter
from horoclone.jax.optimizer import DistributedOptimizer
from horoclone.objects import allgather_object, broadcast_object
from horoclone.ops import *  # noqa: F403 - the reductions
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)
from horoclone.runtime.flat_metrics import flat_metrics
from horoclone.runtime.lifecycle import init, shutdown
from horoclone.runtime.observe import flight_record, metrics

native.load()

broadcast_parameters = broadcast
"""Does what `broadcast` does, under the name that it has in the other bindings."""

__all__ = [
    *ops.__all__, "Aborted", "Compression", "DistributedOptimizer", "HorovodInternalError",
    "HostsUpdatedInterrupt", "Mismatch", "NotInitialized", "PeerLost", "ProcessSet",
    "Timeout", "Unsupported", "add_process_set", "allgather", "allgather_object",
    "allreduce", "alltoall", "barrier", "broadcast", "broadcast_object", "broadcast_parameters",
    "checkpoint", "cross_rank", "cross_size", "elastic", "flat_metrics", "flight_record", "global_process_set",
    "horovod_error_of", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size", "metrics", "rank",
    "reducescatter", "remove_process_set", "shutdown", "size",
    "EvaluationSampler", "metric_mean", "metric_sum",
]  # fmt: skip


if TYPE_CHECKING:
    from horoclone import checkpoint as checkpoint
else:  # a type checker would take it for a sign that every name is there
    __getattr__ = optional.offers(__name__, __all__, checkpoint="checkpoint")
