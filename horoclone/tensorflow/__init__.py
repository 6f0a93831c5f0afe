"""horoclone for TensorFlow: `import horoclone.tensorflow as hvd`. What `horovod.tensorflow` offers, same names."""

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
from horoclone.tensorflow import mpi_ops, op_gradients  # noqa: F401 - registers the gradients
from horoclone.tensorflow.compression import Compression
from horoclone.tensorflow.mpi_ops import *  # noqa: F403 - its __all__ is the list of operations, facts and reductions
from horoclone.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    *mpi_ops.__all__,
    "Aborted", "Compression", "HorovodInternalError", "HostsUpdatedInterrupt", "Mismatch", "NotInitialized", "PeerLost",
    "Timeout", "Unsupported", "allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter",
]  # fmt: skip
