"""The strategies of training that this project offers, each as a program for the replay, with its memory and the line
to write.

A strategy differs from another only in its program: what is computed, sent and waited for. The list is small enough to
try every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from horoclone import replay
from horoclone.plan.costs import Costs
from horoclone.plan.pipelines import pipelines
from horoclone.plan.profile import Profile, Rates, Reduction
from horoclone.replay import Compute, Mark, Program, Send, Step, Timed, Wait

EXACT, ROUNDED, RARE, PARTIAL = "the same", "rounded gradients", "averages rarely", "without late ranks"
SYNC_EVERY = (20, 100, 500)
QUORUMS = (0.75, 0.9)
ROUND_TRIP_S = 100e-6  # of a quorum's two messages (docs/decisions/local-sgd.md)


@dataclass(frozen=True)
class Strategy:
    """kind and options: for horoclone/plan/torch/running.py. learns: what is different from one process. why_not:
    why --validate cannot run it, or empty. memory: bytes of a rank."""

    name: str
    family: str
    line: str
    kind: str
    options: dict[str, Any]
    learns: str
    timed: Timed
    memory: float
    why_not: str = ""


class _Made(NamedTuple):
    """A strategy before its replay. steps: that one Mark stands for."""

    name: str
    family: str
    line: str
    kind: str
    options: dict[str, Any]
    learns: str
    program: Program
    memory: float
    steps: int = 1
    why_not: str = ""


class Subject(NamedTuple):
    """What is planned."""

    profile: Profile
    rates: Rates
    costs: Costs

    @property
    def step(self) -> Step:
        return self.profile.step


def enumerate_strategies(subject: Subject) -> list[Strategy]:
    """Every strategy, in the order in which the simpler one comes first."""
    found = []
    for made in _all(subject):
        timed = replay.replay(made.program, subject.costs.load)
        timed = Timed(timed.step_s / made.steps, timed.waiting_s / made.steps)
        found.append(
            Strategy(
                made.name, made.family, made.line, made.kind, made.options, made.learns,
                timed, made.memory, made.why_not,
            )
        )  # fmt: skip
    return found


def _all(subject: Subject) -> Iterator[_Made]:
    parts: tuple[Callable[[Subject], Iterator[_Made]], ...] = (
        _data_parallel, _without_barrier, _sharded, _compressed, _rarely, _quorums, _fully_sharded, _pipelined,
    )  # fmt: skip
    for part in parts:
        yield from part(subject)


def _whole(profile: Profile) -> float:
    """Parameters, gradients (which lie in buckets), state, activations."""
    return 2 * profile.parameters + profile.state + profile.activations


def _optimizer(extra: str = "") -> str:
    return f"hvd.DistributedOptimizer(optimizer, model.named_parameters(){extra and ', ' + extra})"


# --- every step, all gradients ---


def _data_parallel(subject: Subject) -> Iterator[_Made]:
    profile, step = subject.profile, subject.step
    for groups in (0, 1, 2, 4, 8):
        if groups > len(step.gradients):
            break
        buckets = replay.buckets_of(step, groups=groups)
        program = replay.ordinary(step, subject.costs.of("bucket"), buckets)
        name = f"data parallel, {groups} group{'s' * (groups > 1)}" if groups else "data parallel"
        line = _optimizer(f"groups={groups}" if groups else "")
        options = {"groups": groups} if groups else {}
        yield _Made(
            name, "groups" if groups else "data", line, "optimizer", options, EXACT, program, _whole(profile)
        )


def _without_barrier(subject: Subject) -> Iterator[_Made]:
    profile, step, costs = subject.profile, subject.step, subject.costs
    if not profile.is_per_parameter or costs.size == 1:
        return
    for wire in ("", "fp16", "bf16"):
        share, op = (0.5, "bucket16") if wire else (1.0, "bucket")
        buckets = replay.buckets_of(step, replay.URGENT_BUCKET_BYTES, wire=share)
        program = replay.without_barrier(
            _halved(profile) if wire else step, costs.of(op), buckets,
            per_bucket_s=profile.per_bucket_s, in_parts=not costs.shares_memory,
        )  # fmt: skip
        options: dict[str, Any] = {"cross_barrier": True, **({"compression": wire} if wire else {})}
        extra = "cross_barrier=model" + (f", compression=hvd.Compression.{wire}" if wire else "")
        name, learns = f"cross_barrier{wire and ' + ' + wire}", ROUNDED if wire else EXACT
        yield _Made(
            name, "cross_barrier", _optimizer(extra), "optimizer", options, learns, program, _whole(profile)
        )


def _halved(profile: Profile) -> Step:
    """Gradients are converted into their buckets, and back before the update."""
    step = profile.step
    return Step(
        step.gradients,
        step.forward_s,
        step.backward_s,
        step.update_s + step.size * profile.half_s,
        profile.half_s,
    )


def _sharded(subject: Subject) -> Iterator[_Made]:
    profile, costs, n = subject.profile, subject.costs, subject.costs.size
    if n == 1:
        return
    for wire in ("", "fp16", "bf16"):
        step = _halved(profile) if wire else subject.step
        buckets = replay.buckets_of(step, wire=0.5 if wire else 1.0)
        op = "reducescatter" if not costs.shares_memory else "bucket16" if wire else "bucket"
        program: list[Compute | Send | Wait | Mark] = []
        share = profile.parameters / n
        back_s = step.size * profile.half_s if wire else 0.0
        for turn in range(replay.STEPS):
            body = replay.ordinary_step(step, costs.of(op), buckets, turn, back_s + profile.update_s / n)
            program += body
            for owner in range(n):
                program.append(Send(f"{turn}.share.{owner}", costs.of("broadcast")(share)))
            program += [*(Wait(f"{turn}.share.{owner}") for owner in range(n)), Mark()]
        memory = _whole(profile) - profile.state * (1 - 1 / n)
        options: dict[str, Any] = {"shard_optimizer_state": True, **({"compression": wire} if wire else {})}
        extra = "shard_optimizer_state=True" + (f", compression=hvd.Compression.{wire}" if wire else "")
        name = f"ZeRO-1{wire and ' + ' + wire}"
        learns = ROUNDED if wire else EXACT
        yield _Made(name, "zero", _optimizer(extra), "optimizer", options, learns, program, memory)


def _compressed(subject: Subject) -> Iterator[_Made]:
    profile, costs = subject.profile, subject.costs
    if costs.size == 1:
        return
    for wire in ("fp16", "bf16"):
        step = _halved(profile)
        program = replay.ordinary(step, costs.of("bucket16"), replay.buckets_of(step, wire=0.5))
        line = _optimizer(f"compression=hvd.Compression.{wire}")
        yield _Made(
            wire, "compression", line, "optimizer", {"compression": wire}, ROUNDED, program, _whole(profile)
        )
    for name, reductions in profile.compressions.items():
        program = _reduced_by_compressor(subject, reductions)
        line = _optimizer(f"compression=hvd.Compression.{name}")
        memory = _whole(profile) + profile.parameters * (1 + 1 / costs.size)  # residuals
        yield _Made(name, "compression", line, "optimizer", {"compression": name}, ROUNDED, program, memory)


def _reduced_by_compressor(subject: Subject, reductions: Sequence[Reduction]) -> Program:
    """As reducer.py and gradient_bucket.py do: a bucket's first stage in the hook that fills it, the others in step(),
    stage by stage through all buckets."""
    step, costs = subject.step, subject.costs
    buckets = replay.buckets_of(step)
    program: list[Compute | Send | Wait | Mark] = []

    def stage(turn: int, number: int, at: int) -> Iterator[Compute | Send | Wait]:
        first = sum(len(one.sent) for one in reductions[number][:at])
        for offset, sent in enumerate(reductions[number][at].sent):
            yield Compute(sent.compute_s)
            yield Send(f"{turn}.{number}.{first + offset}", costs.of(sent.op)(sent.size))
        yield Compute(reductions[number][at].compute_s)

    for turn in range(replay.STEPS):
        program.append(Compute(step.forward_s))
        program += replay.backward(step, buckets, lambda i, b, turn=turn: list(stage(turn, i, 0)))  # type: ignore[misc]
        for at in range(1, max(map(len, reductions), default=0)):
            for number, reduction in enumerate(reductions):
                if at < len(reduction):
                    if reduction[at - 1].awaits >= 0:
                        program.append(Wait(f"{turn}.{number}.{reduction[at - 1].awaits}"))
                    program += stage(turn, number, at)
        program += [Compute(step.update_s), Mark()]
    return program


# --- not every step, or not all gradients ---


def _rarely(subject: Subject) -> Iterator[_Made]:
    profile, costs = subject.profile, subject.costs
    if costs.size == 1:
        return
    reduce = costs.of("allreduce")
    for every in SYNC_EVERY:
        delay = every // 2
        program: list[Compute | Send | Wait | Mark] = []
        for turn in range(replay.STEPS):
            program += [
                Compute((every - delay) * profile.compute_s), Send(f"{turn}", reduce(profile.parameters), -1),
                Compute(delay * profile.compute_s), Wait(f"{turn}"), Compute(profile.outer_s), Mark(),
            ]  # fmt: skip
        line = f"with hvd.DiLoCo([model], optimizer, outer, {every}, fragment_sync_delay={delay}):"
        memory = _whole(profile) + 3 * profile.parameters  # global ones, a buffer, the outer momentum
        options = {"sync_every": every, "delay": delay}
        yield _Made(f"DiLoCo, {every}", "diloco", line, "diloco", options, RARE, program, memory, every)
    for every in (8, 32):
        program = []
        for turn in range(replay.STEPS):
            copies = 2 * profile.parameters * profile.copy_s
            program += [
                Compute(every * profile.compute_s + copies),
                Send(f"{turn}", reduce(profile.parameters)),
            ]
            program += [Wait(f"{turn}"), Mark()]
        line = f"with hvd.LocalSGD(model, optimizer, {every}):"
        memory = _whole(profile) + profile.parameters
        options = {"sync_every": every}
        yield _Made(f"LocalSGD, {every}", "local", line, "local", options, RARE, program, memory, every)


def _quorums(subject: Subject) -> Iterator[_Made]:
    """A round begins when enough ranks are ready; then all of them move all bytes, and nothing hides."""
    profile, costs = subject.profile, subject.costs
    if costs.size < 3:
        return
    by_rank = sorted(subject.rates.compute_s)
    for share in QUORUMS:
        needed = max(1, math.ceil(round(share * costs.size, 6)))
        if needed == costs.size:
            continue
        at = min(len(by_rank) - 1, math.ceil(needed / costs.size * len(by_rank)) - 1)
        ahead_s = max(0.0, profile.compute_s - by_rank[at])
        program: list[Compute | Send | Wait | Mark] = []
        for turn in range(replay.STEPS):
            copies = 2 * profile.parameters * profile.copy_s
            program += [
                Compute(max(0.0, profile.compute_s - profile.update_s - ahead_s) + copies + ROUND_TRIP_S),
                Send(f"{turn}", costs.of("allreduce")(profile.parameters)),
                Wait(f"{turn}"), Compute(profile.update_s), Mark(),
            ]  # fmt: skip
        line = _optimizer(f"quorum={share:g}")
        memory = _whole(profile) + 2 * profile.parameters
        yield _Made(
            f"quorum {share:g}", "quorum", line, "optimizer", {"quorum": share}, PARTIAL, program, memory
        )


# --- the model is cut ---


def _fully_sharded(subject: Subject) -> Iterator[_Made]:
    """torch's FSDP2 over the backend `horoclone`. On a CPU its gathers and reductions are waited for at once."""
    profile, costs, n = subject.profile, subject.costs, subject.costs.size
    if n == 1 or not profile.blocks:
        return
    gather, reduce = costs.of("allgather"), costs.of("reducescatter")
    program: list[Compute | Send | Wait | Mark] = []
    rest_s = max(0.0, profile.forward_s - sum(block.forward_s for block in profile.blocks))
    rest_back_s = max(0.0, profile.backward_s - sum(block.backward_s for block in profile.blocks))
    for turn in range(replay.STEPS):
        for i, block in enumerate(profile.blocks):
            program += [
                Send(f"{turn}.f{i}", gather(block.size / n)),
                Wait(f"{turn}.f{i}"),
                Compute(block.forward_s),
            ]
        program.append(Compute(rest_s + rest_back_s))
        for i, block in reversed(list(enumerate(profile.blocks))):
            program += [
                Send(f"{turn}.g{i}", gather(block.size / n)),
                Wait(f"{turn}.g{i}"),
                Compute(block.backward_s),
            ]
            program += [Send(f"{turn}.r{i}", reduce(block.size)), Wait(f"{turn}.r{i}")]
        program += [Compute(profile.update_s / n), Mark()]
    largest = max(block.size for block in profile.blocks)
    memory = (2 * profile.parameters + profile.state) / n + profile.activations + 2 * largest
    line = "for block in model.children(): fully_shard(block)\nfully_shard(model)  # init_process_group('horoclone')"
    yield _Made("FSDP2", "fsdp", line, "fsdp", {}, EXACT, program, memory)


def _pipelined(subject: Subject) -> Iterator[_Made]:
    for one in pipelines(subject.profile, subject.costs):
        line = (
            f"stages cut behind {', '.join(one.cuts)}; Schedule1F1B(stage, n_microbatches={one.microbatches}) of\n"
            "torch.distributed.pipelining, init_process_group('horoclone')"
        )
        name = f"pipeline {one.stages} x data {one.replicas}, {one.microbatches} microbatches"
        yield _Made(
            name, "pipeline", line, "pipeline", {}, EXACT, one.program, one.memory,
            why_not="a pipeline needs the model in stages, which build() does not give",
        )  # fmt: skip


# --- the choice ---


TIE = 0.02  # of the step: below it the simpler one is as good


def order(strategies: Sequence[Strategy], memory_limit: float | None, is_approximate: bool) -> list[Strategy]:
    """Those that may be chosen, the fastest first; of those within TIE of the fastest, the simplest first."""
    fitting = [strategy for strategy in strategies if memory_limit is None or strategy.memory <= memory_limit]
    allowed = [
        strategy
        for strategy in fitting
        if (is_approximate or strategy.learns == EXACT) and not strategy.why_not
    ]
    if not allowed:
        return []
    best_s = min(strategy.timed.step_s for strategy in allowed)
    near = [strategy for strategy in allowed if strategy.timed.step_s <= best_s * (1 + TIE)]
    return near + sorted(
        (strategy for strategy in allowed if strategy not in near), key=lambda strategy: strategy.timed.step_s
    )
