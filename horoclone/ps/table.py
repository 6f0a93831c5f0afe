"""A table on the servers, as one worker sees it, on NumPy arrays or on addresses (for a framework's binding)."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from typing import Any

import numpy as np

from horoclone import errors
from horoclone.arguments import given
from horoclone.ps import files
from horoclone.ps.numbers import check_name, float32_rows, int64_ids, real_number, whole_number
from horoclone.ps.optimizers import Optimizer, Sum
from horoclone.ps.worker import ALONE, ASSIGN, ONLY_NEW, PULL, PUSH, ROWS, Servers

INITIAL = {"zeros": 0, "uniform": 1, "normal": 2}  # hc_initial


class Table:
    """A table of float32 rows of `dim` numbers, by 64-bit id; an id needs no announcement.

    staleness: None, a pull gives what is there. 0, steps are rounds: a pull waits until every worker has pushed as
    often as this one, and what was pushed in a round becomes one step of the optimizer, with the mean of the workers'
    gradients (average=False: the sum). s >= 1: a pull waits until no worker is more than s steps behind this one.
    initial, spread: what an id has before its first push: "zeros", "uniform" in +-spread, "normal" with that deviation.

    Raises Mismatch when another worker has described the table differently, StateLost, and as Servers does.
    """

    def __init__(
        self,
        servers: Servers,
        name: str,
        dim: int,
        optimizer: Optimizer | None = None,
        *,
        staleness: int | None = None,
        average: bool = True,
        initial: str = "zeros",
        spread: float = 0.0,
        seed: int = 0,
        dense: bool = False,
    ) -> None:
        check_name("table", name)
        table = f"table {name!r}"
        if staleness is not None:
            staleness = whole_number(table, "staleness", staleness, 0, (1 << 31) - 1, "None, or ")
        if not isinstance(initial, str) or initial not in INITIAL:
            raise ValueError(f"{table}: initial={initial!r}; possible are {', '.join(INITIAL)}")
        for argument, value in (("average", average), ("dense", dense)):
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{table}: {argument}={given(value)}; True or False is possible")
        if not isinstance(optimizer, (Optimizer, type(None))):
            raise TypeError(f"{table}: optimizer={given(optimizer)}; SGD(...) or another of this package")
        dim = whole_number(table, "dim", dim, 1, 1 << 20)
        seed = whole_number(table, "seed", seed, 0, (1 << 64) - 1)
        spread = real_number(table, "spread", spread)
        self.servers, self.name, self.dim = servers, name, dim
        self.staleness = staleness
        self.spec: dict[str, Any] = {
            "name": name,
            "dim": dim,
            **(optimizer or Sum()).native(),
            "dense": dense,
            "initial": INITIAL[initial],
            "spread": spread,
            "seed": seed,
            "workers": servers.workers,
            "staleness": -1 if staleness is None else staleness,
            "average": average,
        }
        self._start = servers.make_table(self.spec)
        self.steps = 0  # that this worker has pushed

    def _clocks(self) -> list[int]:
        return [start + self.steps for start in self._start]

    # --- on addresses: ids are int64, rows float32, contiguous, and live for the call ---

    def pull_into(
        self, ids: int, n: int, out: int, *, alone: bool = False, by: Servers | None = None
    ) -> None:
        """Pulls the rows of n ids into memory at an address. alone: does not wait for anybody. by: over these
        connections, from another thread."""
        (by or self.servers).rows(
            PULL,
            self.name,
            ids,
            n,
            self.dim,
            data_out=out,
            flags=ALONE if alone else 0,
            clocks=self._clocks(),
        )

    def push_from(self, ids: int, n: int, gradients: int) -> None:
        """Pushes the gradients of n ids, one step of this worker. They are in both copies when it returns."""
        self.servers.rows(PUSH, self.name, ids, n, self.dim, data_in=gradients, clocks=self._clocks())
        self.steps += 1

    def assign_from(self, ids: int, n: int, rows: int, *, only_new: bool = False) -> None:
        """Sets the weights of n ids. only_new: of those that were never pushed or assigned."""
        flags = ONLY_NEW if only_new else 0
        self.servers.rows(ASSIGN, self.name, ids, n, self.dim, data_in=rows, flags=flags)

    # --- on arrays ---

    def pull(self, ids: Any) -> np.ndarray[Any, Any]:
        """Returns the rows of these ids as float32 of shape (len(ids), dim). Timeout: a worker that staleness waits for
        has not come; it is named."""
        ids = self._ids(ids)
        out = np.empty((len(ids), self.dim), np.float32)
        self.pull_into(ids.ctypes.data, len(ids), out.ctypes.data)
        return out

    def push(self, ids: Any, gradients: Any) -> None:
        """Pushes gradients of these ids, which is one step of this worker. gradients: (len(ids), dim); those of an id
        that comes twice are added up.

        ids are integers, and gradients real numbers, of which the nearest float32 is taken. TypeError or ValueError for
        what would become another number: a float as an id, an integer beyond int64, a complex number, an integer that
        float32 cannot hold, a finite number that it makes infinite."""
        ids = self._ids(ids)
        gradients = self._rows("gradients", ids, gradients)
        self.push_from(ids.ctypes.data, len(ids), gradients.ctypes.data)

    def assign(self, ids: Any, rows: Any, *, only_new: bool = False) -> None:
        """Sets the weights of these ids, float32 of shape (len(ids), dim). What is refused: see push()."""
        ids = self._ids(ids)
        rows = self._rows("rows", ids, rows)
        self.assign_from(ids.ctypes.data, len(ids), rows.ctypes.data, only_new=only_new)

    def _ids(self, ids: Any) -> np.ndarray[Any, Any]:
        return int64_ids(f"table {self.name!r}", ids)

    def _rows(self, argument: str, ids: np.ndarray[Any, Any], rows: Any) -> np.ndarray[Any, Any]:
        rows = float32_rows(f"table {self.name!r}", argument, rows)
        if rows.shape != (len(ids), self.dim):
            raise ValueError(
                f"table {self.name!r}: {argument} of shape {rows.shape} for {len(ids)} ids of {self.dim} numbers"
            )
        return rows

    # --- files ---

    def save(self, path: str | os.PathLike[str]) -> int:
        """Has every server write its rows, with the optimizer's state, into a directory or URL that all of them see;
        for one worker. The number of rows. Pushes that run meanwhile are in it or not, row by row."""
        path, number = os.fspath(path), secrets.token_hex(4)
        question = {"what": "save", "path": path, "spec": self.spec, "save": number}
        answers = self.servers.ask_primaries(question)
        rows = sum(answer["rows"] for answer in answers)
        files.write_manifest(
            path,
            {
                "spec": self.spec,
                "files": [name for answer in answers for name in answer["files"]],
                "rows": rows,
                "steps": max(answer["steps"] for answer in answers),
                "time": time.time(),
            },
        )
        if self.servers.has_register():
            saved = self.servers.register.get("saved") or {}
            self.servers.register.set("saved", {**saved, self.name: {"path": path, "time": time.time()}})
        return rows

    def load(self, path: str | os.PathLike[str]) -> int:
        """Sets the rows that save() wrote, whatever number of servers there was, and returns their number; for one
        worker.

        Mismatch where the save is of another width or optimizer, HorovodInternalError for one that is not as it was
        written; both leave the table as it is."""
        path = os.fspath(path)
        manifest = files.read_manifest(path, self.name)
        for what in ("dim", "rule", "beta1" if self.spec["rule"] == 1 else "rule"):
            if manifest["spec"][what] != self.spec[what]:
                raise errors.Mismatch(
                    f"table {self.name!r}: {path} has {what} {manifest['spec'][what]}, and the table {self.spec[what]}"
                )
        steps = [manifest["steps"]] * self.servers.layout.partitions
        for ids, rows in files.read_rows(path, manifest):
            for start in range(0, len(ids), chunk := max(1, files.CHUNK_BYTES // (4 * rows.shape[1]))):
                some, values = ids[start : start + chunk], rows[start : start + chunk]
                self.servers.rows(
                    ROWS,
                    self.name,
                    some.ctypes.data,
                    len(some),
                    rows.shape[1],
                    data_in=values.ctypes.data,
                    clocks=steps,
                )
        return int(manifest["rows"])


def seed_of(name: str) -> int:
    """The same in every worker."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
