"""The optimizer of horoclone.torch, and all that it is made of: buckets, their reduction, sharded state, barriers."""

from horoclone.torch.optimizer.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
