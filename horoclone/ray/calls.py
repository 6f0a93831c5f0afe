"""Calls of all workers of a job of a fixed size: values, or the failure that was first, with rank, node and cause.

Thread: the caller's; watch() has one of its own for each call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
import ray.exceptions

from horoclone import errors
from horoclone.bootstrap.rendezvous import Server
from horoclone.ray.worker import Where

OTHERS_S = 5.0  # of waiting for the others when one has failed: perhaps theirs was the first failure
_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ActorUnschedulableError,
)


class Calls:
    """places: of the workers by rank. server: hears which ranks are lost, for those who wait for them in init()."""

    def __init__(self, places: Sequence[Where], server: Server) -> None:
        self._places, self._server = places, server
        self.failure = ""  # why the workers cannot be used any more
        self._unfinished: list[Any] = []  # calls that went on when another one of the same run had failed
        self._why_unfinished = ""

    def check(self) -> None:
        """RuntimeError when they cannot."""
        if self._unfinished and not self.failure:
            _, waiting = ray.wait(self._unfinished, num_returns=len(self._unfinished), timeout=OTHERS_S)
            self.failure = self._why_unfinished if waiting else ""
            self._unfinished = waiting
        if self.failure:
            raise RuntimeError(f"{self.failure}: call shutdown() and start() before another run")

    def results(self, refs: Sequence[Any]) -> list[Any]:
        """The values by rank. Raises what a worker has raised, or PeerLost."""
        waiting = {ref: rank for rank, ref in enumerate(refs)}
        values: dict[int, Any] = {}
        failed: dict[int, BaseException] = {}
        deadline: float | None = None
        while waiting:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(waiting), timeout=left_s)
            if not done:
                break
            for ref in done:
                rank = waiting.pop(ref)
                try:
                    values[rank] = self._value(rank, ref)
                except Exception as error:
                    failed[rank] = error
            if failed and (deadline is None or self._is_clear(failed)):
                deadline = time.monotonic() + (0.0 if self._is_clear(failed) else OTHERS_S)
        if failed:
            self._unfinished = list(waiting)
            raise self._first(failed, list(waiting.values()))
        return [values[rank] for rank in range(len(refs))]

    def watch(self, refs: Sequence[Any]) -> None:
        """For a caller who asks for the values itself: those who wait for a lost rank are told all the same."""

        def look() -> None:
            waiting = {ref: rank for rank, ref in enumerate(refs)}
            while waiting:
                done, _ = ray.wait(list(waiting))
                for ref in done:
                    with contextlib.suppress(Exception):  # the caller hears of it
                        self._value(waiting.pop(ref), ref)

        threading.Thread(target=look, name="hc-ray-watch", daemon=True).start()

    def _value(self, rank: int, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except _LOST as error:
            self.failure = self._lost_text(rank, error)
            self._server.rank_ended(rank, self.failure)
            raise

    def _lost_text(self, rank: int, error: BaseException | None) -> str:
        cause = " ".join(str(error).split()) if error is not None else "its connections ended"
        return f"rank {rank} on {self._places[rank]} was lost: {cause}"

    @staticmethod
    def _is_clear(failed: dict[int, BaseException]) -> bool:
        """Whether one of these is a cause, and not what others notice of it."""
        return any(not isinstance(error, errors.PeerLost) for error in failed.values())

    def _first(self, failed: dict[int, BaseException], unfinished: list[int]) -> BaseException:
        lost = {rank: error for rank, error in failed.items() if isinstance(error, _LOST)}
        if lost:
            rank = min(lost)
            return _from(errors.PeerLost(self._lost_text(rank, lost[rank]), rank), lost[rank])
        rank, error = next(
            (one for one in failed.items() if not isinstance(one[1], errors.PeerLost)),
            next(iter(failed.items())),
        )
        culprit = getattr(error, "rank", -1) if isinstance(error, errors.PeerLost) else -1
        if culprit in unfinished:  # Ray has not noticed it yet
            self.failure = self._lost_text(culprit, None)
            return _from(errors.PeerLost(self.failure, culprit), error)
        if unfinished:
            self._why_unfinished = f"rank {rank} has failed while ranks {unfinished} wait"
        if hasattr(error, "add_note"):
            error.add_note(f"raised by rank {rank} on {self._places[rank]}")
        return error


def _from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error
