"""The optimizers that servers run on the rows that are pushed (csrc/arithmetic/row_optimizers.h). Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horoclone.ps.numbers import real_number

SUM, PLAIN_SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = range(5)  # hc_rule


@dataclass(frozen=True)
class Sum:
    """Adds what is pushed, as PS-Lite does by default."""

    def native(self) -> dict[str, Any]:
        """Returns the part of a table's description that says it (hc_table_spec)."""
        return _native(SUM, 1.0)


@dataclass(frozen=True)
class SGD:
    """Updates rows as torch.optim.SGD does. momentum: costs as much memory as the weights."""

    lr: float
    momentum: float = 0.0

    def native(self) -> dict[str, Any]:
        """Returns the part of a table's description that says it (hc_table_spec)."""
        return _native(PLAIN_SGD, self.lr, beta1=self.momentum)


@dataclass(frozen=True)
class Adagrad:
    """Updates rows as torch.optim.Adagrad does. Its state costs as much memory as the weights."""

    lr: float
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def native(self) -> dict[str, Any]:
        """Returns the part of a table's description that says it (hc_table_spec)."""
        return _native(ADAGRAD, self.lr, epsilon=self.eps, initial_accumulator=self.initial_accumulator_value)


@dataclass(frozen=True)
class RowWiseAdagrad:
    """Updates rows by Adagrad with one accumulator for each row, the mean of its squared gradients, as in TorchRec and
    DLRM."""

    lr: float
    eps: float = 1e-8
    initial_accumulator_value: float = 0.0

    def native(self) -> dict[str, Any]:
        """Returns the part of a table's description that says it (hc_table_spec)."""
        return _native(
            ROW_WISE_ADAGRAD, self.lr, epsilon=self.eps, initial_accumulator=self.initial_accumulator_value
        )


@dataclass(frozen=True)
class Adam:
    """Updates rows as torch.optim.SparseAdam does for embeddings and torch.optim.Adam for dense keys. State: twice the
    weights."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def native(self) -> dict[str, Any]:
        """Returns the part of a table's description that says it (hc_table_spec)."""
        return _native(ADAM, self.lr, epsilon=self.eps, beta1=self.betas[0], beta2=self.betas[1])


Optimizer = Sum | SGD | Adagrad | RowWiseAdagrad | Adam


def _native(rule: int, lr: float, **more: float) -> dict[str, Any]:
    given = {"lr": lr, "epsilon": 0.0, "beta1": 0.0, "beta2": 0.0, "initial_accumulator": 0.0, **more}
    below = {"beta1": 1.0, "beta2": 1.0} if rule == ADAM else {}
    numbers = {
        name: real_number("optimizer", name, value, below.get(name, float("inf")))
        for name, value in given.items()
    }
    return {"rule": rule, "learning_rate": numbers.pop("lr"), **numbers}
