"""A training step replayed: what one rank computes and sends, on links that carry one piece at a time.

Every strategy is a program of five kinds of steps (Compute, Send, Wait, Mark); its time is found by running the
program, not from a formula. A bucket is (when it is ready, bytes, priority); a link is a queue in the order of
priorities. `horoclone simulate` and `horoclone plan` use it. Pure: no clock, no I/O. Times in seconds, sizes in bytes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

MIB = 1 << 20
# Those of horoclone/torch/optimizer/buckets.py and HOROCLONE_PARTITION_BYTES; tests/plan compares them.
FIRST_BUCKET_BYTES, BUCKET_BYTES, URGENT_BUCKET_BYTES, PART_BYTES = MIB, 16 * MIB, MIB, MIB
AHEAD = 2  # parts that a more urgent one does not overtake any more: one under way, one handed over
RING_SHARE_BYTES = 16 << 10  # of a rank: below, few rounds (csrc/collective/selection.cc)
STEPS = 7  # of a replay, of which the first WARM do not count: they find the links idle
WARM = 3

# (level, seconds) in the order in which a transfer passes them, such as the node, the network, the node.
Stages = Sequence[tuple[str, float]]
CostOf = Callable[[float], Stages]


class Compute(NamedTuple):
    """The thread that trains is busy for so long, if nothing else takes its processor."""

    seconds: float


class Send(NamedTuple):
    """Starts a transfer. The higher priority goes first, among equals the earlier. parts: pieces of equal length."""

    name: str
    stages: Stages
    priority: int = 0
    parts: int = 1


class Wait(NamedTuple):
    """Until that transfer has ended."""

    name: str


class Mark(NamedTuple):
    """A step ends here."""


Program = Sequence[Compute | Send | Wait | Mark]


class Timed(NamedTuple):
    """The mean of the steps that count: how long one took, and how much of that was spent in waiting."""

    step_s: float
    waiting_s: float


class _Part:
    """A piece of a transfer on its way through its stages."""

    def __init__(self, name: str, stages: Stages, priority: int) -> None:
        self.name, self.stages, self.priority = name, list(stages), priority


class _Links:
    """Every level with what it carries and what waits for it."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int, _Part]]] = {}
        self._line: dict[str, deque[list[object]]] = {}  # [seconds left, part], the first is under way
        self._left: dict[str, int] = {}  # parts of a transfer that have not ended
        self._order = 0

    def send(self, op: Send) -> None:
        self._left[op.name] = op.parts if op.stages else 0
        for _ in range(self._left[op.name]):
            stages = [(level, seconds / op.parts) for level, seconds in op.stages]
            self._offer(_Part(op.name, stages, op.priority))

    def _offer(self, part: _Part) -> None:
        level = part.stages[0][0]
        self._order += 1
        heapq.heappush(self._waiting.setdefault(level, []), (-part.priority, self._order, part))
        self._fill(level)

    def _fill(self, level: str) -> None:
        line, waiting = self._line.setdefault(level, deque()), self._waiting[level]
        while len(line) < AHEAD and waiting:
            part = heapq.heappop(waiting)[2]
            line.append([part.stages.pop(0)[1], part])

    def ended(self, name: str) -> bool:
        return self._left[name] == 0

    def busy(self) -> list[str]:
        return [level for level, line in self._line.items() if line]

    def next_end(self) -> float:
        """Seconds until a part leaves its level; infinite where nothing is under way."""
        return min((line[0][0] for line in self._line.values() if line), default=float("inf"))  # type: ignore[type-var, return-value]

    def advance(self, seconds: float) -> None:
        """At most next_end()."""
        arrived: list[_Part] = []
        for level, line in self._line.items():
            if not line:
                continue
            line[0][0] -= seconds  # type: ignore[operator]
            if line[0][0] <= 1e-12:  # type: ignore[operator]
                arrived.append(line.popleft()[1])  # type: ignore[arg-type]
                self._fill(level)
        for part in arrived:
            if part.stages:
                self._offer(part)
            else:
                self._left[part.name] -= 1


def replay(program: Program, load: Mapping[str, float] | None = None) -> Timed:
    """Runs a program of several steps, each closed by a Mark, and tells of those after the first WARM.

    load: how much of a processor of the computing thread a level takes while it is busy (0 where a core is free for
    it). ValueError for a program that waits for what it has not sent, or that has too few steps.
    """
    links, load = _Links(), load or {}
    now = waited = 0.0
    marks: list[tuple[float, float]] = []
    sent: set[str] = set()
    for op in program:
        if isinstance(op, Compute):
            left = op.seconds
            while left > 1e-12:
                rate = max(0.0, 1.0 - sum(load.get(level, 0.0) for level in links.busy()))
                lasts = min(left / rate if rate else float("inf"), links.next_end())
                links.advance(lasts)
                left -= lasts * rate
                now += lasts
        elif isinstance(op, Send):
            links.send(op)
            sent.add(op.name)
        elif isinstance(op, Wait):
            if op.name not in sent:
                raise ValueError(f"the program waits for {op.name!r}, which it has not sent")
            while not links.ended(op.name):
                lasts = links.next_end()
                links.advance(lasts)
                now += lasts
                waited += lasts
        else:
            marks.append((now, waited))
    if len(marks) <= WARM:
        raise ValueError(f"the program has {len(marks)} steps, of which the first {WARM} do not count")
    (begin_s, waited_s), count = marks[WARM - 1], len(marks) - WARM
    return Timed((now - begin_s) / count, (waited - waited_s) / count)


# --- buckets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradient:
    """Of one parameter. needed_s: from the start of forward until it is read first; ready_s: from that of backward."""

    size: float
    needed_s: float
    ready_s: float


@dataclass(frozen=True)
class Step:
    """What one rank computes in a step. copy_s: to copy one byte of a gradient into its bucket."""

    gradients: tuple[Gradient, ...]
    forward_s: float
    backward_s: float
    update_s: float = 0.0
    copy_s: float = 0.0

    @property
    def size(self) -> float:
        """Bytes of all gradients."""
        return sum(gradient.size for gradient in self.gradients)

    @property
    def compute_s(self) -> float:
        """Without communication."""
        return self.forward_s + self.backward_s + self.update_s


class Bucket(NamedTuple):
    """Gradients that go as one. first: numbers of its gradients, as step.gradients has them."""

    ready_s: float
    needed_s: float
    size: float
    priority: int
    members: tuple[int, ...]


def rounds(ranks: int, size: float) -> int:
    """Messages that follow one another in an allreduce of so many bytes over a network, one rank on each host, from
    where recursive doubling ends: of a circulant graph or a ring."""
    return 2 * ((ranks - 1).bit_length() if ranks > 3 and size < RING_SHARE_BYTES * ranks else ranks - 1)


def of_layers(
    layers: Sequence[tuple[float, float]],
    gradient_bytes: float,
    compute_s: float,
    *,
    forward_share: float = 1 / 3,
    update_s: float = 0.0,
) -> Step:
    """A step from (share of the parameters, share of the computing) per layer, in the order of forward.

    The shares are scaled to 1. compute_s: forward, backward and update together.
    """
    sizes, times = sum(size for size, _ in layers), sum(time for _, time in layers)
    forward_s = (compute_s - update_s) * forward_share
    backward_s = compute_s - update_s - forward_s
    done, gradients = 0.0, []
    for size, time in layers:
        begin, done = done, done + time / times
        gradients.append(Gradient(gradient_bytes * size / sizes, forward_s * begin, backward_s * (1 - begin)))
    return Step(tuple(gradients), forward_s, backward_s, update_s)


def cut(sizes: Sequence[float], first_bytes: float, bucket_bytes: float) -> list[list[int]]:
    """Numbers of the gradients of each bucket: filled in the order given, the first one up to first_bytes.

    The rule of plan_buckets() in horoclone/torch/optimizer/buckets.py, for one dtype.
    """
    found: list[list[int]] = []
    filling: list[int] = []
    held, limit = 0.0, first_bytes
    for number, size in enumerate(sizes):
        if filling and held + size > limit:
            found.append(filling)
            filling, held, limit = [], 0.0, bucket_bytes
        filling.append(number)
        held += size
    return [*found, filling] if filling else found


def buckets_of(
    step: Step, bucket_bytes: float = BUCKET_BYTES, *, wire: float = 1.0, groups: int = 0
) -> list[Bucket]:
    """In the order in which they become ready. wire: bytes that are sent, of a gradient's. groups: so many equal ones.

    The priority is that of cross_barrier: what is read first goes first.
    """
    order = sorted(range(len(step.gradients)), key=lambda number: step.gradients[number].ready_s)
    if groups:
        count, extra = divmod(len(order), groups)
        bounds = [k * count + min(k, extra) for k in range(groups + 1)]
        cuts = [list(range(a, b)) for a, b in pairwise(bounds) if b > a]
    else:
        cuts = cut([step.gradients[n].size * wire for n in order], FIRST_BUCKET_BYTES, bucket_bytes)
    found = []
    reading = sorted({gradient.needed_s for gradient in step.gradients})
    for numbers in cuts:
        members = [step.gradients[order[i]] for i in numbers]
        needed_s = min(one.needed_s for one in members)
        found.append(
            Bucket(
                max(one.ready_s for one in members),
                needed_s,
                sum(one.size for one in members) * wire,
                -reading.index(needed_s),
                tuple(order[i] for i in numbers),
            )
        )
    return found


# --- programs ------------------------------------------------------------------------------------------------------


def backward(step: Step, buckets: Sequence[Bucket], begin: Callable[[int, Bucket], Program]) -> Program:
    """The backward pass; `begin` says what the hook does that fills a bucket."""
    program: list[Compute | Send | Wait | Mark] = []
    at = 0.0
    for number, bucket in enumerate(buckets):
        copied = sum(step.gradients[n].size for n in bucket.members) * step.copy_s
        program.append(Compute(max(0.0, bucket.ready_s - at) + copied))
        program += begin(number, bucket)
        at = max(at, bucket.ready_s)
    return [*program, Compute(max(0.0, step.backward_s - at))]


def ordinary_step(
    step: Step, cost: CostOf, buckets: Sequence[Bucket], turn: int, update_s: float
) -> list[Compute | Send | Wait | Mark]:
    """Number `turn` of DistributedOptimizer's steps: reductions under backward, a wait for all of them, an update. Its
    Mark is the caller's."""
    program: list[Compute | Send | Wait | Mark] = [Compute(step.forward_s)]
    program += backward(step, buckets, lambda i, b: [Send(f"{turn}.{i}", cost(b.size))])
    program += [Wait(f"{turn}.{i}") for i in range(len(buckets))]
    return [*program, Compute(update_s)]


def ordinary(step: Step, cost: CostOf, buckets: Sequence[Bucket]) -> Program:
    """DistributedOptimizer's steps."""
    program: list[Compute | Send | Wait | Mark] = []
    for turn in range(STEPS):
        program += [*ordinary_step(step, cost, buckets, turn, step.update_s), Mark()]
    return program


def without_barrier(
    step: Step, cost: CostOf, buckets: Sequence[Bucket], *, per_bucket_s: float = 0.0, in_parts: bool = True
) -> Program:
    """cross_barrier: a forward waits for what it reads, and updates it. per_bucket_s: of an update, whatever its size.

    in_parts: as between machines, where an urgent bucket goes between the parts of a large one.
    """
    program: list[Compute | Send | Wait | Mark] = []
    reading = sorted(range(len(buckets)), key=lambda i: buckets[i].needed_s)
    whole = sum(bucket.size for bucket in buckets) or 1.0

    def begin(turn: int, number: int, bucket: Bucket) -> Program:
        parts = max(1, round(bucket.size / PART_BYTES)) if in_parts else 1
        return [Send(f"{turn}.{number}", cost(bucket.size), bucket.priority, parts)]

    for turn in range(STEPS):
        at = 0.0
        for i in reading:
            bucket = buckets[i]
            program.append(Compute(max(0.0, bucket.needed_s - at)))
            at = max(at, bucket.needed_s)
            if turn:
                program.append(Wait(f"{turn - 1}.{i}"))
                program.append(Compute(step.update_s * bucket.size / whole + per_bucket_s))
        program.append(Compute(max(0.0, step.forward_s - at)))
        program += backward(step, buckets, lambda i, b, turn=turn: begin(turn, i, b))  # type: ignore[misc]
        program.append(Mark())
    return program
