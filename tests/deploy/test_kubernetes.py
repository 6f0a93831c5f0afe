"""The manifests of deploy/kubernetes: their pods, as processes, train, are evicted, are scaled and fail (conftest.py)."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from world import ran, until

yaml = pytest.importorskip("yaml")

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
UID = "batch.kubernetes.io/controller-uid"
LONG = {"TRAIN_EPOCHS": "500", "TRAIN_PAUSE_S": "0.05"}
MIDDLE = {"TRAIN_EPOCHS": "24", "TRAIN_PAUSE_S": "0.05"}

pytestmark = [pytest.mark.netns, pytest.mark.long(60)]


def manifest(name: str) -> dict[str, dict[str, Any]]:
    (path,) = (KUBERNETES / name).glob("*.yaml")
    return {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}


class Job:
    """The Job controller: pods of an Indexed Job, and what it makes of their exit codes."""

    def __init__(
        self, cluster: Any, job: dict[str, Any], uid: str = "1", more: dict[str, str] | None = None
    ) -> None:
        self.cluster, self.name, self.spec, self.uid, self.more = (
            cluster,
            job["metadata"]["name"],
            job["spec"],
            uid,
            more,
        )
        self.template = self.spec["template"]["spec"]
        assert self.spec["completionMode"] == "Indexed"
        self.pods = [self.start(index) for index in range(self.spec["completions"])]

    def start(self, index: int) -> Any:
        labels = {UID: self.uid, "batch.kubernetes.io/job-name": self.name}
        return self.cluster.start(
            f"{self.name}-{index}", self.template, self.template["subdomain"], labels, self.more,
            JOB_COMPLETION_INDEX=str(index),
        )  # fmt: skip

    def counts(self, code: int) -> bool:
        """Whether a pod that ends with this code is a failure, by the manifest's own rules."""
        rules = [
            rule["onExitCodes"] for rule in self.spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
        ]
        ignored = {value for rule in rules if rule["operator"] == "In" for value in rule["values"]}
        return code != 0 and code not in ignored

    def replace(self, index: int) -> Any:
        """podReplacementPolicy Failed: a new pod of the same name and another address, when the old one has ended."""
        self.cluster.remove(self.pods[index])
        self.pods[index] = self.start(index)
        return self.pods[index]


def newest(pod: Any) -> tuple[int, int, int]:
    """Generation, rank and size that the pod has told last."""
    found = re.findall(r"generation (\d+): rank (\d+) of (\d+)", pod.output)
    return tuple(map(int, found[-1])) if found else (0, -1, 0)  # type: ignore[return-value]


def wait_for_size(pods: list[Any], size: int, after: int = 0, timeout_s: float = 90) -> int:
    """Until all these pods are in one generation of that size, newer than `after`; its number."""
    deadline = time.monotonic() + timeout_s
    while True:
        told = [newest(pod) for pod in pods]
        numbers = {number for number, _, found in told if found == size}
        if len(numbers) == 1 and all(found == size for _, _, found in told) and min(numbers) > after:
            return numbers.pop()
        if time.monotonic() > deadline or any(pod.process.poll() is not None for pod in pods):
            pytest.fail(f"no generation of {size}: {told}\n{pods[0].cluster.outputs()}")
        time.sleep(0.05)


def finish(pods: list[Any], timeout_s: float = 150) -> None:
    deadline = time.monotonic() + timeout_s
    for pod in pods:
        pod.wait_for(r"done: (9[5-9]|100)\.\d%", max(1.0, deadline - time.monotonic()))
        try:
            assert pod.process.wait(20) == 0, pod.cluster.outputs()
        except subprocess.TimeoutExpired:
            pytest.fail(pod.cluster.outputs())


def test_an_indexed_job_trains_and_goes_on_when_pods_are_evicted_and_lost(cluster: Any) -> None:
    job = Job(cluster, manifest("indexed-job")["Job"], more={**LONG, "TRAIN_EPOCHS": "24"})
    first = wait_for_size(job.pods, 4)
    assert [newest(pod)[1] for pod in job.pods] == [0, 1, 2, 3], "ranks follow the indexes"

    began = time.monotonic()
    code = job.pods[2].terminate()
    assert code == 75 and not job.counts(code), cluster.outputs()
    assert time.monotonic() - began < job.template["terminationGracePeriodSeconds"]
    others = [job.pods[0], job.pods[1], job.pods[3]]
    second = wait_for_size(others, 3, first)
    assert not any("lost" in pod.output for pod in others), "it left at a commit, and nothing was done again"
    job.replace(2)
    third = wait_for_size(job.pods, 4, second)

    job.pods[0].kill()  # the membership coordinator is there
    fourth = wait_for_size(job.pods[1:], 3, third)
    job.replace(0)
    wait_for_size(job.pods, 4, fourth)
    finish(job.pods)


def test_a_pod_that_leads_the_job_is_evicted_and_the_last_one_goes_on(cluster: Any) -> None:
    spec = copy.deepcopy(manifest("indexed-job")["Job"])
    spec["spec"].update(completions=2, parallelism=2)
    for one in spec["spec"]["template"]["spec"]["containers"][0]["env"]:
        one["value"] = {"HOROCLONE_SIZE": "2", "HOROCLONE_MIN_NP": "1"}.get(one["name"], one.get("value"))
        if one["value"] is None:
            del one["value"]
    job = Job(cluster, spec, more=MIDDLE)
    first = wait_for_size(job.pods, 2)
    assert job.pods[0].terminate() == 75
    wait_for_size([job.pods[1]], 1, first, 30)
    job.replace(0)
    wait_for_size(job.pods, 2, first)
    finish(job.pods)


def wait_for_the_shell(pod: Any, timeout_s: float = 30) -> None:
    """Until the training's process has ended and the container's shell keeps the pod."""
    until(lambda: "sleep" in pod.children(), timeout_s, pod.cluster.outputs)


def test_a_stateful_set_is_scaled_up_and_down_and_ends_with_success(cluster: Any) -> None:
    kinds = manifest("statefulset")
    spec = kinds["StatefulSet"]["spec"]
    template, service = spec["template"]["spec"], spec["serviceName"]
    assert service == kinds["Service"]["metadata"]["name"]

    def start(number: int) -> Any:
        return cluster.start(f"train-{number}", template, service, more={**LONG, "TRAIN_EPOCHS": "16"})

    pods = [start(number) for number in range(spec["replicas"])]
    size = wait_for_size(pods, 3)
    pods += [start(3), start(4)]  # kubectl scale --replicas=5
    size = wait_for_size(pods, 5, size)
    for number in (4, 3, 2):  # kubectl scale --replicas=2
        assert pods[number].terminate() == 75, cluster.outputs()
        cluster.remove(pods[number])
    wait_for_size(pods[:2], 2, size)
    for pod in pods[:2]:
        pod.wait_for(r"done: (9[5-9]|100)\.\d%", 150)
        wait_for_the_shell(pod)
    began = time.monotonic()
    assert [pod.terminate() for pod in pods[:2]] == [0, 0], cluster.outputs()  # kubectl delete
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("code", "ends_with"), [(0, 0), (75, 75)])
def test_a_pod_of_a_stateful_set_is_deleted_while_its_training_is_about_to_end(
    tmp_path: Path, needs_root: None, code: int, ends_with: int
) -> None:
    """The shell is the first process of its container: a SIGTERM that it has no trap for is lost. Here it comes before the
    training has ended, which hears of it and ends with this code."""
    (container,) = manifest("statefulset")["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    training = tmp_path / "python"
    training.write_text(f"#!/bin/sh\ntrap 'exit {code}' TERM; kill -TERM 1; sleep 20 & wait\n")
    training.chmod(0o755)
    done = ran("unshare", "--pid", "--fork", "--kill-child", *container["command"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"})  # fmt: skip
    if "unshare failed" in done.stderr:
        pytest.skip(f"no process namespaces here: {done.stderr}")
    assert done.returncode == ends_with, done.stderr


def test_two_jobs_behind_one_service_do_not_meet(cluster: Any) -> None:
    spec = copy.deepcopy(manifest("indexed-job")["Job"])
    spec["spec"].update(completions=3, parallelism=3)
    spec["spec"]["template"]["spec"]["containers"][0]["env"] += [{"name": "HOROCLONE_SIZE", "value": "3"}]
    other = copy.deepcopy(spec)
    other["metadata"]["name"] = "other"
    short = {"TRAIN_EPOCHS": "4", "TRAIN_PAUSE_S": "0.01"}
    one, two = Job(cluster, spec, "1", short), Job(cluster, other, "2", short)
    finish([*one.pods, *two.pods])
    assert all(newest(pod)[2] == 3 for pod in [*one.pods, *two.pods])


def test_a_job_set_starts_all_again_and_goes_on_from_the_disk(cluster: Any) -> None:
    spec = manifest("jobset")["JobSet"]
    (replicated,) = spec["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    name, service = f"{spec['metadata']['name']}-{replicated['name']}-0", spec["metadata"]["name"]

    def start(uid: str) -> list[Any]:
        return [
            cluster.start(
                f"{name}-{index}", job["template"]["spec"], service, {UID: uid}, MIDDLE, JOB_COMPLETION_INDEX=str(index)
            )
            for index in range(job["completions"])
        ]  # fmt: skip

    pods = start("1")
    pods[0].wait_for("epoch 3 with 2 ranks")
    pods[1].kill()
    assert pods[0].terminate() != 0  # backoffLimit 0: JobSet deletes what is left
    for pod in pods:
        cluster.remove(pod)
    again = start("2")
    finish(again)
    assert "epoch 1 " not in again[0].output and "epoch 24 " in again[0].output, cluster.outputs()


# --- what can be wrong


def one_pod(cluster: Any, index: int, labels: dict[str, str] | None = None, **more: str) -> Any:
    template = manifest("indexed-job")["Job"]["spec"]["template"]["spec"]
    template = copy.deepcopy(template)
    for one in template["containers"][0]["env"]:  # a manifest's own variables go before those of the image
        if one["name"] in more:
            one.update(value=more.pop(one["name"]))
    return cluster.start(
        f"train-{index}", template, "train", labels or {UID: "1"}, more, JOB_COMPLETION_INDEX=str(index)
    )


def ended(pod: Any, code: int, *patterns: str, timeout_s: float = 60) -> None:
    try:
        assert pod.process.wait(timeout_s) == code, pod.cluster.outputs()
    except subprocess.TimeoutExpired:
        pytest.fail(pod.cluster.outputs())
    for pattern in patterns:
        assert re.search(pattern, pod.output), f"{pattern}\n{pod.cluster.outputs()}"


def test_without_the_first_pod_the_others_say_for_whom_they_wait(cluster: Any) -> None:
    pod = one_pod(cluster, 1, HOROCLONE_ELASTIC_TIMEOUT="3")
    ended(pod, 75, r"there was no job to join.*train-0\.train is to begin it")


def test_a_pod_that_never_comes_is_named(cluster: Any) -> None:
    limits = {"HOROCLONE_ELASTIC_TIMEOUT": "8", "HOROCLONE_MIN_NP": "3"}
    pods = [one_pod(cluster, index, **limits) for index in (0, 1)]
    for pod in pods:
        ended(pod, 1, r"2 of at least 3 processes were there after 8 s, without train-2, train-3")


def test_another_secret_and_a_secret_that_is_missing_are_told(cluster: Any) -> None:
    cluster.secrets["train-secret"]["secret"] = "another secret of the same length"
    stranger = one_pod(cluster, 1)
    cluster.secrets["train-secret"]["secret"] = "0123456789abcdef0123456789abcdef"
    one_pod(cluster, 0)
    ended(stranger, 1, r"train-0\.train:\d+ refuses this process: it has another secret", timeout_s=60)
    cluster.secrets["train-secret"] = {}
    ended(
        one_pod(cluster, 2),
        1,
        r"HOROCLONE_SECRET_FILE=/run/secrets/horoclone/secret: No such file or directory",
    )


# --- with launchers


def test_a_train_job_starts_torchrun_in_each_node(cluster: Any) -> None:
    pytest.importorskip("torch")
    kinds = manifest("trainjob")
    runtime, job = kinds["TrainingRuntime"]["spec"], kinds["TrainJob"]["spec"]
    (node,) = runtime["template"]["spec"]["replicatedJobs"]
    template = copy.deepcopy(node["template"]["spec"]["template"]["spec"])
    trainer = job["trainer"]
    (container,) = template["containers"]
    container.update(command=trainer["command"], args=trainer["args"])  # as Trainer merges them
    pods = [
        cluster.start(
            f"train-node-0-{index}", template, "train", {}, {"TRAIN_EPOCHS": "4"}, JOB_COMPLETION_INDEX=str(index),
            PET_NNODES=str(trainer["numNodes"]), PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]),
            PET_NODE_RANK=str(index), PET_MASTER_ADDR="train-node-0-0.train", PET_MASTER_PORT="29500",
        )
        for index in range(trainer["numNodes"])
    ]  # fmt: skip
    finish(pods)
    assert "epoch 4 with 4 ranks" in pods[0].output


def test_an_mpi_job_reaches_its_workers_by_ssh_and_goes_on_without_one(cluster: Any, tmp_path: Path) -> None:
    if not Path("/usr/sbin/sshd").exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd (Debian: apt-get install openssh-server)")
    job = manifest("mpijob")["MPIJob"]
    roles = {
        role: copy.deepcopy(one["template"]["spec"]) for role, one in job["spec"]["mpiReplicaSpecs"].items()
    }
    # What the operator adds: the job's keys, and for the launcher the script that names the workers.
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", tmp_path / "id_rsa"], check=True, timeout=60
    )
    public = (tmp_path / "id_rsa.pub").read_text()
    keys = {"id_rsa": (tmp_path / "id_rsa").read_text(), "id_rsa.pub": public, "authorized_keys": public}
    cluster.secrets["train-ssh"] = keys
    mount = job["spec"]["sshAuthMountPath"]
    for template in roles.values():
        template["volumes"] = [
            {"name": "ssh-auth", "secret": {"secretName": "train-ssh", "defaultMode": 0o400}}
        ]
        template["containers"][0]["volumeMounts"] = [{"name": "ssh-auth", "mountPath": mount}]
    name = job["metadata"]["name"]
    workers = [cluster.start(f"{name}-worker-{n}", roles["Worker"], name, {}, MIDDLE) for n in range(2)]
    cluster.secrets["mpi"] = {
        "discover_hosts.sh": "#!/bin/sh\n" + "".join(f"echo {one.name}.{name}\n" for one in workers)
    }
    launcher = roles["Launcher"]
    launcher["volumes"].append({"name": "mpi", "secret": {"secretName": "mpi", "defaultMode": 0o555}})
    launcher["containers"][0]["volumeMounts"].append({"name": "mpi", "mountPath": "/etc/mpi"})
    pod = cluster.start(f"{name}-launcher", launcher, name, {}, MIDDLE)
    pod.wait_for("epoch 1 with 2 ranks")
    workers[1].kill()
    pod.wait_for(r"epoch \d+ with 1 ranks")
    pod.wait_for(r"done: (9[5-9]|100)\.\d%", 150)
    assert pod.process.wait(30) == 0, cluster.outputs()
