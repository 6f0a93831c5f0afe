"""The two things that every rank is asked to do, by name, with a plain answer: a value, or the text of a mistake.

What one rank cannot do is told to all of them before they begin to wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

import horoclone.torch as hvd
from horoclone import replay
from horoclone.plan.profile import PlanError, Profile, Rates
from horoclone.plan.torch import compressors, measuring, rates, running, subject

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """Of one rank: error is empty, or what was wrong with what was asked."""

    error: str
    value: Any = None


def _together(attempt: Callable[[], T]) -> T:
    """What it returns. PlanError on every rank where it raised one on any."""
    error, made = "", None
    try:
        made = attempt()
    except PlanError as mistake:
        error = str(mistake)
    except Exception as failure:  # the user's code
        error = f"build() or loss_of_batch() failed: {type(failure).__name__}: {failure}"
    found = [(rank, text) for rank, text in enumerate(hvd.allgather_object(error)) if text]
    if found:
        rank, text = found[0]
        raise PlanError(text if len(found) == hvd.size() else f"on rank {rank}: {text}")
    return made  # type: ignore[return-value]


def measure(file: str, function: str, size: int) -> Answer:
    """The profile of the slowest rank, and the rates. size: the ranks that are planned for."""
    hvd.init()
    try:
        chosen = _together(lambda: _tried(subject.load(file, function)))
        own = measuring.profile(chosen, hvd.barrier)
        between = rates.rates(chosen, own.compute_s)
        slowest = between.compute_s.index(max(between.compute_s))
        profile: Profile = hvd.broadcast_object(own, slowest)
        cuts = [bucket.members for bucket in replay.buckets_of(profile.step)]
        if size > 1:
            noted = compressors.reductions(cuts, chosen.parameters, profile.names, size)
            profile = replace(profile, compressions=hvd.broadcast_object(noted, 0))
        return Answer("", (profile, between))
    except PlanError as mistake:
        return Answer(str(mistake))
    finally:
        hvd.shutdown()


def _tried(made: subject.Subject) -> subject.Subject:
    """With one step made, so that what cannot train is refused before anybody waits for it."""
    made.loss().backward()  # type: ignore[no-untyped-call]
    made.make_optimizer()
    for parameter in made.parameters:
        parameter.grad = None
    return made


def validate(file: str, function: str, strategies: list[tuple[str, dict[str, Any]]], steps: int) -> Answer:
    """Seconds of a step of each strategy, of the slowest rank; a text in its place where the strategy cannot run."""
    found: list[float | str] = []
    for kind, options in strategies:
        hvd.init()
        is_grouped = kind == "fsdp"
        if is_grouped:
            torch.distributed.init_process_group("horoclone")
        try:
            chosen = _together(lambda: subject.load(file, function))
            took = running.run(chosen, kind, options, steps)
            found.append(max(hvd.allgather_object(took)))
        except (PlanError, ValueError, NotImplementedError) as mistake:
            found.append(str(mistake))
        finally:
            if is_grouped:
                torch.distributed.destroy_process_group()
            hvd.shutdown()
    return Answer("", found)


__all__ = ["Answer", "Rates", "measure", "validate"]
