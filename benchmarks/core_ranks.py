"""One rank of core.py: exchanges endpoints, hands buffers and calls to core_calls.cc, and collects the times.

Started as `python core_ranks.py PLAN OUT` under an MPI launcher, as measure.py is. PLAN is JSON: sizes (bytes), rounds,
contestants, memory, seed, library (core_calls.cc compiled). Rank 0 writes what all ranks measured to OUT.
"""

from __future__ import annotations

import ctypes
import json
import random
import secrets
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import CALIBRATION_BYTES, CALIBRATION_CALLS, SLOTS, calls_for, run_rank, versions
from meeting import communicator

LABELS = {"horoclone": "horoclone", "bucket": "horoclone bucket", "mpi": "", "memcpy": "memcpy"}
NUMBERS = {kind: number for number, kind in enumerate(LABELS)}  # core_calls.cc's Contestant
ENDPOINT_BYTES = 64 << 10
LOOP_CALLS = 2000
LOOP_STRIDE = 16  # floats


class Core:
    """core_calls.cc in this process."""

    def __init__(self, library: str, comm: Any) -> None:
        self._library = ctypes.CDLL(library)
        self._library.core_error.restype = ctypes.c_char_p
        self._connect(comm)
        self._use_mpi(comm)

    def check(self, failed: int) -> None:
        """RuntimeError with the reason when a function of the library has failed."""
        if failed:
            raise RuntimeError(self._library.core_error().decode())

    def _connect(self, comm: Any) -> None:
        room, length = ctypes.create_string_buffer(ENDPOINT_BYTES), ctypes.c_size_t(ENDPOINT_BYTES)
        self.check(self._library.core_open(room, ctypes.byref(length)))
        endpoints = comm.allgather(room.raw[: length.value])
        secret = comm.bcast(secrets.token_bytes(32))
        texts = (ctypes.c_char_p * comm.size)(*endpoints)
        lengths = (ctypes.c_size_t * comm.size)(*map(len, endpoints))
        self.check(
            self._library.core_connect(comm.rank, comm.size, texts, lengths, secret, ctypes.c_size_t(32))
        )

    def _use_mpi(self, comm: Any) -> None:
        from mpi4py import MPI

        handles = [MPI._handleof(comm), MPI._handleof(MPI.FLOAT), MPI._handleof(MPI.SUM), int(MPI.IN_PLACE)]
        self.check(self._library.core_mpi(MPI.__file__.encode(), *map(ctypes.c_ssize_t, handles)))

    def allocate(self, nbytes: int, huge: bool, buckets: bool) -> None:
        self.check(self._library.core_allocate(ctypes.c_size_t(nbytes // 4), huge, buckets))

    def calls(self, kind: str, nbytes: int, warm: int, calls: int) -> list[float]:
        """Microseconds of each call on this rank."""
        times = (ctypes.c_double * calls)()
        self.check(self._library.core_calls(NUMBERS[kind], ctypes.c_size_t(nbytes // 4), warm, calls, times))
        return list(times)

    def loop(self, kind: str) -> list[float]:
        """Microseconds of a call of 4 B, of calls back to back."""
        took = ctypes.c_double()
        self.check(self._library.core_loop(NUMBERS[kind], LOOP_CALLS, ctypes.byref(took)))
        return [took.value / LOOP_CALLS]

    def close(self) -> None:
        self.check(self._library.core_close())


def measure(plan: dict[str, Any], comm: Any) -> dict[str, Any]:
    """Times of this rank, as report.analyse() takes them."""
    core = Core(plan["library"], comm)
    labels = LABELS | {"mpi": versions(True)["mpi"]}
    largest = max(*plan["sizes"], CALIBRATION_BYTES, 4 * LOOP_CALLS * LOOP_STRIDE)
    core.allocate(largest, plan["memory"] == "huge", "bucket" in plan["contestants"])
    times: dict[str, dict[str, list[list[float]]]] = {}

    def add(part: str, kind: str, took: list[float]) -> None:
        times.setdefault(part, {}).setdefault(labels[kind], []).append(took)

    def calibrate() -> list[float]:
        return core.calls("memcpy", CALIBRATION_BYTES, SLOTS, CALIBRATION_CALLS)

    calibration = [calibrate()]
    for number in range(plan["rounds"]):
        order = random.Random(f"{plan['seed']}.{number}")
        for nbytes in plan["sizes"]:
            warm = SLOTS * (2 if number == 0 else 1) if nbytes <= 16 << 20 else 1
            for kind in order.sample(plan["contestants"], len(plan["contestants"])):
                add(f"size.{nbytes}", kind, core.calls(kind, nbytes, warm, calls_for(nbytes)))
        loops = [kind for kind in plan["contestants"] if kind in ("horoclone", "mpi")]
        for kind in order.sample(loops, len(loops)):
            add("loop", kind, core.loop(kind))
    calibration.append(calibrate())
    core.close()
    return {"times": times, "calibration": calibration}


def main(argv: list[str]) -> None:
    plan, out, comm = json.loads(argv[0]), Path(argv[1]), communicator()
    everybody = comm.gather(measure(plan, comm))
    if everybody is not None:
        out.write_text(json.dumps({"versions": versions(True), "ranks": everybody}), encoding="utf-8")


if __name__ == "__main__":
    run_rank(main)
