"""horoclone for PyTorch: `import horoclone.torch as hvd`. It offers what `horovod.torch` does, under the same names."""

import importlib
from typing import TYPE_CHECKING, Any

from horoclone import optional
from horoclone.common.util import check_extension
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
from horoclone.runtime import lifecycle
from horoclone.runtime.exported import *  # noqa: F403 - topology, init() and shutdown(), for the same reason
from horoclone.runtime.flat_metrics import flat_metrics
from horoclone.runtime.observe import flight_record, metrics
from horoclone.torch import c10d, elastic, mpi_ops
from horoclone.torch.compression import Compression
from horoclone.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horoclone.torch.mpi_ops import *  # noqa: F403 - its __all__ is the list of operations, topology and reductions
from horoclone.torch.operations import messages, rooted
from horoclone.torch.operations.messages import *  # noqa: F403
from horoclone.torch.operations.rooted import *  # noqa: F403
from horoclone.torch.optimizer import DistributedOptimizer
from horoclone.torch.sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from horoclone import checkpoint as checkpoint
    from horoclone.torch.load_balance import LoadBalancedBatchSampler
    from horoclone.torch.local_sgd import DiLoCo, LocalSGD
    from horoclone.torch.virtual_ranks import VirtualLoader, VirtualRanks

lifecycle.preferred["HOROCLONE_TIMELINE_OPERATION_NAMES"] = "1"

__all__ = [
    *messages.__all__, *mpi_ops.__all__, *rooted.__all__,
    "Aborted", "Compression", "DistributedOptimizer", "HorovodInternalError", "HostsUpdatedInterrupt", "Mismatch",
    "NotInitialized", "PeerLost", "SyncBatchNorm", "Timeout", "Unsupported", "allgather_object", "broadcast_object",
    "DiLoCo", "LocalSGD", "broadcast_optimizer_state", "broadcast_parameters", "c10d", "check_extension", "checkpoint",
    "elastic", "flat_metrics", "flight_record", "metrics",
    "EvaluationSampler", "LoadBalancedBatchSampler", "metric_mean", "metric_sum", "VirtualLoader", "VirtualRanks",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take it for a sign that every name is there
    _MODULE_OF = {
        "DiLoCo": "local_sgd", "LocalSGD": "local_sgd", "LoadBalancedBatchSampler": "load_balance",
        "VirtualLoader": "virtual_ranks", "VirtualRanks": "virtual_ranks",
    }  # fmt: skip
    _offered = optional.offers(__name__, __all__, checkpoint="checkpoint", ps="ps.torch")

    def __getattr__(name: str) -> Any:
        """What is loaded only where it is used."""
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"horoclone.torch.{_MODULE_OF[name]}"), name)
        return _offered(name)
