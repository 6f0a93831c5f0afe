"""What type checkers see of a wrapped optimizer: its own methods, and whatever else the user's class has.

The class is made when the optimizer is wrapped, so no checker can name it. `Any` among the bases says that it has the
other attributes, too, and fits where the user's class is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    class Distributed(Any, torch.optim.Optimizer):  # type: ignore[misc]
        """An optimizer of the user's class whose gradients are reduced."""

        def synchronize(self) -> None:
            """Waits until the gradients of this step are reduced; afterwards they may be clipped or read."""

        def skip_synchronize(self) -> AbstractContextManager[None]:
            """Within it, step() does not reduce: for steps after an explicit synchronize()."""

        def set_backward_passes_per_step(self, passes: int) -> None:
            """Changes how many backward passes are accumulated locally before gradients are reduced."""

        def set_weight(self, weight: Any) -> None:
            """How much this rank counts in the mean of the next step's gradients; call it before backward()."""

        def register_local(self, parameters: Any) -> None:
            """Leaves the gradients of a parameter, a module's parameters, or several of either to this rank."""

else:
    from horoclone.torch.optimizer.wrapping import WrappedOptimizer as Distributed

__all__ = ["Distributed"]
