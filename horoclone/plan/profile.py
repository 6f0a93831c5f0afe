"""What the ranks have measured, as plain numbers: of the model (Profile), and of operations between them (Rates).

Times in seconds, sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from horoclone.replay import Gradient, Step


class PlanError(Exception):
    """What was asked cannot be planned: a text that names the next move."""


class Block(NamedTuple):
    """A child of the model, in the order of forward. output: bytes that it hands to the next one."""

    name: str
    forward_s: float
    backward_s: float
    size: float
    output: float


class Sent(NamedTuple):
    """An operation that a compressor starts: after so much computing since the one before, with an argument of `size`
    bytes; `awaited` is the number of its stage, behind which the result is needed."""

    compute_s: float
    op: str
    size: float


class Stage(NamedTuple):
    """Between two waits of a compressor's reduce(): what it starts, then computing, then the wait for `awaits`, the
    number of one of the operations that it has started so far; -1: it has ended."""

    sent: tuple[Sent, ...]
    compute_s: float
    awaits: int


# One bucket's stages.
Reduction = tuple[Stage, ...]


@dataclass(frozen=True)
class Profile:
    """One rank's step. copy_s, half_s: to copy one byte of a gradient, as it is and into 16-bit floats."""

    gradients: tuple[Gradient, ...]
    names: tuple[str, ...]
    forward_s: float
    backward_s: float
    update_s: float
    copy_s: float
    half_s: float
    per_bucket_s: float  # of an optimizer's step, whatever its size
    outer_s: float  # DiLoCo's arithmetic around one exchange of all parameters
    parameters: float
    state: float  # of the optimizer
    activations: float
    memory_by: str
    blocks: tuple[Block, ...]
    is_chain: bool  # each block's output is the next one's input
    optimizer: str
    is_per_parameter: bool  # cross_barrier takes this optimizer
    compressions: dict[str, tuple[Reduction, ...]] = field(default_factory=dict)  # by name, per bucket
    assumed: tuple[str, ...] = ()

    @property
    def step(self) -> Step:
        return Step(self.gradients, self.forward_s, self.backward_s, self.update_s, self.copy_s)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    def layers(self) -> list[tuple[float, float]]:
        """(bytes, seconds of forward and backward) in the order of forward, for `horoclone simulate --layers`."""
        order = sorted(range(len(self.gradients)), key=lambda n: self.gradients[n].needed_s)
        begins = sorted({self.gradients[n].needed_s for n in order})
        ends = [*begins[1:], self.forward_s]
        whole = self.forward_s + self.backward_s
        share = whole / self.forward_s if self.forward_s else 1.0
        return [
            (sum(g.size for g in self.gradients if g.needed_s == begin), max(0.0, end - begin) * share)
            for begin, end in zip(begins, ends, strict=True)
        ]


class Line(NamedTuple):
    """An operation takes fixed_s + size * per_byte_s."""

    fixed_s: float
    per_byte_s: float

    def of(self, size: float) -> float:
        return self.fixed_s + size * self.per_byte_s


@dataclass(frozen=True)
class Rates:
    """Operations between `size` ranks, `local` of them on each host. By name: bucket, bucket16 (the optimizer's),
    allreduce, reducescatter, broadcast, allgather, alltoall (any memory). Sizes are those of a rank's argument.

    load: how much longer computing takes for each second of a reduction beside it, as a share.
    """

    size: int
    local: int
    shares_memory: bool
    operations: dict[str, Line]
    load: float
    compute_s: tuple[float, ...]  # of a step, by rank
