"""A parameter server: tables of rows on servers that keep a second copy, for workers that pull rows and push gradients.

`python -m horoclone.ps` is a server; `horoclone.ps.torch` has modules for PyTorch; docs/parameter_server.md explains
both. This package works on NumPy arrays.
"""

from __future__ import annotations

from horoclone.ps.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, Sum
from horoclone.ps.table import Table
from horoclone.ps.worker import Servers

__all__ = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad", "Servers", "Sum", "Table"]
