"""What `horoclone plan` prints: the choice, the strategies in the order of their time, what the numbers rest on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from horoclone.plan.costs import Costs
from horoclone.plan.outcome import Plan
from horoclone.plan.profile import Profile, Rates
from horoclone.plan.strategies import EXACT, TIE, Strategy

WIDTH_OF_A_PIPE = 80
GIB = 1 << 30


def print_plan(plan: Plan, every_strategy: bool) -> None:
    """On stdout."""
    console = Console(highlight=False, soft_wrap=False, width=None if os.isatty(1) else WIDTH_OF_A_PIPE)
    console.print(f"chosen: {plan.chosen.name}, because {plan.why}", markup=False)
    for line in plan.chosen.line.splitlines():
        console.print(f"    {line}", markup=False, soft_wrap=True)  # to be copied
    for remark in plan.remarks:
        console.print(remark, markup=False)
    console.print()
    shown = _by_time(plan.strategies) if every_strategy else _best_of_each(plan.strategies)
    console.print(_table(plan, shown, every_strategy))
    console.print()
    for line in measured_text(plan.profile, plan.rates, plan.costs):
        console.print(line, markup=False)
    for one in plan.assumed:
        console.print(f"assumed: {one}", markup=False)


def _by_time(strategies: Sequence[Strategy]) -> list[Strategy]:
    return sorted(strategies, key=lambda strategy: strategy.timed.step_s)


def _best_of_each(strategies: Sequence[Strategy]) -> list[Strategy]:
    """The fastest of each family, but of compression every one."""
    best: dict[str, Strategy] = {}
    for strategy in _by_time(strategies):
        best.setdefault(strategy.name if strategy.family == "compression" else strategy.family, strategy)
    return list(best.values())


def _table(plan: Plan, strategies: Sequence[Strategy], with_lines: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=None)
    table.add_column("strategy")
    for name in ("step, ms", "waiting, ms", *(["measured, ms"] if plan.measured else []), "memory/rank"):
        table.add_column(name, justify="right")
    table.add_column("learns")
    if with_lines:
        table.add_column("what to write", overflow="fold")
    known = [
        one for one in plan.strategies if one in strategies or one.name in plan.measured or one is plan.chosen
    ]
    for strategy in _by_time(known):
        chosen_s, step_s = plan.chosen.timed.step_s, strategy.timed.step_s
        tied = strategy is not plan.chosen and abs(step_s - chosen_s) <= TIE * chosen_s
        cells = [strategy.name, f"{'~' * tied}{1e3 * step_s:.1f}", f"{1e3 * strategy.timed.waiting_s:.1f}"]
        if plan.measured:
            took = plan.measured.get(strategy.name)
            cells.append(
                "" if took is None else f"{1e3 * took:.1f}" if isinstance(took, float) else "could not run"
            )
        fits = plan.memory_limit is None or strategy.memory <= plan.memory_limit
        cells += [memory_text(strategy.memory) + ("" if fits else " !"), strategy.learns]
        if with_lines:
            cells.append(strategy.line)
        table.add_row(
            *[cell.replace("[", r"\[") for cell in cells], style="bold" if strategy is plan.chosen else None
        )
    return table


def memory_text(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / (1 << 20):.0f} MiB"


def measured_text(profile: Profile, rates: Rates, costs: Costs) -> list[str]:
    """What the numbers rest on."""
    spread = f" ({1e3 * min(rates.compute_s):.1f} to {1e3 * max(rates.compute_s):.1f} on the ranks)"
    lines = [
        f"measured on {rates.size} rank(s): compute {1e3 * profile.compute_s:.1f} ms"
        + (spread if rates.size > 1 else "")
        + f" = forward {1e3 * profile.forward_s:.1f} + backward {1e3 * profile.backward_s:.1f}"
        f" + update {1e3 * profile.update_s:.1f} ({profile.optimizer}); "
        f"{len(profile.gradients)} parameters, {profile.parameters / 1e6:.1f} MB; memory by {profile.memory_by}"
    ]
    if "bucket" in rates.operations:
        line = rates.operations["bucket"]
        where = "through shared memory" if rates.local == rates.size else "over the link"
        lines.append(
            f"an allreduce of a bucket {where}: {1e6 * line.fixed_s:.0f} us + {1e-9 / line.per_byte_s:.2f} GB/s, "
            f"during which computing takes {1 + rates.load:.2f} times as long"
        )
    if costs.nodes > 1 and not costs.is_measured:
        lines.append(f"planned for {costs.size} ranks on {costs.nodes} hosts")
    return lines


def reason(chosen: Strategy, plain: Strategy | None, candidates: Sequence[Strategy], limited: bool) -> str:
    """Why this one of the candidates: against the plain strategy, which is the measure of all."""
    among = "of the strategies that fit into the memory" if limited else "of the strategies"
    same = " that learn what one process would" if chosen.learns == EXACT else ""
    if plain is None or chosen is plain:
        return f"none {among}{same} is faster by more than 2 %"
    ratio = plain.timed.step_s / chosen.timed.step_s
    took, least = (f"{1e3 * one.timed.step_s:.1f} ms" for one in (chosen, _by_time(candidates)[0]))
    place = f"the shortest step {among}{same}"
    if took != least:
        place = f"within 2 % of {place} ({least}), and the simplest of these"
    return (
        f"{took} is {place}: {ratio:.2f} times as fast as "
        f"{plain.name} ({1e3 * plain.timed.step_s:.1f} ms, of which {1e3 * plain.timed.waiting_s:.1f} in waiting)"
    )
