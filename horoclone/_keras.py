"""Under the name of a private module of Horovod's that libraries import: horovod._keras."""

from __future__ import annotations

from typing import Any

from horoclone.keras.callbacks import BroadcastGlobalVariablesCallback  # noqa: F401
from horoclone.keras.distribute import Compression, PartialDistributedOptimizer, make_distributed  # noqa: F401
from horoclone.keras.saving import load_model  # noqa: F401
from horoclone.keras.values import (  # noqa: F401
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from horoclone.ops import Average, ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """horoclone.keras.DistributedOptimizer; the module `keras` is the one that the process has."""
    arguments = {key: value for key, value in locals().items() if key != "keras"}
    return make_distributed(**arguments)
