"""A table on the servers, as one worker sees it, on NumPy arrays or on addresses (for a framework's binding)."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any

import numpy as np

from horoclone import errors
from horoclone.ps import files
from horoclone.ps.optimizers import Optimizer, Sum
from horoclone.ps.worker import ALONE, ASSIGN, ONLY_NEW, PULL, PUSH, ROWS, Servers

INITIAL = {"zeros": 0, "uniform": 1, "normal": 2}  # hc_initial


class Table:
    """Float32 rows of `dim` numbers by 64-bit id; an id needs no announcement.

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
        if staleness is not None and (not isinstance(staleness, int) or staleness < 0):
            raise ValueError(
                f"table {name!r}: staleness={staleness!r}; None, 0 or a larger whole number is possible"
            )
        if initial not in INITIAL:
            raise ValueError(f"table {name!r}: initial={initial!r}; possible are {', '.join(INITIAL)}")
        if not 1 <= dim <= 1 << 20:
            raise ValueError(f"table {name!r}: dim={dim}; 1 to {1 << 20} is possible")
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
        """Rows of n ids. alone: does not wait for anybody. by: over these connections, from another thread."""
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
        """Gradients of n ids: one step of this worker. They are in both copies when it returns."""
        self.servers.rows(PUSH, self.name, ids, n, self.dim, data_in=gradients, clocks=self._clocks())
        self.steps += 1

    def assign_from(self, ids: int, n: int, rows: int, *, only_new: bool = False) -> None:
        """Sets the weights of n ids. only_new: of those that were never pushed or assigned."""
        flags = ONLY_NEW if only_new else 0
        self.servers.rows(ASSIGN, self.name, ids, n, self.dim, data_in=rows, flags=flags)

    # --- on arrays ---

    def pull(self, ids: Any) -> np.ndarray[Any, Any]:
        """float32 of shape (len(ids), dim). Timeout: a worker that staleness waits for has not come; it is named."""
        ids = _ids(ids)
        out = np.empty((len(ids), self.dim), np.float32)
        self.pull_into(ids.ctypes.data, len(ids), out.ctypes.data)
        return out

    def push(self, ids: Any, gradients: Any) -> None:
        """One step. gradients: (len(ids), dim); those of an id that comes twice are added up."""
        ids, gradients = _ids(ids), self._rows(ids, gradients)
        self.push_from(ids.ctypes.data, len(ids), gradients.ctypes.data)

    def assign(self, ids: Any, rows: Any, *, only_new: bool = False) -> None:
        """Sets weights, (len(ids), dim)."""
        ids, rows = _ids(ids), self._rows(ids, rows)
        self.assign_from(ids.ctypes.data, len(ids), rows.ctypes.data, only_new=only_new)

    def _rows(self, ids: Any, rows: Any) -> np.ndarray[Any, Any]:
        rows = np.ascontiguousarray(rows, np.float32)
        if rows.shape != (len(ids), self.dim):
            raise ValueError(
                f"table {self.name!r}: rows of shape {rows.shape} for {len(ids)} ids of {self.dim} numbers"
            )
        return rows

    # --- files ---

    def save(self, path: str) -> int:
        """Every server writes its rows, with the optimizer's state, into a directory or URL that all of them see; for
        one worker. The number of rows. Pushes that run meanwhile are in it or not, row by row."""
        number = secrets.token_hex(4)
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

    def load(self, path: str) -> int:
        """Sets the rows that save() wrote, whatever number of servers there was; for one worker. The number of rows.

        Mismatch where the save is of another width or optimizer."""
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


def _ids(ids: Any) -> np.ndarray[Any, Any]:
    ids = np.ascontiguousarray(ids, np.int64)
    if ids.ndim != 1:
        raise ValueError(f"ids of shape {ids.shape}; a list of them is needed")
    return ids


def seed_of(name: str) -> int:
    """The same in every worker."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
