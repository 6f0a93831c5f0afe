"""horoclone for Keras: `import horoclone.keras as hvd`. It offers what `horovod.keras` does, under the same names.

Keras 3 on TensorFlow, JAX or torch; with TF_USE_LEGACY_KERAS=1, tf_keras. Only the backend that Keras runs is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

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
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime import exported
from horoclone.runtime.exported import *  # noqa: F403 - topology, process sets, init() and shutdown()
from horoclone.runtime.flat_metrics import flat_metrics
from horoclone.runtime.observe import flight_record, metrics

__all__ = [
    *ops.__all__, *exported.__all__, "Aborted", "Compression", "DistributedOptimizer",
    "HorovodInternalError", "HostsUpdatedInterrupt", "Mismatch", "NotInitialized",
    "PartialDistributedOptimizer", "PeerLost", "Timeout", "Unsupported", "allgather", "allgather_object",
    "allreduce", "broadcast", "broadcast_global_variables", "broadcast_object", "broadcast_variables",
    "callbacks", "checkpoint", "elastic", "flat_metrics", "flight_record", "load_model", "metrics", "reducescatter",
    "EvaluationSampler", "metric_mean", "metric_sum",
]  # fmt: skip


if TYPE_CHECKING:
    from horoclone import checkpoint as checkpoint
else:  # a type checker would take it for a sign that every name is there
    __getattr__ = optional.offers(__name__, __all__, checkpoint="checkpoint")


OptimizerT = TypeVar("OptimizerT")  # the class is another one of its name, derived from it


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ops.ReduceOp | int = Average,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> OptimizerT:
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
    return make_distributed(**locals())  # type: ignore[no-any-return]
