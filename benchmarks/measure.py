"""One rank of the benchmark: times every contestant in turn on the same memory, and checks every result.

Started as `python measure.py PLAN OUT`, by allreduce.py under an MPI launcher or by network.py on two hosts. PLAN is
the JSON of `Plan`; rank 0 writes all ranks' times to OUT. A fault on one rank, a wrong number included, ends the job.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from contestants import KINDS, Memcpy, library_name
from inputs import Inputs
from meeting import communicator
from sets import SetTimer

SLOTS = 3  # buffers that are used in turn
CALIBRATION_BYTES = 16 << 20
CALIBRATION_CALLS = 15
LOOP_CALLS = 500
LOOP_STRIDE = 16  # floats: each number of the loop has a cache line of its own


@dataclass(frozen=True)
class Plan:
    """What all ranks do, in the same order."""

    sizes: list[int]  # bytes
    rounds: int
    contestants: list[str]  # keys of contestants.KINDS
    memory: str  # private, huge or shared
    seed: int
    extras: bool  # the loop of 4 B
    sets: dict[str, list[int]] = field(default_factory=dict)  # of sets.py


def calls_for(nbytes: int) -> int:
    """Timed calls per round. The same for every contestant, else their 99th percentiles would not compare."""
    for limit, calls in ((64 << 10, 200), (1 << 20, 60), (4 << 20, 24), (16 << 20, 10), (64 << 20, 5)):
        if nbytes <= limit:
            return calls
    return 3


def allocate(nbytes: int, memory: str) -> torch.Tensor:
    """`nbytes` of float32, touched. private: as torch allocates; huge: madvised for huge pages; shared: where
    horoclone's optimizer keeps its gradients. All contestants get the same."""
    if memory == "huge":
        area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(area, dtype=torch.float32)
    elif memory == "shared":
        from horoclone.runtime import native

        tensor = torch.frombuffer(native().allocate(nbytes), dtype=torch.float32)
    else:
        tensor = torch.empty(nbytes // 4, dtype=torch.float32)
    return tensor.zero_()


class Bench:
    """The times of one rank; `times[part][label]` is a list of rounds, in microseconds."""

    def __init__(self, comm: Any, plan: Plan) -> None:
        self.comm, self.plan = comm, plan
        self.contestants = [KINDS[kind](comm) for kind in plan.contestants]
        loop_floats = LOOP_CALLS * LOOP_STRIDE
        set_bytes = [4 * sum(counts) for counts in plan.sets.values()]
        largest = max(*plan.sizes, *set_bytes, CALIBRATION_BYTES, 4 * loop_floats)
        self.inputs = Inputs(comm.rank, comm.size, largest // 4)
        self.buffers = [allocate(largest, plan.memory) for _ in range(SLOTS)]
        self.iteration = 0
        self.times: dict[str, dict[str, list[list[float]]]] = {}
        self._calls: dict[tuple[str, int], list[Callable[[], object]]] = {}
        self._sets = SetTimer(self, plan.sets)

    def run(self) -> dict[str, Any]:
        gc.collect()
        gc.disable()
        calibration = [self._calibrate()]
        for number in range(self.plan.rounds):
            order = random.Random(f"{self.plan.seed}.{number}")
            for nbytes in self.plan.sizes:
                for one in order.sample(self.contestants, len(self.contestants)):
                    with self._turn_of(one):
                        self.add_round(f"size.{nbytes}", one.label, self._time_size(one, nbytes, number == 0))
            self._sets.round(order)
            if self.plan.extras:
                self._extras(order)
        calibration.append(self._calibrate())
        return {"times": self.times, "calibration": calibration}

    @contextmanager
    def _turn_of(self, one: Any) -> Iterator[None]:
        """Some need other settings of the runtime while it is their turn."""
        if not hasattr(one, "begin"):
            yield
            return
        one.begin()
        try:
            yield
        finally:
            one.end()

    def add_round(self, part: str, label: str, times: list[float]) -> None:
        self.times.setdefault(part, {}).setdefault(label, []).append(times)

    def _calibrate(self) -> list[float]:
        return self._time_size(Memcpy(self.comm), CALIBRATION_BYTES, True, CALIBRATION_CALLS)

    def _time_size(self, one: Any, nbytes: int, first: bool, calls: int | None = None) -> list[float]:
        """One round of one contestant: a few calls to warm up, then the timed ones, all checked."""
        views = [buffer[: nbytes // 4] for buffer in self.buffers]
        if (one.label, nbytes) not in self._calls:
            self._calls[one.label, nbytes] = [
                one.prepare(views[slot], views[(slot + 1) % SLOTS], f"{one.label}.{nbytes}.{slot}")
                for slot in range(SLOTS)
            ]
        prepared = self._calls[one.label, nbytes]
        reduces, tolerance = not isinstance(one, Memcpy), getattr(one, "tolerance", 0.0)
        warm = SLOTS * (2 if first else 1) if nbytes <= 16 << 20 else 1
        times = []
        for index in range(warm + (calls or calls_for(nbytes))):
            slot = index % SLOTS
            took = self.time_call(prepared[slot], views[slot])
            self.inputs.check(
                views[slot if reduces else (slot + 1) % SLOTS], self.iteration, reduces, tolerance
            )
            if index >= warm:
                times.append(took)
        return times

    def time_call(self, call: Callable[[], object], tensor: torch.Tensor) -> float:
        """One call on numbers that this rank has just written, after a barrier; in microseconds."""
        self.iteration += 1
        self.inputs.write(tensor, self.iteration)
        self.comm.Barrier()
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1000

    def _extras(self, order: random.Random) -> None:
        reducers = [one for one in self.contestants if not isinstance(one, Memcpy)]
        for one in order.sample(reducers, len(reducers)):
            self.add_round("loop", one.label, self._time_loop(one))

    def _time_loop(self, one: Any) -> list[float]:
        """Per call, of calls back to back with no barrier between; each call has a number of its own."""
        area = self.buffers[0][: LOOP_CALLS * LOOP_STRIDE]
        if (one.label, -1) not in self._calls:
            numbers = [area[at : at + 1] for at in range(0, area.numel(), LOOP_STRIDE)]
            self._calls[one.label, -1] = [one.prepare(n, n, f"{one.label}.loop") for n in numbers]
        calls = self._calls[one.label, -1]

        def loop() -> None:
            for call in calls:
                call()

        self.time_call(loop, area)
        took = self.time_call(loop, area)
        self.inputs.check_every(area, LOOP_STRIDE, self.iteration)
        return [took / len(calls)]

    def close(self) -> None:
        self.buffers.clear()
        self._calls.clear()
        self._sets.close()
        shut = set()
        for one in self.contestants:
            if one.close.__qualname__ not in shut:  # the two ways of horoclone share one runtime
                shut.add(one.close.__qualname__)
                one.close()


def versions(mpi: bool) -> dict[str, str]:
    """Of everything that was measured."""
    import numpy

    import horoclone
    from horoclone._core import build_info

    found = {
        "horoclone": horoclone.__version__,
        "horoclone build": build_info(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": sys.version.split()[0],
    }
    if mpi:
        import mpi4py

        found.update({"mpi": library_name(), "mpi4py": mpi4py.__version__})
    return found


def end_the_job() -> None:
    """Of all ranks, from one that has failed. Without MPI the starter sees the exit code and kills the others."""
    if "mpi4py" in sys.modules:
        communicator().Abort(1)
    os._exit(1)


def main(argv: list[str]) -> None:
    plan, out = Plan(**json.loads(argv[0])), Path(argv[1])
    comm = communicator()
    torch.set_num_threads(1)
    bench = Bench(comm, plan)
    with torch.no_grad():
        own = bench.run()
    everybody = comm.gather(own)
    if everybody is not None:
        out.write_text(
            json.dumps({"versions": versions("mpi4py" in sys.modules), "ranks": everybody}), encoding="utf-8"
        )
    bench.close()


def run_rank(body: Callable[[list[str]], None]) -> None:
    """The whole of a rank's program: body with the command line's words; a fault of it ends the job."""
    try:
        body(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        end_the_job()


if __name__ == "__main__":
    run_rank(main)
