"""The scripts of deploy/slurm under a real Slurm: a controller and three nodes, each in namespaces of its own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import connect, delete, lay_cable, make, make_switch
from world import ran, until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
# Nothing that needs cgroups: processes are followed by their parents. A job that is queued again waits for cred_expire.
CONF = """
ClusterName=test
SlurmctldHost=control({net}.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=15
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=5
NodeName=node[1-3] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=30 State=UP
"""

pytestmark = [pytest.mark.netns, pytest.mark.slow]


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        conf = folder / "slurm.conf"
        self.tag, net = f"hc-{secrets.token_hex(3)}", f"10.216.{secrets.randbelow(250)}"
        self.spaces = [self.tag, *(f"{self.tag}-{number}" for number in (1, 2, 3))]
        self._make_network(net)
        conf.write_text(CONF.format(folder=folder, net=net))
        lines = [
            f"{net}.{number + 1} {name}" for number, name in enumerate(("control", "node1", "node2", "node3"))
        ]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "HOROCLONE_", "HOROVOD_"))
        }
        self.env |= {
            "SLURM_CONF": str(conf),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "HOROCLONE_SELECTION": "fixed",
        }
        for name in ("state", "node1", "node2", "node3"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{what}-file={folder}/munged.{what}" for what in ("pid", "log", "seed")]
        self.daemons: list[subprocess.Popen[bytes]] = []
        self._start(
            "control", "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={folder}/munge.sock", *files
        )  # fmt: skip
        self._until(lambda: (folder / "munge.sock").exists(), "munged does not answer")
        self._start("control", "slurmctld", "-D")
        for number in (1, 2, 3):
            self._start(f"node{number}", "slurmd", "-D", "-N", f"node{number}")
        self._until(
            lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", "no three idle nodes"
        )

    def _make_network(self, net: str) -> None:
        """The controller's namespace has the switch to which the nodes' are joined."""
        make(*self.spaces)
        make_switch(self.tag, "stp_state", "0", "forward_delay", "0")
        connect(self.tag, "switch", f"{net}.1/24")
        for number, space in enumerate(self.spaces[1:], 1):
            lay_cable(self.tag, f"v{number}", space, "eth0")
            connect(self.tag, f"v{number}", switched=True)
            connect(space, "eth0", f"{net}.{number + 1}/24")

    def on(self, host: str, *words: str) -> list[str]:
        """A command on the controller's host or on a node: its network, its name, and the names of all."""
        space = self.tag if host == "control" else f"{self.tag}-{host[-1]}"
        setup = (
            f'echo {host} >/proc/sys/kernel/hostname; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        )
        return [
            "nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--uts", "sh", "-ec", setup, "sh",
            *words
        ]  # fmt: skip

    def _start(self, host: str, *words: str) -> None:
        with (self.folder / f"{words[0]}.{host}.out").open("ab") as out:
            command = self.on(host, *words)
            self.daemons.append(
                subprocess.Popen(command, env=self.env, stdout=out, stderr=out, start_new_session=True)
            )

    def _until(self, what: Any, text: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline:
                logs = "".join(
                    f"{one.name}:\n{one.read_text()[-1500:]}\n" for one in self.folder.glob("*.log")
                )
                pytest.fail(f"{text}\n{logs}")
            time.sleep(0.1)

    def run(self, *words: str) -> str:
        command = self.on("control", *words)
        done = ran(*command, env=self.env)
        return done.stdout + done.stderr

    def submit(self, script: str, *flags: str, **environment: str) -> Batch:
        folder = self.folder / f"job-{time.monotonic_ns()}"
        folder.mkdir()
        shutil.copy(DEPLOY / "train.py", folder)
        out = folder / "out"
        words = [
            "sbatch", "--parsable", f"--chdir={folder}", f"--output={out}", *flags,
            str(DEPLOY / "slurm" / script)
        ]  # fmt: skip
        done = ran(*self.on("control", *words), env={**self.env, **environment, "TRAIN_FOLDER": str(folder)}, check=True)  # fmt: skip
        return Batch(self, done.stdout.strip(), out)

    def close(self) -> None:
        self.run("scancel", "--state=RUNNING")
        self.run("scancel", "--state=PENDING")
        time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        for space in self.spaces:
            delete(space)


class Batch:
    def __init__(self, slurm: Slurm, number: str, out: Path) -> None:
        self.slurm, self.number, self.out = slurm, number, out

    @property
    def output(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def field(self, name: str) -> str:
        match = re.search(rf"\b{name}=(\S+)", self.slurm.run("scontrol", "show", "job", self.number))
        return match.group(1) if match else ""

    def wait_for(self, pattern: str, timeout_s: float = 90) -> re.Match[str]:
        match = until(
            lambda: re.search(pattern, self.output),
            timeout_s,
            lambda: f"{pattern!r} not seen; {self.field('JobState')}\n{self.output}",
        )
        return match

    def finish(self, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while (state := self.field("JobState")) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", ""):
            if time.monotonic() > deadline:
                pytest.fail(f"{state}\n{self.output}")
            time.sleep(0.2)
        assert state == "COMPLETED", f"{state}\n{self.output}"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = [one for one in PROGRAMS if shutil.which(one) is None and not Path("/usr/sbin", one).exists()]
    if missing:
        pytest.skip(f"no Slurm: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)")
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root, and the command ip (Debian: iproute2): nodes are network namespaces")
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


SHORT = {"TRAIN_EPOCHS": "3", "TRAIN_PAUSE_S": "0.01"}
LONG = {"TRAIN_EPOCHS": "60", "TRAIN_PAUSE_S": "0.05"}


def test_srun_is_found_and_the_nodes_are_hosts(slurm: Slurm) -> None:
    program = "import horoclone as hvd; hvd.init(); print('rank', hvd.rank(), hvd.size(), flush=True); hvd.shutdown()"
    environment = {**slurm.env, "HOROCLONE_SECRET": "0" * 32}
    words = ["srun", "-N3", "--ntasks-per-node=1", "python", "-c", program]
    words = slurm.on("control", *words)
    done = ran(*words, env=environment)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} 3" for rank in range(3)], (
        done.stdout + done.stderr
    )


@pytest.mark.long(60)
@pytest.mark.timeout(420)
def test_a_static_job_saves_at_a_commit_before_its_time_limit_and_goes_on_when_it_is_queued_again(
    slurm: Slurm,
) -> None:
    job = slurm.submit("static.sbatch", "--time=1", "--signal=USR1@40", **LONG)
    job.wait_for("epoch 1 with 4 ranks")
    # Slurm sends the signal up to a minute early, so it may have come already; this one is the scheduler's for a preemption.
    slurm.run("scancel", "--signal=USR1", job.number)
    job.wait_for(
        r"(?s)epoch 1 with.*generation 1: rank 0 of 4.*generation 1: rank 0 of 4.*epoch \d+ with", 300
    )
    assert job.field("Restarts") != "0"
    before, _, after = job.output.rpartition("generation 1: rank 0 of 4")
    done = [int(one) for one in re.findall(r"epoch (\d+) with", before)]
    begun = [int(one) for one in re.findall(r"epoch (\d+) with", after)]
    assert begun[0] == done[-1] + 1, job.output
    slurm.run("scancel", job.number)


@pytest.mark.long(60)
def test_the_time_limit_itself_sends_the_signal(slurm: Slurm) -> None:
    job = slurm.submit("static.sbatch", "--time=1", "--signal=USR1@50", **LONG)
    job.wait_for("epoch 1 with 4 ranks")
    job.wait_for(r"(?s)generation 1: rank 0 of 4.*generation 1: rank 0 of 4", 100)
    # A step is cancelled whose ranks do not leave in the same moment (--kill-on-bad-exit); a job only by its time limit.
    assert "TIME LIMIT" not in job.output and job.field("Restarts") != "0", job.output
    slurm.run("scancel", job.number)


@pytest.mark.long(60)
def test_an_elastic_job_goes_on_without_a_rank_and_leaves_at_a_commit_when_told(slurm: Slurm) -> None:
    job = slurm.submit("elastic.sbatch", "--time=5", **LONG)
    job.wait_for("epoch 1 with 4 ranks")
    workers = _workers(job.out.parent)
    assert len(workers) == 4, job.output
    os.kill(workers[-1], signal.SIGKILL)
    job.wait_for(r"generation [2-9]: rank \d of [34]")
    job.wait_for(r"the worker in slot .* was killed|signal 9|SIGKILL")
    job.wait_for(r"generation [3-9]: rank \d of 4")  # a new worker has its slot
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(
        r"(?s)generation 1: rank 0 of 4.*has left: .*generation 1: rank 0 of 4",
        120,
    )
    assert job.field("Restarts") != "0", job.output
    slurm.run("scancel", job.number)


@pytest.mark.long(60)
def test_short_jobs_end_with_success(slurm: Slurm) -> None:
    jobs = [slurm.submit(script, "--time=5", **SHORT) for script in ("static.sbatch", "elastic.sbatch")]
    for job in jobs:
        job.finish()
        assert len(re.findall("done: 9", job.output)) == 4, job.output
        assert not list(job.out.parent.glob(".secret*")), "the secret is gone with the job"


def _workers(folder: Path) -> list[int]:
    """Processes that run train.py in this folder."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            if words[1:2] == [b"train.py"] and (place / "cwd").readlink() == folder:
                found.append(int(place.name))
        except (OSError, ValueError):
            continue
    return sorted(found)
