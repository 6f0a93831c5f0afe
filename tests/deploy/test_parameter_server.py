"""The manifest of a parameter server: its pods as processes, evicted, killed and started again under a worker (conftest.py)."""

from __future__ import annotations

import copy
import re
import time
from pathlib import Path
from typing import Any

import pytest
from world import until

pytest.importorskip("torch", reason="PyTorch is not installed: it brings the register")
yaml = pytest.importorskip("yaml")

MANIFEST = (
    Path(__file__).resolve().parents[2].joinpath("deploy/kubernetes/parameter-server/parameter-server.yaml")
)
INDEX = "apps.kubernetes.io/pod-index"

# Pushes ones, counts what was acknowledged, and compares when it is told to end.
WORKER = """
import signal, threading
import numpy as np
from horoclone.ps import Servers, Sum, Table
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: over.set())
servers = Servers("ads", "ads-register:29400", secret_file="/run/secrets/horoclone/secret", silence_s=3.0)
table = Table(servers, "counted", 4, Sum())
random, expected, pushes = np.random.default_rng(3), np.zeros(1000), 0
while not over.is_set():
    ids = np.unique(random.integers(0, 1000, 100))
    table.push(ids, np.ones((len(ids), 4)))
    expected[ids] += 1
    pushes += 1
    if pushes % 50 == 0:
        print("pushes", pushes, flush=True)
print("exact", bool((table.pull(np.arange(1000)) == expected[:, None]).all()), flush=True)
"""

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300), pytest.mark.long(90)]


def sets() -> dict[str, dict[str, Any]]:
    """The StatefulSets, by name."""
    found = yaml.safe_load_all(MANIFEST.read_text())
    return {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "StatefulSet"}


def pushes(worker: Any) -> int:
    return max(map(int, re.findall(r"pushes (\d+)", worker.output)), default=0)


def wait_for_more(worker: Any, timeout_s: float = 90) -> None:
    before, deadline = pushes(worker), time.monotonic() + timeout_s
    while pushes(worker) <= before:
        assert worker.process.poll() is None, worker.cluster.outputs()
        assert time.monotonic() < deadline, worker.cluster.outputs()
        time.sleep(0.05)


def wait_until_ready(pod: Any, timeout_s: float = 90) -> None:
    until(pod.is_ready, timeout_s, pod.cluster.outputs)


def test_servers_are_evicted_and_killed_and_the_register_forgets_and_every_push_is_there(
    cluster: Any,
) -> None:
    of_register, of_servers = sets()["ads-register"], sets()["ads"]
    template, service = of_servers["template"]["spec"], of_servers["serviceName"]

    def start(index: int) -> Any:
        return cluster.start(f"ads-{index}", template, service, {INDEX: str(index)})

    register = cluster.start("ads-register-0", of_register["template"]["spec"], of_register["serviceName"])
    register.wait_for("register at port 29400")
    servers = [start(index) for index in range(of_servers["replicas"])]
    for pod in servers:
        wait_until_ready(pod)
    of_worker = copy.deepcopy(template)
    of_worker["containers"][0].update(command=["python", "-c", WORKER], args=[])
    worker = cluster.start("worker-0", of_worker, "worker", {INDEX: "0"})
    wait_for_more(worker)

    assert servers[1].terminate() == 0, cluster.outputs()  # evicted
    cluster.remove(servers[1])
    wait_for_more(worker)
    servers[1] = start(1)
    assert not servers[1].is_ready()
    wait_until_ready(servers[1])

    servers[0].kill()  # its container ends, and is started again in the same pod
    wait_for_more(worker)
    servers[0].restart()
    wait_until_ready(servers[0])

    register.kill()
    register.restart()
    servers[1].kill()
    servers[1].restart()  # together with a register that knows nothing
    wait_until_ready(servers[1])
    wait_for_more(worker)

    assert worker.terminate() == 0, cluster.outputs()
    assert re.search(r"^exact True$", worker.output, re.MULTILINE), cluster.outputs()
    assert [pod.terminate() for pod in servers] == [0, 0], cluster.outputs()
