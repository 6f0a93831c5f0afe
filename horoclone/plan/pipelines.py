"""Pipelines of stages times data parallelism: where a chain of blocks is cut, and what 1F1B makes of it.

Blocks are cut in their order into stages whose longest is as short as it can be, by dynamic programming (Narayanan et
al., "PipeDream", SOSP 2019). Every replica of the pipeline computes the batch of as many ranks as it has stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from horoclone import replay
from horoclone.plan.costs import Costs
from horoclone.plan.profile import Block, Profile
from horoclone.replay import Compute, Mark, Program, Send, Wait

MICROBATCHES = (4, 8, 16)


class Pipeline(NamedTuple):
    """cuts: the names of the blocks behind which a stage ends."""

    stages: int
    replicas: int
    microbatches: int
    cuts: tuple[str, ...]
    program: Program
    memory: float


def cut_evenly(times: Sequence[float], stages: int) -> list[int]:
    """Where each stage ends, so that the longest one is as short as it can be. times: of as many blocks, or more."""
    ends_before = [0.0]
    for time in times:
        ends_before.append(ends_before[-1] + time)
    count = len(times)
    best = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    begin = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            for start in range(stage - 1, end):
                longest = max(best[stage - 1][start], ends_before[end] - ends_before[start])
                if longest < best[stage][end]:
                    best[stage][end], begin[stage][end] = longest, start
    ends, end = [count], count
    for stage in range(stages, 1, -1):
        end = begin[stage][end]
        ends.append(end)
    return ends[::-1]


def pipelines(profile: Profile, costs: Costs) -> Iterator[Pipeline]:
    """Every number of stages that divides the ranks, with every number of microbatches. None without a chain."""
    n, blocks = costs.size, profile.blocks
    if not profile.is_chain:
        return
    for stages in range(2, min(n, len(blocks)) + 1):
        if n % stages:
            continue
        ends = cut_evenly([block.forward_s + block.backward_s for block in blocks], stages)
        runs = [blocks[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        for microbatches in MICROBATCHES:
            yield _pipeline(profile, costs, runs, microbatches)


def _pipeline(profile: Profile, costs: Costs, runs: Sequence[Sequence[Block]], microbatches: int) -> Pipeline:
    stages, replicas = len(runs), costs.size // len(runs)
    forward_s = max(sum(block.forward_s for block in run) for run in runs) * stages / microbatches
    backward_s = max(sum(block.backward_s for block in run) for run in runs) * stages / microbatches
    largest = max(sum(block.size for block in run) for run in runs)
    handed = max(run[-1].output for run in runs[:-1]) * stages / microbatches
    # There and back per microbatch; only those of the fill and the drain are not hidden behind another microbatch.
    exposed_s = 2 * (stages - 1) * costs.seconds("broadcast", handed)
    bubble_s = (stages - 1) * (forward_s + backward_s) + exposed_s
    update_s = profile.update_s * largest / max(1.0, profile.parameters)
    program: list[Compute | Send | Wait | Mark] = []
    for turn in range(replay.STEPS):
        program += [Send(f"{turn}.bubble", [("pipeline", bubble_s)]), Wait(f"{turn}.bubble")]
        program.append(Compute(microbatches * (forward_s + backward_s)))
        if replicas > 1:
            share = 2 * (replicas - 1) / replicas / (2 * (costs.size - 1) / costs.size)
            program += [Send(f"{turn}", costs.of("allreduce")(largest * share)), Wait(f"{turn}")]
        program += [Compute(update_s), Mark()]
    part = largest / max(1.0, profile.parameters)
    # of the replica's batch, whose activations 1F1B keeps
    in_flight = min(stages, microbatches) / microbatches
    memory = 2 * largest + profile.state * part + profile.activations * part * stages * in_flight
    cuts = tuple(run[-1].name for run in runs[:-1])
    return Pipeline(stages, replicas, microbatches, cuts, program, memory)
