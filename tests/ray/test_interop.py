"""Ray Train, Ray Tune, a Ray Client, and a driver or a client that dies, on a real cluster."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.long(60)]
BODIES, HAS_CLIENT = "interop_jobs.py", True
HERE = Path(__file__).parent
OF_CLIENTS = re.compile("BaseHorovodWorker|Adapter|Told|_QueueActor|mode=specific-server")


@pytest.mark.parametrize("strategy", ["PACK", "STRICT_SPREAD"])
def test_workers_of_ray_train_find_their_places(strategy: str, ray_cluster: Any, tmp_path: Path) -> None:
    assert ray_cluster("train_on", strategy=strategy, folder=str(tmp_path)) == [
        [0, 2, 3.0, 1, True],
        [1, 2, 3.0, 1, True],
    ]


def test_ray_train_starts_all_workers_anew_on_horoclone_when_one_is_killed(
    ray_cluster: Any, tmp_path: Path
) -> None:
    found = ray_cluster("train_with_a_loss", folder=str(tmp_path))
    model = "DistributedDataParallel", "horoclone"
    assert found["said"] == [
        ["loses", 1],
        *(["starts", rank, *model] for rank in (0, 0, 1, 1)),
    ]
    assert found["total"] == 3


@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_ray_train_replaces_a_lost_worker_and_the_others_stay(
    what: str, ray_cluster: Any, tmp_path: Path
) -> None:
    found = ray_cluster("train_with_survivors", 240, folder=str(tmp_path), what=what)
    starts, ends = found["starts"], found["ends"]
    assert found["error"] is None
    assert [rank for rank, _ in starts] == [0, 0, 1, 2] and [rank for rank, _ in ends] == [0, 1, 2]
    assert ends[1:] == starts[2:], "survivors do not stay in their processes"
    assert ends[0] in starts[:2]


def test_the_others_finish_before_a_lost_workers_replacement_is_in(ray_cluster: Any, tmp_path: Path) -> None:
    found = ray_cluster("train_with_survivors", 240, folder=str(tmp_path), what="killed", min_workers=2)
    assert found["error"] is None
    assert [rank for rank, _ in found["comes"]] == [0, 0, 1, 2]
    assert [rank for rank, _ in found["starts"]] == [0, 1, 2] and found["ends"] == found["starts"][1:]


@pytest.mark.parametrize("what", ["raises", "raises first"])
def test_what_a_worker_had_still_to_do_is_not_lost_in_silence(
    what: str, ray_cluster: Any, tmp_path: Path
) -> None:
    found = ray_cluster("train_with_survivors", 240, folder=str(tmp_path), what=what, max_failures=-1)
    assert (
        "rank 0 had not finished when others had: it failed: ValueError: the model cannot" in found["error"]
    )
    assert [rank for rank, _ in found["ends"]] == [1, 2]


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
    driver.wait_for("and no more", 90)
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


def test_jobs_end_with_their_ray_client(ray_cluster: Any, engines: Path, launch: Any) -> None:
    """Killed, it cannot say so, and Ray waits 30 s for it to come back; its jobs end earlier, and nothing stays."""
    before = ray_cluster("living")
    client, pids = client_at_work(ray_cluster, engines, launch)
    time.sleep(9)  # more than a client may be silent
    assert all(map(is_alive, pids)), "a job has ended while its client lives"
    os.kill(client.process.pid, signal.SIGKILL)
    began = time.monotonic()
    while any(map(is_alive, pids)):
        assert time.monotonic() - began < 10, "workers outlive their Ray Client"
        time.sleep(0.05)
    print(f"workers have ended after {time.monotonic() - began:.2f} s")
    assert ray_cluster("left_of_jobs", limit_s=2) == []
    print(f"actors and placement groups of the jobs after {time.monotonic() - began:.2f} s")
    # What the client itself has made ends with Ray's part of it, whose process stays for another 30 s.
    ray_cluster("nothing_is_left", limit_s=60, but=before)
    print(f"all actors and placement groups after {time.monotonic() - began:.2f} s")
    while names := [name for name in map(name_of, ray_cluster.processes()) if OF_CLIENTS.search(name)]:
        assert time.monotonic() - began < 120, names
        time.sleep(0.2)
    print(f"all processes after {time.monotonic() - began:.2f} s")


def test_a_ray_client_that_was_silent_for_too_long_hears_why_its_jobs_have_ended(
    ray_cluster: Any, engines: Path, launch: Any
) -> None:
    before = ray_cluster("living")
    client, pids = client_at_work(ray_cluster, engines, launch)
    os.kill(client.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    while any(map(is_alive, pids)):
        assert time.monotonic() - began < 10
        time.sleep(0.05)
    os.kill(client.process.pid, signal.SIGCONT)
    for kind in ("static", "elastic"):  # the third may have heard of the client again
        client.wait_for(f"{kind} raised RuntimeError: this Ray Client could not be heard for ")
    client.wait_for("and set RAY_CLIENT_RECONNECT_GRACE_PERIOD before ray.init() to more than the 7 s")
    client.process.stdin.write(b"\n")
    client.process.stdin.flush()
    client.wait_for("shut down")
    client.process.stdin.close()
    assert client.process.wait(30) == 0
    ray_cluster("nothing_is_left", limit_s=20, but=before)


def client_at_work(ray_cluster: Any, engines: Path, launch: Any) -> tuple[Any, list[int]]:
    """A client with two jobs, and the pids of their four workers."""
    port = ray_cluster.env["CLUSTER_CLIENT_PORT"]
    command = [engines, HERE / "client_that_dies.py", f"ray://127.0.0.1:{port}"]
    client = launch.start(command, env=own(ray_cluster), stdin=subprocess.PIPE)
    client.wait_for("and no more", 120)
    found = re.search(r"PIDS (\d+) (\d+) (\d+) (\d+)", client.stdout)
    assert found is not None
    return client, [int(pid) for pid in found.groups()]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def own(ray_cluster: Any) -> dict[str, str]:
    return {name: value for name, value in ray_cluster.env.items() if name.startswith("RAY_")}
