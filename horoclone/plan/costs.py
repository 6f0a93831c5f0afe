"""What an operation takes between the ranks that were asked for, from what was measured between those that are here.

Where the measured ranks are the wished ones, it is what was measured. Else the node's part is scaled by the bytes that
a rank moves, and the network's part follows from the rate that was given or assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from horoclone.plan.profile import Line, PlanError, Rates
from horoclone.replay import CostOf, Stages, rounds

ASSUMED_GBIT, ASSUMED_US = 10.0, 30.0
PAYLOAD = 0.95  # of a link's nominal rate: headers of Ethernet, IP and TCP
ASSUMED_LOCAL = Line(20e-6, 1 / 4e9)


class Link(NamedTuple):
    """Between hosts: each way, and one message's time."""

    gbit: float
    latency_us: float

    @classmethod
    def read(cls, text: str) -> Link:
        """10gbit or 10gbit,30us. PlanError for anything else."""
        rate, _, latency = text.lower().replace(" ", "").partition(",")
        try:
            unit = next(unit for unit in ("gbit", "mbit") if rate.endswith(unit))
            gbit = float(rate.removesuffix(unit)) / (1 if unit == "gbit" else 1000)
            latency_us = float(latency.removesuffix("us")) if latency else ASSUMED_US
        except (StopIteration, ValueError):
            gbit = latency_us = -1.0
        if not 0 < gbit < 1e5 or not 0 <= latency_us < 1e7:
            raise PlanError(f"--link {text}: expected a rate and a latency, such as 10gbit,30us or 100mbit")
        return cls(gbit, latency_us)


def _moved(op: str, n: int) -> float:
    """Bytes that a rank sends, per byte of its argument, with the algorithms for large ones; for allgather and alltoall
    of its own rows."""
    if n < 2:
        return 0.0
    share = (n - 1) / n
    return {"reducescatter": share, "broadcast": 1.0, "allgather": n - 1.0, "alltoall": share}.get(
        op, 2 * share
    )


class Costs:
    """of("bucket")(size) are the stages of that operation."""

    def __init__(self, rates: Rates, size: int, per_node: int, link: Link | None) -> None:
        self.size, self.per_node = size, min(per_node, size)
        self.nodes = -(-size // self.per_node)
        self._rates = rates
        self.assumed: list[str] = []
        measured_nodes = -(-rates.size // rates.local)
        self.is_measured = rates.size == size and (measured_nodes > 1 or self.nodes == 1)
        if self.is_measured:
            self.nodes, self.per_node = measured_nodes, rates.local
        self._link = link or Link(ASSUMED_GBIT, ASSUMED_US)
        if self.nodes > 1 and not self.is_measured:
            if link is None:
                self.assumed.append(
                    f"the link between hosts: {ASSUMED_GBIT:g} Gbit/s, {ASSUMED_US:g} us (say --link, or measure: -H)"
                )
            else:
                self.assumed.append(
                    f"the link between hosts: {link.gbit:g} Gbit/s, {link.latency_us:g} us (--link)"
                )
            self.assumed.append("messages between hosts take no processor time from computing")
        if self.per_node != rates.local and not self.is_measured:
            self.assumed.append(
                f"{self.per_node} ranks of a host from what {rates.local} do here, by the bytes that a rank moves"
            )

    @property
    def load(self) -> dict[str, float]:
        """For replay(): how much of the computing thread's processor each level takes."""
        return {"link": self._rates.load, "node": self._rates.load}

    @property
    def shares_memory(self) -> bool:
        return self.nodes == 1 and self._rates.shares_memory

    def of(self, op: str) -> CostOf:
        """Of one operation, by the names of Rates."""
        if self.size == 1:
            return lambda size: ()
        if self.is_measured:
            line = self._rates.operations[op]
            return lambda size: [("link", line.of(size))]
        return self._by_levels(op)

    def seconds(self, op: str, size: float) -> float:
        """With nothing else under way."""
        return sum(seconds for _, seconds in self.of(op)(size))

    def _by_levels(self, op: str) -> CostOf:
        local, n, nodes = self.per_node, self.size, self.nodes
        inside: Callable[[float], float] = self._inside(op)
        if nodes == 1:
            return lambda size: [("node", inside(size))]
        rate, latency_s = self._link.gbit * 1e9 / 8 * PAYLOAD, self._link.latency_us * 1e-6
        is_sum = op in ("bucket", "bucket16", "allreduce")
        if is_sum:
            factor, messages = 2 * (nodes - 1) / nodes, 2 * (nodes - 1)
        elif op == "alltoall":
            factor, messages = local * (n - local) / n, n - 1
        else:
            factor, messages = _moved(op, n), n - 1 if op != "broadcast" else max(1, (n - 1).bit_length())

        def stages(size: float) -> Stages:
            in_turn = rounds(nodes, size) if is_sum and local == 1 else messages
            across = ("network", factor * size / rate + in_turn * latency_s)
            if local == 1:
                return [across]
            half = inside(size) / 2
            return [("node", half), across, ("node", half)]

        return stages

    def _inside(self, op: str) -> Callable[[float], float]:
        measured, local = self._rates, self.per_node
        if local < 2:
            return lambda size: 0.0
        if measured.local < 2 or op not in measured.operations:
            return lambda size: ASSUMED_LOCAL.of(size * _moved(op, local))
        line, ratio = measured.operations[op], _moved(op, local) / _moved(op, measured.local)
        return lambda size: line.fixed_s + size * line.per_byte_s * ratio
