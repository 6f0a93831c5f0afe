"""Pure statistics of the benchmarks: lists of times in, figures out. No clock, no process, no state.

Times are in microseconds. A "round" is the list of the calls that one contestant made at one size before the others had
their turn; a call's time is the largest over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rounds = Sequence[Sequence[float]]

RESAMPLES = 4000
MAX_LOAD = 0.3  # cores that others may use
MAX_MOVE = 0.10  # how far memcpy may move between the start and the end
MIN_ROUNDS = 7  # below it the bootstrap interval is far too narrow


@dataclass(frozen=True)
class Summary:
    """One contestant at one size. `rounds_us` holds the median of each round, in the order they were run."""

    median_us: float  # median of the rounds' medians
    low_us: float  # the smallest and the largest round's median
    high_us: float
    p99_us: float  # over all calls of all rounds; the maximum where there are fewer than 100
    max_us: float
    calls: int
    rounds_us: list[float]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast we are as a peer (above 1: faster), with a bootstrap 95 % interval."""

    ratio: float
    low: float
    high: float
    verdict: str  # "faster", "slower", or "undecided" when the interval holds 1


def slowest_rank(times: Sequence[Sequence[float]]) -> list[float]:
    """Per call the largest time over the ranks. `times`: one equally long list per rank, else ValueError."""
    if not times or len({len(one) for one in times}) != 1:
        raise ValueError(f"every rank must have timed the same calls, not {[len(one) for one in times]}")
    return [max(calls) for calls in zip(*times, strict=True)]


def summarise(rounds: Rounds) -> Summary:
    """Figures of one contestant at one size. ValueError when there is no round, or one without calls."""
    if not rounds or not all(rounds):
        raise ValueError("no calls were timed")
    medians = [float(np.median(calls)) for calls in rounds]
    every = np.concatenate([np.asarray(calls, dtype=float) for calls in rounds])
    p99 = float(np.percentile(every, 99, method="higher"))
    return Summary(
        float(np.median(medians)), min(medians), max(medians), p99, float(every.max()), every.size, medians
    )


def ratio_of(own_us: Sequence[float], peer_us: Sequence[float], seed: int = 0) -> Ratio:
    """Peer's time over ours, from the rounds' medians; round k of both must have been run side by side.

    The bootstrap draws whole rounds, the same for both, so that what slowed a round down for everybody cancels.
    """
    own, peer = np.asarray(own_us, dtype=float), np.asarray(peer_us, dtype=float)
    if own.shape != peer.shape or own.size == 0:
        raise ValueError(f"the same rounds are needed of both, not {own.size} and {peer.size}")
    drawn = np.random.default_rng(seed).integers(0, own.size, size=(RESAMPLES, own.size))
    ratios = np.median(peer[drawn], axis=1) / np.median(own[drawn], axis=1)
    low, high = (float(edge) for edge in np.percentile(ratios, [2.5, 97.5]))
    return Ratio(float(np.median(peer) / np.median(own)), low, high, verdict_of(low, high))


def verdict_of(low: float, high: float) -> str:
    """Only an interval that lies wholly on one side of 1 says something."""
    if low > 1.0:
        return "faster"
    return "slower" if high < 1.0 else "undecided"


def moved(first_us: float, last_us: float) -> float:
    """How far a calibration went from its first value to its last, as a fraction of the smaller one."""
    return abs(last_us - first_us) / min(first_us, last_us)


def reasons_against(memcpy_us: tuple[float, float], rounds: int) -> list[str]:
    """Why the figures themselves allow no conclusion; an empty list when they do."""
    reasons = []
    if rounds < MIN_ROUNDS:
        reasons.append(f"{rounds} rounds are too few for an interval, which needs {MIN_ROUNDS}")
    if moved(*memcpy_us) > MAX_MOVE:
        first, last = memcpy_us
        reasons.append(f"memcpy took {first:.0f} us at the start and {last:.0f} us at the end")
    return reasons


def loads_against(before: float, during: float | None) -> list[str]:
    """Why what others did meanwhile allows none. Loads are in cores; None: the system does not say."""
    reasons = []
    for cores, when in ((before, "before the start"), (during or 0.0, "during the run")):
        if cores > MAX_LOAD:
            reasons.append(f"other processes used {cores:.2f} cores {when}")
    return reasons
