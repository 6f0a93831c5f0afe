"""Random programs in which ranks are killed; the history that all ranks wrote must be sound (see history_check.py).

HOROCLONE_TEST_HISTORY_S is for how many seconds programs are tried (default 4), HOROCLONE_TEST_HISTORY_SEED where they begin.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_pool import say

import horoclone as hvd

LONG_S = float(os.environ.get("HOROCLONE_TEST_HISTORY_S", "4"))
SEED = int(os.environ.get("HOROCLONE_TEST_HISTORY_SEED", str(random.randrange(1 << 30))))
DTYPES = (np.float32, np.float64, np.int32, np.int64, np.uint8)


def _checker() -> Any:
    spec = importlib.util.spec_from_file_location(
        "history_check", Path(__file__).with_name("history_check.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["history_check"] = module
    spec.loader.exec_module(module)
    return module


check = _checker()


# --- the programs


def inputs(seed: int, number: int, size: int, shape: tuple[int, ...], dtype: Any) -> list[np.ndarray]:
    """Of every rank; small integers, so that every sum is exact."""
    return [
        np.random.default_rng((seed, number, rank)).integers(0, 5, shape).astype(dtype)
        for rank in range(size)
    ]


def some_shape(dice: random.Random) -> tuple[int, ...]:
    luck = dice.random()
    if luck < 0.1:
        return ()
    if luck < 0.7:
        return tuple(dice.randrange(1, 9) for _ in range(dice.randrange(1, 4)))
    return (dice.randrange(1, 60000),) if luck < 0.97 else (dice.randrange(100_000, 600_000),)


def carry_out(kind: str, name: str, data: list[np.ndarray], rank: int, root: int, odd: bool) -> bool:
    """Submits the operation, waits for it, and says whether the result is the model's. `odd`: this rank disagrees."""
    mine = data[rank]
    if odd:
        return carry_out(kind, name, [np.ones(mine.size + 1, mine.dtype)] * len(data), rank, root, False)
    if kind == "sum":
        return np.array_equal(
            hvd.allreduce(mine, op=hvd.Sum, name=name), sum(data[1:], data[0]).astype(mine.dtype)
        )
    if kind == "max":
        return np.array_equal(hvd.allreduce(mine, op=hvd.Max, name=name), np.maximum.reduce(data))
    if kind == "allgather":
        return np.array_equal(
            hvd.allgather(mine.reshape(-1), name=name), np.concatenate([each.reshape(-1) for each in data])
        )
    if kind == "broadcast":
        return np.array_equal(hvd.broadcast(mine, root, name=name), data[root])
    if kind == "group":
        handles = [hvd.allreduce_async(mine * (k + 1), op=hvd.Sum, name=f"{name}.{k}") for k in range(5)]
        whole = sum(data[1:], data[0])
        results = [hvd.synchronize(handle) for handle in handles]
        return all(
            np.array_equal(each, (whole * (k + 1)).astype(mine.dtype)) for k, each in enumerate(results)
        )
    hvd.barrier()
    return True


def live(seed: int, limit_s: float) -> None:
    """A random program, the same on every rank. It ends when rank 0 has had enough, or with the first lost rank."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    dice, end = random.Random(seed), time.monotonic() + limit_s
    say(running=True)
    for number in range(1_000_000):
        kind = (
            "stop"
            if number % 20 == 0
            else dice.choice(["sum", "sum", "max", "allgather", "broadcast", "group", "barrier"])
        )
        dtype, shape, root = dice.choice(DTYPES), some_shape(dice), dice.randrange(size)
        planted = kind == "sum" and dice.random() < 0.1
        name = f"{kind}.{dice.randrange(50)}"
        what = f"{kind} {name} {shape} {np.dtype(dtype).name}"
        facts = {"number": number, "what": what, "planted": planted}
        say(event={**facts, "end": None})
        try:
            if kind == "stop":
                late = np.array([rank == 0 and time.monotonic() > end])
                enough, right = bool(hvd.allreduce(late, op=hvd.Max, name=name)[0]), True
            else:
                data = inputs(seed, number, size, shape, dtype)
                enough, right = False, carry_out(kind, name, data, rank, root, planted and rank == root)
            say(event={**facts, "end": "done", "right": right})
        except hvd.HorovodInternalError as error:
            say(event={**facts, "end": type(error).__name__, "lost": getattr(error, "rank", None)})
            enough = not isinstance(error, hvd.Mismatch)
        if enough:
            break
    hvd.shutdown()


# --- the tests


def histories_of(team: Any) -> list[list[Any]]:
    return [[check.event_of(line["event"]) for line in team.said(rank, "event")] for rank in range(team.size)]


@pytest.mark.timeout(180 + 4 * int(LONG_S))
def test_no_history_of_random_programs_with_kills_breaks_a_rule(worker_pool) -> None:
    began, programs, operations, kills, dice = time.monotonic(), 0, 0, 0, random.Random(SEED)
    while time.monotonic() - began < LONG_S or programs < 4:
        size, seed, shared = dice.choice((2, 3, 4)), dice.randrange(1 << 30), dice.choice("01")
        kill = dice.random() < 0.75
        team = worker_pool(
            live, size, env={"HOROCLONE_SHARED_MEMORY": shared}, seed=seed, limit_s=5.0 if kill else 0.3
        )
        for rank in range(size):
            team.wait_for(rank, "running")
        killed: set[int] = set()
        if kill:
            time.sleep(dice.random() * 0.2)
            killed = {dice.randrange(size)}
            for victim in killed:
                team.send(victim, signal.SIGKILL)
        codes = team.wait()
        said = f"seed {SEED}: program {programs}, seed {seed}, {size} ranks, shared memory {shared}, killed {killed}"
        assert [codes[rank] for rank in range(size) if rank not in killed] == [0] * (size - len(killed)), (
            said,
            team.outputs(),
        )
        histories = histories_of(team)
        found = check.violations(histories, killed)
        assert not found, (said, found[:10])
        programs, kills = programs + 1, kills + len(killed)
        operations += sum(event.end is not None for history in histories for event in history)
    print(f"{programs} programs, {kills} kills, {operations} operations")
    assert kills > 0 and operations > 100


def test_the_checker_sees_what_is_wrong() -> None:
    def events(*ends: str | None, **more: Any) -> list[Any]:
        lines = []
        for number, end in enumerate(ends):
            lines.append(check.Event(number, "sum"))
            if end is not None:
                lines.append(check.Event(number, "sum", end, **more))
        return lines

    def found(*histories: list[Any], killed: set[int] | None = None) -> list[str]:
        return check.violations(histories, killed or set())

    assert found(events("done", "done"), events("done", "done")) == []
    assert found(events("done", "PeerLost", lost=1), events("done", None), killed={1}) == []
    assert "never ended" in found(events("done", None), events("done", "done"))[0]
    assert "unknown to rank 1" in " ".join(found(events("done", "done"), events("done")))
    assert "not killed" in found(events("PeerLost", lost=1), events("PeerLost", lost=0))[0]
    assert "wrong result" in found(events("done", right=False), events("done"))[0]
    assert "nobody planted" in found(events("Mismatch"), events("Mismatch"))[0]
    assert found(events("Mismatch", planted=True), events("Mismatch", planted=True)) == []
    assert "disagreed" in found(events("done", planted=True), events("Mismatch", planted=True))[0]
    assert "ended with Timeout" in found(events("Timeout"), events("Timeout"))[0]
    assert "is done after" in found(events("PeerLost", "done", lost=1), events(), killed={1})[0]
    other = [check.Event(0, "max"), check.Event(0, "max", "done")]
    assert "not the same" in found(events("done"), other)[0]
