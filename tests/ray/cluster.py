"""A real Ray cluster of two logical nodes for a file of tests, in a process of .venv/engines that runs the bodies of tests.

Run as a program, this file is that process: it starts the cluster, then calls the function that each line of its input
names, with its arguments as JSON, and answers with the value, or with the traceback. Imported, it is the test's side.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CPUS = 2  # of each of the two nodes
ANSWER = "@answer "
MARK = "HOROCLONE_TEST_RUN"  # as in tests/conftest.py
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing leaves this machine
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "HOROCLONE_SELECTION": "fixed",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


# --- in the process with Ray


class Here:
    """What bodies use: `from __main__ import here`."""

    cluster: Any = None


here = Here()


@contextlib.contextmanager
def another_node(cpus: int = CPUS, **more: Any) -> Iterator[Any]:
    """A third node, for as long as the body needs it; it may have been removed meanwhile."""
    node = here.cluster.add_node(num_cpus=cpus, **more)
    try:
        yield node
    finally:
        if node in here.cluster.worker_nodes:
            here.cluster.remove_node(node)


def wait_until(true: Any, what: str, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s"
        time.sleep(0.05)


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0))


def wait_until_all_is_free() -> None:
    """What a body has left is gone, and may not count as the next one's."""
    import ray

    wait_until(lambda: free_cpus() == ray.cluster_resources().get("CPU"), "all resources free", 90)


def serve(path: str) -> None:
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    sys.modules["cluster"] = sys.modules["__main__"]
    head = {"num_cpus": CPUS, "include_dashboard": False}
    if "CLUSTER_CLIENT_PORT" in os.environ:
        head["ray_client_server_port"] = int(os.environ["CLUSTER_CLIENT_PORT"])
    here.cluster = Cluster(initialize_head=True, head_node_args=head)
    here.cluster.add_node(num_cpus=CPUS)
    ray.init(address=here.cluster.address, logging_level="WARNING")
    spec = importlib.util.spec_from_file_location("bodies", path)
    assert spec is not None and spec.loader is not None
    bodies = sys.modules["bodies"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bodies)
    cloudpickle.register_pickle_by_value(bodies)  # workers cannot import it
    print(f"{ANSWER}{json.dumps({'value': here.cluster.address, 'number': 0})}", flush=True)
    for line in sys.stdin:
        number, name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(bodies, name)(**arguments)}
            wait_until_all_is_free()
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(f"{ANSWER}{json.dumps({**answer, 'number': number})}", flush=True)
    ray.shutdown()
    here.cluster.shutdown()


# --- in the test


class Remote:
    """The process with the cluster. address: of the cluster, for other drivers."""

    def __init__(self, python: Path, bodies: Path, env: Mapping[str, str], client: bool = False) -> None:
        self.folder = tempfile.mkdtemp(prefix="hc-ray-", dir="/tmp")
        self.mark = uuid.uuid4().hex
        self.env = {**env, **SETTINGS, MARK: self.mark, "RAY_TMPDIR": self.folder}
        Path(self.folder, "ray").mkdir()
        if client:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.env["CLUSTER_CLIENT_PORT"] = str(probe.getsockname()[1])
        self._log = Path(self.folder) / "said"
        self._process = subprocess.Popen(
            [str(python), __file__, str(bodies)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log.open("w"), env=self.env, text=True, start_new_session=True
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: list[str] = []
        self._number = 0  # of the last question
        threading.Thread(target=self._read, daemon=True).start()
        self.address = str(self._answer(120))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._lines.put(line[len(ANSWER) :])
            else:
                self._said.append(line)
        self._lines.put("")

    def _answer(self, timeout_s: float) -> Any:
        deadline, answer = time.monotonic() + timeout_s, {}
        while answer.get("number") != self._number:  # one that came too late is nobody's
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                answer = {"error": f"no answer within {timeout_s} s"}
                break
            answer = json.loads(line or '{"error": "the process with the cluster has ended"}')
            if not line:
                break
        if "error" in answer:
            said = "".join(self._said[-60:]) + self._log.read_text()[-6000:]
            raise AssertionError(f"{answer['error']}\n--- it has said\n{said}")
        return answer["value"]

    def __call__(self, body: str, timeout_s: float = 150, **arguments: Any) -> Any:
        """The value of a body, which runs where the cluster is. AssertionError with its traceback."""
        assert self._process.stdin is not None
        self._number += 1
        self._process.stdin.write(json.dumps([self._number, body, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer(timeout_s)

    @property
    def said(self) -> str:
        return "".join(self._said) + self._log.read_text()

    def processes(self) -> list[int]:
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state not in "ZX" else []
        return found

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
