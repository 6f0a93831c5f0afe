"""horoclone for TensorFlow: `import horoclone.tensorflow as hvd`. It offers what `horovod.tensorflow` does."""

from typing import TYPE_CHECKING, Any

from horoclone import optional
from horoclone.common.util import check_extension, gpu_available, split_list
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
from horoclone.ops import *  # noqa: F403 - the reductions; what a star gives, mypy does not pass on through another
from horoclone.runtime.exported import *  # noqa: F403 - topology, init() and shutdown(), for the same reason
from horoclone.runtime.flat_metrics import flat_metrics
from horoclone.runtime.observe import flight_record, metrics
from horoclone.tensorflow import elastic, mpi_ops, op_gradients, util  # noqa: F401 - op_gradients for its effect
from horoclone.tensorflow.compression import Compression
from horoclone.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    _make_broadcast_group_fn,  # noqa: F401 - private names that libraries know begin with an underscore
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horoclone.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horoclone.tensorflow.mpi_ops import *  # noqa: F403 - its __all__ is the list of operations, topology and reductions
from horoclone.tensorflow.mpi_ops import _allreduce, broadcast_  # noqa: F401
from horoclone.tensorflow.optimizer import (
    DistributedOptimizer,
    _DistributedOptimizer,  # noqa: F401
    _LegacyOptimizer,  # noqa: F401
    _make_allreduce_grads_fn,  # noqa: F401
)
from horoclone.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from horoclone.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from horoclone.tensorflow.util import (
    _executing_eagerly,  # noqa: F401 - a private name that scripts know
    check_num_rank_power_of_2,
    handle_average_backwards_compatibility,
    refs_to_vars,
    vars_to_refs,
)

__all__ = [
    *mpi_ops.__all__,
    "Aborted", "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer",
    "HorovodInternalError", "HostsUpdatedInterrupt", "LocalGradientAggregationHelper", "Mismatch", "NotInitialized",
    "PartialDistributedGradientTape",
    "PeerLost", "Timeout", "Unsupported", "allgather_object", "allreduce", "broadcast_",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables", "checkpoint",
    "elastic", "gpu_available", "grouped_allreduce", "grouped_reducescatter", "reducescatter",
    "flat_metrics", "flight_record", "metrics", "check_extension", "check_num_rank_power_of_2",
    "handle_average_backwards_compatibility", "refs_to_vars", "split_list", "vars_to_refs",
    "EvaluationSampler", "metric_mean", "metric_sum",
]  # fmt: skip


if TYPE_CHECKING:
    from horoclone import checkpoint as checkpoint
    from horoclone.tensorflow.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
else:  # a type checker would take it for a sign that every name is there
    _offered = optional.offers(__name__, __all__, checkpoint="checkpoint")

    def __getattr__(name: str) -> Any:
        """What is loaded only where it is used; SyncBatchNormalization needs Keras."""
        if name == "SyncBatchNormalization":
            from horoclone.tensorflow.sync_batch_norm import SyncBatchNormalization

            globals()[name] = SyncBatchNormalization
            return SyncBatchNormalization
        return _offered(name)


def __dir__() -> list[str]:
    return sorted({*globals(), "SyncBatchNormalization"})
