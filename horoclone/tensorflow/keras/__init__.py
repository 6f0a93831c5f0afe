"""horoclone for tf.keras: `import horoclone.tensorflow.keras as hvd`. horoclone.keras under Horovod's older name.

One thing differs, as in Horovod: the order of DistributedOptimizer's arguments.
"""

from __future__ import annotations

from typing import Any, TypeVar

from horoclone import keras as _keras
from horoclone.common.util import is_version_greater_equal_than
from horoclone.keras import *  # noqa: F403 - its __all__ is the list
from horoclone.keras import Average, Compression, callbacks, elastic
from horoclone.keras.distribute import make_distributed
from horoclone.ops import ReduceOp
from horoclone.process_sets import ProcessSet, global_process_set
from horoclone.runtime.exported import *  # noqa: F403 - topology, init() and shutdown(); mypy passes no star on

__all__ = [*_keras.__all__, "DistributedOptimizer", "callbacks", "elastic", "is_version_greater_equal_than"]


OptimizerT = TypeVar("OptimizerT")


def DistributedOptimizer(  # type: ignore[no-redef]
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> OptimizerT:
    """Makes what horoclone.keras.DistributedOptimizer makes, with the arguments in the order of
    horovod.tensorflow.keras."""
    return make_distributed(**locals())
