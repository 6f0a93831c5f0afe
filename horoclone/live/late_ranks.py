"""Why a rank is late: whose time between collectives exceeds the others', and in what. Pure.

In a stall, who holds the others up, as far as anybody knows.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from horoclone.live.phases import LOSSES, PHASES, WAITING, Phases
from horoclone.live.rank_metrics import RankMetrics

LATE_SHARE = (
    0.15  # of the time, by which a rank's own time exceeds that of the others' median: then it is late
)
LEAST_S = 5.0  # of measuring, before anything is said
STALL_S = 5.0  # without the end of an operation: rates are of the past, and who waits is told from who is waited for
STALE_S = 5.0  # a rank writes its phases each second; older ones say nothing of the present

# cause -> (what it is called, one line of advice)
_COMPARE = "compare the size of its batches with the others' and the speed of its processor"
CAUSES: Mapping[str, tuple[str, str]] = {
    "data": (
        "data loading",
        "give the loader more workers or let it fetch ahead; compare this rank's disk and share of the data",
    ),
    "forward": ("forward", f"{_COMPARE}; look at the line"),
    "backward": ("backward", f"{_COMPARE}; look at hooks of gradients"),
    "optimizer": (
        "the optimizer",
        "look at hooks of step() and at what only this rank does with its parameters",
    ),
    "compute": ("compute", _COMPARE),
    "checkpoint": (
        "saving a checkpoint",
        "let all ranks save while training goes on (hvd.checkpoint), or save less often",
    ),
    "own code": (
        "the program's own code",
        "look at the line: it runs between the phases of a step, such as logging or preparing a batch",
    ),
    "gc": (
        "garbage collection",
        "call gc.freeze() after the first steps, or gc.disable() and collect on all ranks at the same step",
    ),
    "faults": (
        "page faults and swapping",
        "its memory is short or its files are cold: smaller caches, fewer loader processes, no swap",
    ),
    "throttled": (
        "a throttled cgroup",
        "its CPU quota is used up: raise cpu.max (limits.cpu of a pod), or use fewer threads",
    ),
    "delayed": ("other processes on its cores", "move them away, or bind each rank to cores of its own"),
    "stopped": (
        "the process stood still",
        "a signal, a debugger or the host stopped it, or one call kept the GIL without computing",
    ),
    "link": (
        "its link",
        "look at the cable and port for speed and losses; compression or fewer ranks per link send less",
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """Why `rank` is late. cause: a key of CAUSES; share: of the time, 0 to 1, by which it exceeds the others' median.
    step_seconds: the same for each step, 0 where there are none. line: of the program, or ""; detail: more figures."""

    rank: int
    cause: str
    share: float
    step_seconds: float
    line: str
    detail: str

    @property
    def advice(self) -> str:
        return CAUSES[self.cause][1]

    def __str__(self) -> str:
        each = (
            f"{self.step_seconds * 1e3:.3g} ms a step"
            if self.step_seconds
            else f"{self.share:.0%} of the time"
        )
        extra = "".join(f", {one}" for one in (self.detail, self.line and f"mostly at {self.line}") if one)
        return f"{CAUSES[self.cause][0]}, {each} more than others ({self.share:.0%}){extra}"


def reasons(ranks: Mapping[int, Phases], recent: bool = True) -> list[Reason]:
    """For each late rank; the latest first. recent: of the last half minute, else of all the time."""
    times = {rank: one.recent if recent else one.total for rank, one in ranks.items()}
    times = {rank: one for rank, one in times.items() if one["elapsed"] >= LEAST_S}
    found = []
    for rank, own in times.items():
        others = [one for number, one in times.items() if number != rank]
        if not others:
            continue
        late = _excess(own, others, _busy)
        if late >= LATE_SHARE:
            found.append(_reason(rank, _cause(own, others, late), late, own, ranks[rank].lines))
        elif _is_link_slow(own, others):
            share = _excess(own, others, itemgetter("link"))
            found.append(_reason(rank, "link", share, own, {}))
    # A neighbour's data are acknowledged late, too: behind what the slow link has to send.
    slowest = max((one.share for one in found if one.cause == "link"), default=0.0)
    found = [one for one in found if one.cause != "link" or one.share >= slowest / 2]
    return sorted(found, key=lambda one: -one.share)


def of_ranks(ranks: Sequence[RankMetrics], recent: bool = True) -> list[Reason]:
    """The same out of metrics. Nothing of a rank whose figures are old, or that has ended."""
    known = {}
    for one in ranks:
        if one.phases is not None and one.generation == max(other.generation for other in ranks):
            is_fresh = one.state in ("running", "waiting") and one.phases_age_seconds < STALE_S
            if not recent or (is_fresh and not is_stale(one)):
                known[one.rank] = one.phases
    return reasons(known, recent)


def _busy(one: Mapping[str, float]) -> float:
    """Not waiting for others: what it was stopped for while it waited is its own."""
    return one["elapsed"] - max(0.0, one["waited"] - one["stopped_waiting"])


def _excess(
    own: Mapping[str, float],
    others: Sequence[Mapping[str, float]],
    figure: Callable[[Mapping[str, float]], float],
) -> float:
    """Of a share of the elapsed time, over the others' median."""
    return figure(own) / own["elapsed"] - statistics.median(figure(one) / one["elapsed"] for one in others)


def _cause(own: Mapping[str, float], others: Sequence[Mapping[str, float]], late: float) -> str:
    """What takes at least half of the excess from all phases, else the phase that exceeds the most."""
    losses = {name: _excess(own, others, itemgetter(name)) for name in LOSSES}
    # Who computes more waits more for a processor that all share: that is not what makes it late.
    usual = statistics.median(one["delayed"] / max(one["ran"], 1e-3) for one in others)
    losses["delayed"] -= usual * max(0.0, _excess(own, others, itemgetter("ran")))
    for name in ("delayed", "stopped"):  # of a throttled process Linux may count both
        losses[name] -= max(0.0, losses["throttled"])
    most = max(losses, key=lambda name: losses[name])
    if losses[most] >= late / 2:
        return most
    return max(PHASES, key=lambda name: _excess(own, others, itemgetter(name)))


def _is_link_slow(own: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> bool:
    """Data move for a good part of the time everywhere, and this rank's lie on its link for far longer than others'."""
    moving = statistics.median(one["transfer"] / one["elapsed"] for one in (own, *others))
    share = own["link"] / own["elapsed"]
    usual = statistics.median(one["link"] / one["elapsed"] for one in others)
    return moving >= LATE_SHARE and share >= LATE_SHARE + usual and share >= 2 * usual


def _reason(
    rank: int, cause: str, share: float, own: Mapping[str, float], lines: Mapping[str, str]
) -> Reason:
    each = share * own["elapsed"] / own["steps"] if own["steps"] else 0.0
    detail = ""
    if cause == "faults":
        detail = f"{own['faults_major']:.0f} major faults"
    elif cause == "link":
        rate = own["sent_bytes"] / own["link"] / 1e6 if own["link"] else 0.0
        detail = f"{rate:.3g} MB/s sent, {own['retransmits']:.0f} segments again"
    return Reason(rank, cause, share, each, lines.get(cause, ""), detail)


def is_stale(one: RankMetrics) -> bool:
    """Its last step is so long ago that rates of it say nothing of the present."""
    last = one.last_operation
    return last is not None and last.age_seconds > max(STALL_S, 10 * one.step_seconds_smoothed)


def culprits(ranks: Sequence[RankMetrics]) -> dict[int, str]:
    """rank -> what it does, of those that hold others up for more than 5 s. Who waits is none, and nobody is where all
    wait for each other."""
    active = [one for one in ranks if one.state in ("running", "waiting", "stalled")]
    waiting = [one for one in active if _waits(one)]
    named = {rank for one in waiting for rank in one.stalled_for} - {one.rank for one in waiting}
    found = {}
    for one in active:
        if one in waiting or not waiting:
            continue
        phases = one.phases if one.phases_age_seconds < STALE_S else None
        if one.is_stopped:
            found[one.rank] = "is stopped (SIGSTOP, or a debugger)"
        elif phases is not None and phases.now != WAITING and phases.now_seconds >= STALL_S:
            where = f" at {phases.now_line}" if phases.now_line else ""
            found[one.rank] = f"in {CAUSES[phases.now][0]} for {phases.now_seconds:.0f} s{where}"
        elif one.rank in named:
            found[one.rank] = "has not come"
    return found


def waited_seconds(ranks: Sequence[RankMetrics]) -> float:
    """For how long the culprits of a stall have held the others up by now, as the one says who has waited longest."""
    last = [one.last_operation for one in ranks if _waits(one)]
    return max((one.age_seconds for one in last if one is not None), default=0.0)


def _waits(one: RankMetrics) -> bool:
    """In a collective, for so long that somebody must be late."""
    if one.is_stopped or one.is_silent:
        return False
    if one.state == "stalled":
        return True
    phases = one.phases if one.phases_age_seconds < STALE_S else None
    in_collective = phases is not None and phases.now == WAITING and phases.now_seconds >= STALL_S
    last = one.last_operation  # looks miss what is short: its steps may go on
    is_still = last is None or last.age_seconds >= STALL_S
    return (in_collective and is_still) or (one.state == "waiting" and is_stale(one))
