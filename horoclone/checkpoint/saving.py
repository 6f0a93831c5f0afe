"""One save: what is copied while the caller waits, and what a thread does afterwards."""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horoclone import errors, failpoints
from horoclone.checkpoint import files
from horoclone.checkpoint.agreement import Ranks
from horoclone.checkpoint.failures import CheckpointError, WorldOver, failure_text
from horoclone.checkpoint.image import CopyMemory, Image, in_pages
from horoclone.checkpoint.tree import Flat, Leaf

NICE = 10  # of the thread that writes: on a core that training fills, it gets about a tenth


def shares(sizes: list[int], count: int) -> list[int]:
    """For each array the rank that writes it: large ones first, each to the rank that has least so far."""
    loads, owners = [(0, rank) for rank in range(count)], [0] * len(sizes)  # loads: a heap
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        load, owners[place] = loads[0]
        heapq.heapreplace(loads, (load + sizes[place], owners[place]))
    return owners


_copy_memory = CopyMemory()


def _listed(leaves: list[Leaf]) -> list[list[Any]]:
    return [[leaf.name, leaf.kind.name, leaf.form.dtype, list(leaf.form.shape)] for leaf in leaves]


class Save:
    """One save on this rank. The constructor copies what this rank writes; run() needs the state no more."""

    def __init__(self, path: Path, state: Any, keep: int, timeout_s: float, ranks: Ranks) -> None:
        self.path, self.keep, self.ranks = path, keep, ranks
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s
        self.place: Path | None = None  # of the complete save
        self.error: BaseException | None = None
        self.cannot: Exception | None = None  # why this rank has nothing to save; the others hear of it
        self._thread: threading.Thread | None = None
        self._is_given_up = False
        try:
            self._take(state)
        except Exception as error:
            self.cannot = error

    def _take(self, state: Any) -> None:
        flat = Flat(state)
        owners = shares([leaf.form.nbytes for leaf in flat.leaves], self.ranks.size)
        mine = [leaf for leaf, owner in zip(flat.leaves, owners, strict=True) if owner == self.ranks.rank]
        own = Flat([owned.value for owned in flat.owned], "Owned")
        if own.owned:
            raise ValueError("an Owned lies inside another Owned: what it holds is this rank's already.")
        image, own_image = Image(mine), Image(own.leaves)
        end = in_pages(image.nbytes)
        self._memory = _copy_memory.take(end + own_image.nbytes)
        self._image = image.filled(self._memory)
        self._own_image = own_image.filled(self._memory[end:])
        self._own = {"node": own.node, "arrays": _listed(own.leaves)}
        self._outline = hashlib.sha256(json.dumps(flat.outline()).encode()).hexdigest()
        self._content = {
            "node": flat.node,
            "arrays": [
                [*row, owner] for row, owner in zip(_listed(flat.leaves), owners, strict=True)
            ],
        }  # fmt: skip

    def start(self) -> None:
        """Goes on in a thread."""
        self._thread = threading.Thread(target=self._guarded, name="hc-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended or its deadline has passed; `error` says then what went wrong."""
        assert self._thread is not None
        self._thread.join(max(0.0, self.deadline - time.monotonic()) + 1.0)
        if self._thread.is_alive():
            self._is_given_up = True
            self.error = CheckpointError(
                f"rank {self.ranks.rank} still writes to {self.path} after {self.timeout_s:g} s; the save is given up. "
                "Look whether the file system answers, or give it longer with save(..., timeout_s=)."
            )

    def _guarded(self) -> None:
        try:
            # on Linux it is this thread's alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        except OSError:
            pass  # it writes as everybody else does
        try:
            self.run()
        except BaseException as error:
            self.error = self.error or error

    def run(self) -> None:
        """Writes the files, together with the other ranks. Every rank raises, or none, but where ranks are lost."""
        number, name = self._begin()
        try:
            self._run(number, self.path / name)
        finally:
            files.end(name)

    def _run(self, number: int, place: Path) -> None:
        report: dict[str, Any] = {}
        failpoints.reach("checkpoint.begun")
        problem = self._tried(f"write to {place}", lambda: report.update(self._written(place)))
        failpoints.reach("checkpoint.written")
        reports = self._agreed("written", {"problem": problem, **report}, place)
        problem = None
        if self.ranks.rank == 0:
            problem = self._tried(f"complete {place}", lambda: self._complete(place, number, reports))
        failpoints.reach("checkpoint.complete")
        self._agreed("complete", {"problem": problem}, place)
        self.place = files.place_of(self.path, number)
        if self.ranks.rank == 0:
            try:
                files.tidy(self.path, self.keep)
            except OSError:
                pass  # the save is complete; the next one tidies again

    def _begin(self) -> tuple[int, str]:
        begun: list[Any] = [0, ""]

        def begin() -> None:
            begun[:] = files.begin(self.path)

        problem = None
        if self.cannot is not None:
            problem = f"rank {self.ranks.rank} cannot save its state: {self.cannot}"
        elif self.ranks.rank == 0:
            problem = self._tried(f"make a directory in {self.path}", begin)
        outline = "" if self.cannot is not None else self._outline
        mine = {"problem": problem, "path": str(self.path), "outline": outline, "begun": begun}
        try:
            plans = self._agreed("begin", mine, None)
            _check_alike(plans)
        except BaseException as error:
            if begun[1] and isinstance(error, CheckpointError):
                files.remove(self.path / begun[1])  # nobody writes there
            files.end(str(begun[1]))
            raise
        first = plans[0]
        return int(first["begun"][0]), str(first["begun"][1])

    def _written(self, place: Path) -> dict[str, Any]:
        rank = self.ranks.rank
        report: dict[str, Any] = {"own": None}
        report["file"] = list(files.write_arrays(place / f"rank-{rank:05d}.safetensors", self._image))
        if self._own["node"]["list"]:
            name = f"rank-{rank:05d}.own.safetensors"
            written = files.write_arrays(place / name, self._own_image)
            report["own"] = {**self._own, "file": list(written)}
        del self._image, self._own_image
        _copy_memory.give(self._memory)
        self._go_on()
        return report

    def _go_on(self) -> None:
        """A save that wait() has given up is not to appear later."""
        if self._is_given_up:
            raise CheckpointError(f"rank {self.ranks.rank} gave up the save after {self.timeout_s:g} s.")

    def _complete(self, place: Path, number: int, reports: list[dict[str, Any]]) -> None:
        for rank, report in enumerate(reports):
            for one in [report["file"], *([report["own"]["file"]] if report["own"] else [])]:
                if not (place / one[0]).exists():
                    raise CheckpointError(
                        f"rank {rank} has written {place / one[0]}, which rank 0 does not see: the path must lie on "
                        "storage that all machines of the job share, and nobody may remove it meanwhile"
                    )
                files.check_file(place, files.Written(*one))
        content = {
            **self._content,
            "number": number,
            "files": [report["file"] for report in reports],
            "owned": [report["own"] for report in reports],
        }
        failpoints.reach("checkpoint.publish")
        files.write_manifest(place, content)
        self._go_on()
        files.publish(self.path, place.name, number)

    def _tried(self, doing: str, call: Callable[[], None]) -> str | None:
        try:
            call()
        except CheckpointError as error:
            return str(error)
        except (OSError, MemoryError) as error:
            return failure_text(self.ranks.rank, doing, error)
        except Exception as error:  # the others must hear of it, whatever it is
            return failure_text(self.ranks.rank, doing, error)
        return None

    def _agreed(self, what: str, mine: dict[str, Any], place: Path | None) -> list[dict[str, Any]]:
        """What every rank says; where one names a problem, all raise it."""
        said: list[dict[str, Any]] = self.ranks.gather(what, mine, self.deadline)
        problems = [one["problem"] for one in said if one["problem"]]
        if problems:
            if self.ranks.rank == 0 and place is not None:
                files.remove(place)  # nobody writes in it any more
            raise CheckpointError(f"nothing was saved to {self.path}: " + " ".join(problems))
        return said

    def ended_with_its_generation(self) -> bool:
        """Whether another generation has begun: what ended the one before has been told by other means."""
        has_a_successor = getattr(self.ranks, "has_a_successor", lambda: False)
        return isinstance(self.error, (errors.HorovodInternalError, WorldOver)) and has_a_successor()


def _check_alike(plans: list[dict[str, Any]]) -> None:
    first = plans[0]
    for rank, plan in enumerate(plans):
        if plan["path"] != first["path"]:
            raise CheckpointError(
                f"rank {rank} saves to {plan['path']} and rank 0 to {first['path']}: pass one path on all ranks."
            )
        if plan["outline"] != first["outline"]:
            raise CheckpointError(
                f"the state of rank {rank} differs from that of rank 0 in its keys, or in the dtypes or shapes of its "
                "arrays. Save the same on every rank, and wrap what only one rank has in hvd.checkpoint.Owned."
            )


class _Alone:
    """One process that saves without others, whatever job it is in."""

    rank, size = 0, 1

    def gather(self, what: str, mine: Any, deadline: float) -> list[Any]:
        return [mine]


def save_alone(path: Path, state: Any, keep: int) -> Path:
    """A save by this process alone; where it lies. Raises what the state or the disk is to blame for."""
    save = Save(path, state, keep, 3600.0, _Alone())
    if save.cannot is not None:
        raise save.cannot
    save.run()
    assert save.place is not None
    return save.place
