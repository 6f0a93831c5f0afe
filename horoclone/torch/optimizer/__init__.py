"""The optimizer of horoclone.torch and its parts: buckets, their reduction, sharded state, barriers."""

from horoclone.torch.optimizer.adasum import AdasumMixin as _DistributedAdasumOptimizer  # noqa: F401
from horoclone.torch.optimizer.distributed import DistributedMixin as _DistributedOptimizer  # noqa: F401
from horoclone.torch.optimizer.distributed import DistributedOptimizer

# The private names are Horovod's; other libraries annotate with them, derive from them and ask for them.
__all__ = ["DistributedOptimizer"]
