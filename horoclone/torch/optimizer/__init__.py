"""The optimizer of horoclone.torch and its parts: buckets, their reduction, sharded state, barriers."""

from horoclone.torch.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
