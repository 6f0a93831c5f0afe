"""Ray Train, Ray Tune, a Ray Client, and a driver that dies, on a real cluster."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.guards(
        "horoclone/ray",
        "horoclone/bootstrap/detect.py",
        "horoclone/bootstrap/exchange.py",
        "tests/ray/cluster.py",
        "tests/ray/interop_jobs.py",
        "tests/ray/client.py",
        "tests/ray/driver.py",
        packages=("ray",),
    ),
    pytest.mark.timeout(300),
]
BODIES, HAS_CLIENT = "interop_jobs.py", True
HERE = Path(__file__).parent


@pytest.mark.parametrize("strategy", ["PACK", "STRICT_SPREAD"])
def test_workers_of_ray_train_find_their_places(strategy: str, ray_cluster: Any, tmp_path: Path) -> None:
    assert ray_cluster("train_on", strategy=strategy, folder=str(tmp_path)) == [
        [0, 2, 3.0, 1, True],
        [1, 2, 3.0, 1, True],
    ]


def test_trials_of_ray_tune_run_side_by_side_with_different_sizes(ray_cluster: Any, tmp_path: Path) -> None:
    assert ray_cluster("tune_sizes", folder=str(tmp_path)) == [[1, 1.0, 1], [2, 3.0, 1]]


def test_a_ray_client_drives_jobs_from_outside(ray_cluster: Any, engines: Path, launch: Any) -> None:
    port = ray_cluster.env["CLUSTER_CLIENT_PORT"]
    done = launch([engines, HERE / "client.py", f"ray://127.0.0.1:{port}"], env=own(ray_cluster))
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert said["static"] == "[(0, 2, 3.0), (1, 2, 3.0)] [{'total': 3.0}]", done.output
    assert said["remote"] == "[(0, 2, 5.0), (1, 2, 5.0)]" and said["raised"] == "True", done.output
    assert said["elastic"] == "[(0, 2, 7.0), (1, 2, 7.0)]", done.output
    assert said["older"] == "[(0, 2, 9.0), (1, 2, 9.0)] [{'total': 3.0}, {'total': 9.0}]", done.output


@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_workers_end_with_their_driver(kind: str, ray_cluster: Any, engines: Path, launch: Any) -> None:
    driver = launch.start([engines, HERE / "driver.py", ray_cluster.address, kind], env=own(ray_cluster))
    driver.wait_for("PIDS", 90)
    found = re.search(r"PIDS (\d+) (\d+)", driver.stdout + driver.stderr)
    assert found is not None
    pids = [int(pid) for pid in found.groups()]
    os.kill(driver.process.pid, signal.SIGKILL)
    began = time.monotonic()
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() - began < 10, "workers outlive their driver"
        time.sleep(0.05)
    print(f"workers have ended after {time.monotonic() - began:.2f} s")
    ray_cluster("all_is_free")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def own(ray_cluster: Any) -> dict[str, str]:
    return {name: value for name, value in ray_cluster.env.items() if name.startswith("RAY_")}
