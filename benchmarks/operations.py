"""The operations other than allreduce, rank side: each contestant's call, and what must come out.

A size is the bytes of the larger of input and result: an allgather's result, everybody else's input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import horoclone.torch as hvd

if TYPE_CHECKING:
    from measure import Bench

Call = Callable[[], torch.Tensor]  # gives the result


def of_horoclone(operation: str, source: torch.Tensor, _: torch.Tensor, name: str) -> Call:
    """Results of all but broadcast are memory of the call's own, as its users get it."""
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: hvd.broadcast_(source, 0, name),
        "allgather": lambda: hvd.allgather(source, name),
        "reducescatter": lambda: hvd.reducescatter(source, name=name, op=hvd.Sum),
        "alltoall": lambda: hvd.alltoall(source, name=name),
    }
    return calls[operation]


def of_gloo(operation: str, source: torch.Tensor, target: torch.Tensor, _: str) -> Call:
    call: Callable[[], object] = {
        "broadcast": lambda: dist.broadcast(source, 0),
        "allgather": lambda: dist.all_gather_into_tensor(target, source),
        "reducescatter": lambda: dist.reduce_scatter_tensor(target, source),
        "alltoall": lambda: dist.all_to_all_single(target, source),
    }[operation]
    result = source if operation == "broadcast" else target
    return lambda: (call(), result)[1]


def of_mpi(comm: Any, operation: str, source: torch.Tensor, target: torch.Tensor) -> Call:
    from mpi4py import MPI

    sent, received = [source.numpy(), MPI.FLOAT], [target.numpy(), MPI.FLOAT]
    call: Callable[[], object] = {
        "broadcast": lambda: comm.Bcast(sent, 0),
        "allgather": lambda: comm.Allgather(sent, received),
        "reducescatter": lambda: comm.Reduce_scatter_block(sent, received),
        "alltoall": lambda: comm.Alltoall(sent, received),
    }[operation]
    result = source if operation == "broadcast" else target
    return lambda: (call(), result)[1]


class OperationTimer:
    """Times one operation in the place of Bench's allreduce, by the same rules."""

    def __init__(self, bench: Bench, operation: str) -> None:
        self._bench, self._operation = bench, operation
        self._calls: dict[tuple[str, int], list[tuple[Call, torch.Tensor]]] = {}

    def time_size(self, one: Any, nbytes: int, first: bool) -> list[float]:
        from measure import SLOTS, calls_for

        bench, operation = self._bench, self._operation
        if (one.label, nbytes) not in self._calls:
            self._calls[one.label, nbytes] = [self._prepare(one, nbytes, slot) for slot in range(SLOTS)]
        warm = SLOTS * (2 if first else 1) if nbytes <= 16 << 20 else 1
        times = []
        for index in range(warm + calls_for(nbytes)):
            call, source = self._calls[one.label, nbytes][index % SLOTS]
            results: list[torch.Tensor] = []
            took = bench.time_call(lambda call=call, results=results: results.append(call()), source)  # type: ignore[misc]
            bench.inputs.check_operation(operation, results[0], bench.iteration)
            if index >= warm:
                times.append(took)
        return times

    def _prepare(self, one: Any, nbytes: int, slot: int) -> tuple[Call, torch.Tensor]:
        count, size = nbytes // 4, self._bench.comm.size
        if count % size:
            raise ValueError(f"{nbytes} bytes are not the same number of float32 for each of {size} ranks")
        buffers = self._bench.buffers
        source = buffers[slot][: count // size if self._operation == "allgather" else count]
        target = buffers[(slot + 1) % len(buffers)][
            : count // size if self._operation == "reducescatter" else count
        ]
        name = f"{one.label}.{self._operation}.{nbytes}.{slot}"
        if one.label == "gloo":
            return of_gloo(self._operation, source, target, name), source
        if one.label.startswith("horoclone"):
            return of_horoclone(self._operation, source, target, name), source
        return of_mpi(self._bench.comm, self._operation, source, target), source
