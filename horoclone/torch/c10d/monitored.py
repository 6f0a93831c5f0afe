"""The monitored barrier of a process group: rank 0 names the ranks that did not come.

It uses the store alone, so it also works when the transports do not. Its texts are those of torch's gloo backend,
because programs look for them.
"""

from __future__ import annotations

import time
from typing import Any

from horoclone.errors import Timeout
from horoclone.torch.c10d.lost import Look, wait_for_key

ANSWER_S = 5.0  # what rank 0 may need for its answer after the time limit, on a busy machine


def monitored_barrier(
    store: Any, prefix: str, rank: int, size: int, limit_s: float, wait_all_ranks: bool, look: Look
) -> None:
    """Returns when every rank has called it. prefix: of the keys, new for each barrier. limit_s: seconds, 0 or more.
    look: raises PeerLost when a member is lost.

    Timeout on rank 0 with the first rank that did not come in time (all of them with wait_all_ranks), or with its own
    number when the time was over before it could look; then also on every rank that has come.
    """
    if rank == 0:
        fault = _fault_of(store, prefix, size, limit_s, wait_all_ranks, look)
        store.set(f"{prefix}/verdict", fault.encode())
        if fault:
            raise Timeout(f"[Rank 0]: {fault}")
        return
    store.set(f"{prefix}/{rank}", b"here")
    answered = wait_for_key(store, f"{prefix}/verdict", time.monotonic() + limit_s + ANSWER_S, look)
    fault = bytes(store.get(f"{prefix}/verdict")).decode() if answered else "rank 0 did not answer"
    if fault:
        raise Timeout(
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
            f"send/recv from rank 0. Please check rank 0 logs for faulty rank. ({fault})"
        )


def _fault_of(store: Any, prefix: str, size: int, limit_s: float, wait_all_ranks: bool, look: Look) -> str:
    """Empty when everybody came."""
    deadline = time.monotonic() + limit_s
    came: list[int] = []
    missing: list[int] = []
    for other in range(1, size):
        left = deadline - time.monotonic()
        if left <= 0 and not wait_all_ranks:
            so_far = (
                f"Successfully processed ranks: {_words(came)}" if came else "No ranks successfully processed"
            )
            return f"Rank 0 timed out in monitoredBarrier after {limit_s * 1000:.0f} ms. {so_far}."
        if wait_for_key(store, f"{prefix}/{other}", deadline, look):
            came.append(other)
        else:
            missing.append(other)
            if not wait_all_ranks:
                break
    if not missing:
        return ""
    who = "Rank" if len(missing) == 1 else "Ranks"
    return f"{who} {_words(missing)} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms"


def _words(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
