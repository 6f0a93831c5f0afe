"""`horoclone plan FILE.py:build -np N`: measures a model and the ranks, and says which strategy is the fastest.

Nothing is looked up: computing, copies, compressors and operations are measured on real ranks, a step is replayed for
each strategy (horoclone/replay.py), and what could not be measured is named as assumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from horoclone.plan.costs import Costs, Link
from horoclone.plan.outcome import Plan
from horoclone.plan.profile import PlanError, Profile, Rates
from horoclone.plan.strategies import TIE, Strategy, Subject, enumerate_strategies, order


class Ranks(Protocol):
    """Who runs what on the ranks; the launcher's, or the job that this process is part of."""

    speaks: bool  # this process prints

    def size_of(self, wished: int | None, per_node: int | None) -> tuple[int, int]:
        """(ranks to plan for, of a host). PlanError where that contradicts the ranks that there are."""

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer of rank 0 to measure or validate of horoclone/plan/torch. PlanError with a rank's text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="FILE.py:FUNCTION", help="FUNCTION() returns (model, loss_of_batch)")
    parser.add_argument("-np", "--num-proc", type=int, metavar="N", help="ranks to plan for")
    parser.add_argument(
        "-H", "--hosts", metavar="HOST:SLOTS,...", help="measure on these, as horoclonerun does"
    )
    parser.add_argument("--hostfile", metavar="FILE", help="the same, from a file")
    parser.add_argument("--ranks-per-node", type=int, metavar="L", help="of N (all on one host)")
    parser.add_argument("--memory-gib", type=float, metavar="G", help="that a rank may use (no limit)")
    parser.add_argument(
        "--link", metavar="RATE[,LATENCY]", help="between hosts that are not here: 10gbit,30us"
    )
    parser.add_argument(
        "--approximate",
        action="store_true",
        help="also choose what changes the result: compression, DiLoCo, quorum",
    )
    parser.add_argument(
        "--only", metavar="STRATEGY;...", help="of these strategies, by the names that the table has"
    )
    parser.add_argument(
        "--validate", type=int, default=0, metavar="K", help="run the K best and choose the fastest"
    )
    parser.add_argument("--steps", type=int, default=20, metavar="S", help="of a strategy that is run (20)")
    parser.add_argument("--all", action="store_true", help="print every strategy, not the best of each kind")
    parser.add_argument("--json", metavar="FILE", help="write everything there, - for stdout")


def main(arguments: argparse.Namespace, ranks: Ranks) -> int:
    """Runs the command and returns the exit code. PlanError for what cannot be planned."""
    file, function = _subject_of(arguments.what)
    link = Link.read(arguments.link) if arguments.link else None
    for name, value, least in (
        ("-np", arguments.num_proc, 1), ("--ranks-per-node", arguments.ranks_per_node, 1),
        ("--memory-gib", arguments.memory_gib, 1e-6), ("--validate", arguments.validate, 0),
        ("--steps", arguments.steps, 1),
    ):  # fmt: skip
        if value is not None and value < least:
            raise PlanError(f"{name} {value}: must be at least {least:g}")
    size, per_node = ranks.size_of(arguments.num_proc, arguments.ranks_per_node)
    profile, rates = ranks.call("measure", file, function, size)
    plan = make_plan(profile, rates, Costs(rates, size, per_node, link), arguments)
    if arguments.validate:
        validate(plan, arguments, ranks, (file, function))
    if ranks.speaks:
        _show(plan, arguments)
    return 0


def _subject_of(text: str) -> tuple[str, str]:
    file, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier():
        raise PlanError(f"{text}: expected FILE.py:FUNCTION, such as train_model.py:build")
    if not Path(file).is_file():
        raise PlanError(f"there is no file {file} here; give the path of the file that defines {function}()")
    source = Path(file).read_text(errors="replace")
    if not re.search(rf"\b{function}\b|import \*|globals\(|exec\(", source):  # running it may take hours
        have = ", ".join(re.findall(r"^def (\w+)", source, re.MULTILINE)) or "none"
        raise PlanError(f"{file} has no function {function!r}; it has {have}. Write {file}:NAME")
    return str(Path(file).resolve()), function


def make_plan(profile: Profile, rates: Rates, costs: Costs, arguments: argparse.Namespace) -> Plan:
    """The replay of every strategy, and the choice. PlanError where no strategy fits."""
    from horoclone.plan import table

    strategies = enumerate_strategies(Subject(profile, rates, costs))
    if arguments.only:
        strategies = _named(strategies, [name.strip() for name in arguments.only.split(";")])
    limit = None if arguments.memory_gib is None else arguments.memory_gib * table.GIB
    candidates = order(strategies, limit, arguments.approximate)
    if not candidates:
        raise PlanError(_why_none(strategies, limit))
    chosen, plain = (
        candidates[0],
        next((strategy for strategy in candidates if strategy.family == "data"), None),
    )
    plan = Plan(
        profile, rates, costs, strategies, chosen, table.reason(chosen, plain, candidates, limit is not None), limit,
        [*profile.assumed, *costs.assumed],
    )  # fmt: skip
    faster = order(strategies, limit, True)[0]
    if not arguments.approximate and faster.timed.step_s < chosen.timed.step_s * (1 - TIE):
        plan.remarks.append(
            f"faster, but it changes what is learnt ({faster.learns}): {faster.name}, "
            f"{1e3 * faster.timed.step_s:.1f} ms (--approximate chooses among these, too)"
        )
    unready = [one for one in strategies if one.why_not and (limit is None or one.memory <= limit)]
    first = min(unready, key=lambda one: one.timed.step_s, default=chosen)
    if first.timed.step_s < chosen.timed.step_s * (1 - TIE):
        plan.remarks.append(f"faster, but {first.why_not}: {first.name}, {1e3 * first.timed.step_s:.1f} ms")
    return plan


def _named(strategies: list[Strategy], names: Sequence[str]) -> list[Strategy]:
    known = {strategy.name: strategy for strategy in strategies}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PlanError(f"--only: no strategy is called {unknown[0]!r}. There are: {'; '.join(known)}")
    return [known[name] for name in names]


def _why_none(strategies: list[Strategy], limit: float | None) -> str:
    from horoclone.plan.table import memory_text

    if limit is not None and all(strategy.memory > limit for strategy in strategies):
        least = min(strategies, key=lambda strategy: strategy.memory)
        return (
            f"no strategy fits into {memory_text(limit)} of a rank: the least is {memory_text(least.memory)}, "
            f"{least.name}. Raise --memory-gib, make the batch of build() smaller, or plan for more ranks"
        )
    return (
        "of the strategies that fit, each one changes what is learnt or cannot be run as it stands: pass "
        "--approximate, raise --memory-gib, or give --only others"
    )


def validate(plan: Plan, arguments: argparse.Namespace, ranks: Ranks, subject: tuple[str, str]) -> None:
    """Runs the best strategies, and makes the measured best the choice."""
    if plan.rates.size != plan.costs.size or not plan.costs.is_measured:
        raise PlanError(
            f"--validate runs on the ranks that are planned for, but {plan.rates.size} of {plan.costs.size} are here: "
            "give -H with their hosts, or start `horoclone plan` on them with your launcher"
        )
    best = order(plan.strategies, plan.memory_limit, arguments.approximate)[: arguments.validate]
    alone: tuple[str, dict[str, Any]] = ("alone", {})
    asked = [alone, *((strategy.kind, strategy.options) for strategy in best), alone]
    before, *found, after = ranks.call("validate", *subject, asked, arguments.steps)
    plan.measured = {strategy.name: took for strategy, took in zip(best, found, strict=True)}
    times = {
        strategy.name: took for strategy, took in zip(best, found, strict=True) if isinstance(took, float)
    }
    for strategy in best:
        took = plan.measured[strategy.name]
        if isinstance(took, float):
            apart = 100 * (strategy.timed.step_s / took - 1)
            predicted = f"predicted {1e3 * strategy.timed.step_s:.1f} ms ({apart:+.0f} %)"
            plan.remarks.append(f"{strategy.name}: measured {1e3 * took:.1f} ms, {predicted}")
        else:
            plan.remarks.append(f"{strategy.name} could not run: {took}")
    plan.remarks += _changed(plan.profile.compute_s, before, after)
    if not times:
        raise PlanError("none of the strategies could run:\n" + "\n".join(plan.remarks))
    name = min(times, key=times.__getitem__)
    plan.chosen = next(strategy for strategy in best if strategy.name == name)
    plan.why = f"its step of {1e3 * times[name]:.1f} ms is the shortest of the {len(times)} that were run"


CHANGED = 0.1  # of the computing: from there on the comparison is in doubt


def _changed(then_s: float, *now_s: float | str) -> list[str]:
    """A warning where computing alone did not take what it took when it was measured."""
    taken = [took for took in now_s if isinstance(took, float)]
    if all(abs(took / then_s - 1) <= CHANGED for took in taken):
        return []
    seen = " and ".join(f"{1e3 * took:.1f}" for took in taken)
    return [
        f"computing alone took {1e3 * then_s:.1f} ms when it was measured, and {seen} ms before and after these runs: "
        "something else uses this machine, so compare with care"
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, with times in seconds and sizes in bytes."""
    return {
        "chosen": plan.chosen.name,
        "why": plan.why,
        "write": plan.chosen.line,
        "assumed": plan.assumed,
        "remarks": plan.remarks,
        "ranks": plan.costs.size,
        "hosts": plan.costs.nodes,
        "strategies": [
            {
                "name": strategy.name,
                "step_s": strategy.timed.step_s,
                "waiting_s": strategy.timed.waiting_s,
                "memory_bytes": strategy.memory,
                "learns": strategy.learns,
                "write": strategy.line,
                "measured_s": plan.measured.get(strategy.name),
            }
            for strategy in sorted(plan.strategies, key=lambda strategy: strategy.timed.step_s)
        ],
        "layers": plan.profile.layers(),
        "profile": {
            key: value for key, value in dataclasses.asdict(plan.profile).items() if key != "compressions"
        },
        "rates": dataclasses.asdict(plan.rates),
    }


def _show(plan: Plan, arguments: argparse.Namespace) -> None:
    from horoclone.plan import table

    if arguments.json == "-":
        print(json.dumps(as_json(plan), indent=1))
        return
    table.print_plan(plan, arguments.all)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(as_json(plan), indent=1) + "\n")
