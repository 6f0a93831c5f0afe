"""The manifests against the real schemas, in the environment that has them (.venv/engines)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from world import ran

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*/*.yaml"))


def check(python: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    program = Path(__file__).with_name("schemas.py")
    done = ran(str(python), str(program), *map(str, paths), timeout=150)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f".venv/engines lacks a package: {done.stderr.strip().splitlines()[-1]}")
    return done


def test_every_manifest_is_valid(engines: Path) -> None:
    done = check(engines, *MANIFESTS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    kinds = {words[2] for words in lines}
    assert all(words[-1] == "valid" for words in lines)
    assert kinds == {
        "Service", "Job", "StatefulSet", "PodDisruptionBudget", "JobSet", "TrainingRuntime", "TrainJob",
        "MPIJob"
    }  # fmt: skip


WRONG = (
    ("indexed-job", "completions: 4", "completions: four"),
    ("indexed-job", "parallelism:", "paralelism:"),
    ("statefulset", "serviceName: train", "serviceNames: train"),
    ("parameter-server", "maxUnavailable: 1", "maxUnavailable: [1]"),
    ("jobset", "maxRestarts: 3", "maxRestarts: often"),
    ("jobset", "enableDNSHostnames", "enableDnsHostnames"),
    ("trainjob", "numNodes: 2\n    torch", "numNodes: two\n    torch"),
    ("trainjob", "resourcesPerNode", "resourcePerNode"),
    ("mpijob", "slotsPerWorker: 1", "slotsPerWorker: one"),
    ("mpijob", "cleanPodPolicy: Running", "cleanPodPolicy: Sometimes"),
    ("mpijob", "sshAuthMountPath: /home/train/.ssh", "waitForWorkers: true"),
    ("mpijob", "replicas: 1\n      restartPolicy: OnFailure", "replicas: 1\n      restartPolicy: Sometimes"),
    ("mpijob", "terminationGracePeriodSeconds", "gracePeriodSeconds"),
)


def test_what_is_wrong_in_a_manifest_is_found(engines: Path, tmp_path: Path) -> None:
    paths = []
    for number, (name, right, wrong) in enumerate(WRONG):
        (path,) = (ROOT / "deploy" / "kubernetes" / name).glob("*.yaml")
        assert right in path.read_text()
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(path.read_text().replace(right, wrong))
    said = check(engines, *paths).stdout.splitlines()
    bad = {line.split(".")[0] for line in said if not line.endswith(" valid")}
    assert bad == {str(number) for number in range(len(WRONG))}, said
