"""What a plan says: command.py makes it, table.py prints it."""

from __future__ import annotations

from dataclasses import dataclass, field

from horoclone.plan.costs import Costs
from horoclone.plan.profile import Profile, Rates
from horoclone.plan.strategies import Strategy


@dataclass
class Plan:
    """Everything that is printed. measured: strategy -> seconds of a step, or why it could not run."""

    profile: Profile
    rates: Rates
    costs: Costs
    strategies: list[Strategy]
    chosen: Strategy
    why: str
    memory_limit: float | None
    assumed: list[str]
    measured: dict[str, float | str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
