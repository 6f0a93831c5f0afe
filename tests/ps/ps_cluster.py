"""Servers of a parameter server as processes, with the register in this one; they are killed as the kernel kills."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horoclone.ps import Servers
from horoclone.ps.register import serve_store

SILENCE_S = 3.0


class Cluster:
    """N servers. environ: for workers in other processes. register: the address of one that runs elsewhere. start:
    the servers that are started at once; None: all. silence_s: for tests in which servers stand still for longer."""

    def __init__(
        self,
        folder: Path,
        servers: int,
        *,
        replicas: int = 2,
        memory: str = "1g",
        host: str = "127.0.0.1",
        register: str = "",
        start: Sequence[int] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.folder, self.servers = folder, servers
        self.store = None if register else serve_store(0, new_s=0)
        self.address = register or f"{host}:{self.store.port}"
        self.environ = {**os.environ, "HOROCLONE_SECRET": secrets.token_hex(16)}
        self.secret_file = folder / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(self.environ["HOROCLONE_SECRET"])
        for name in ("RANK", "WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE"):
            self.environ.pop(name, None)
        self._options = [
            "--servers", servers, "--replicas", replicas, "--memory", memory, "--silence", silence_s
        ]  # fmt: skip
        self.processes: dict[int, subprocess.Popen[str]] = {}
        for index in range(servers) if start is None else start:
            self.start(index)

    def start(self, index: int) -> None:
        """A server, anew where it was killed. What it says goes to a file."""
        command = [
            sys.executable, "-m", "horoclone.ps", "--name", "test", "--store", self.address, "--index", index
        ]  # fmt: skip
        with open(self.log(index), "a") as log:
            self.processes[index] = subprocess.Popen(
                [str(part) for part in [*self.command_of(index), *command, *self._options]],
                env=self.environ,
                stdout=log,
                stderr=log,
                text=True,
            )

    def command_of(self, index: int) -> list[str]:
        """What starts a server somewhere else."""
        return []

    def log(self, index: int) -> Path:
        """Of all lives of a server."""
        return self.folder / f"server-{index}.log"

    def kill(self, index: int) -> None:
        """kill -9, and waits for the end."""
        self.processes[index].kill()
        self.processes[index].wait(10)

    def terminate(self, index: int) -> None:
        """SIGTERM, as an orchestrator does, and waits for the end."""
        self.processes[index].send_signal(signal.SIGTERM)
        self.processes[index].wait(30)

    def worker(self, rank: int = 0, workers: int = 1, **more: Any) -> Servers:
        """A worker in this process."""
        more = {"timeout_s": 60.0, "silence_s": SILENCE_S, **more}
        return Servers("test", self.address, rank=rank, workers=workers, environ=self.environ, **more)

    def wait_for_copies(self, servers: Servers, timeout_s: float = 60.0) -> None:
        """Until every partition has a primary and a backup."""
        deadline = time.monotonic() + timeout_s
        for partition in range(self.servers):
            servers.register.wait(
                f"view/{partition}",
                lambda view: view and view["backup"] is not None and self._lives(servers, view),
                deadline,
                f"no second copy of partition {partition}: {self.said()}",
            )

    def _lives(self, servers: Servers, view: dict[str, Any]) -> bool:
        places = {holder[0]: holder[1] for holder in (view["primary"], view["backup"])}
        return all(
            (servers.register.get(f"server/{index}") or {}).get("generation") == generation
            and self.processes[index].poll() is None
            for index, generation in places.items()
        )

    def said(self) -> str:
        """What the servers have written."""
        return "\n".join(self.log(index).read_text()[-2000:] for index in self.processes)

    def close(self) -> None:
        """Nothing is left."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
