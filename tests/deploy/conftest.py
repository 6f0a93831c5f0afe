"""A small kubelet: pods of a manifest as processes with their command, environment, volumes and names, and nothing else.

A pod is a network, mount, host name and process-number namespace of its own. A file of hosts that all of them see answers
for the cluster's DNS. The tests are the controllers: they say which pods shall be there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from namespaces import connect, delete, lay_cable, make, make_switch
from world import ran

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SECRET = "0123456789abcdef0123456789abcdef"

# What a container's root has that the host's has not: the image's files, and the volumes. Then the command.
SETUP = """
echo "$POD_NAME" >/proc/sys/kernel/hostname
mount -t tmpfs tmpfs /srv
mkdir /srv/etc
cp -a /etc/. /srv/etc
mount --bind /srv/etc /etc
mount --bind "$CLUSTER/hosts" /etc/hosts
mount --bind "$CLUSTER/nsswitch.conf" /etc/nsswitch.conf
mkdir /srv/train /srv/ssh
cp "$IMAGE/train.py" /srv/train/
cp "$IMAGE/docker/sshd_config" "$IMAGE/docker/ssh_config" /srv/ssh/
if [ -d /etc/ssh ]; then cp /srv/ssh/ssh_config /etc/ssh/; fi
mount -t tmpfs tmpfs /home
mount -t tmpfs tmpfs /run
mkdir /run/sshd
eval "$VOLUMES"
unset POD_NAME CLUSTER IMAGE VOLUMES
exec "$@"
"""


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """The objects of a manifest, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}


class Pod:
    """One container. labels: the pod's; what kubectl would show of it is in `output`."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        spec: dict[str, Any],
        labels: dict[str, str],
        environment: dict[str, str],
        address: str = "",
    ) -> None:
        self.cluster, self.name, self.spec, self.labels = cluster, name, spec, labels
        self.container = spec["containers"][0]
        self.namespace = f"{cluster.tag}-{secrets.token_hex(3)}"
        self.address = address or cluster.next_address()
        self._extra = environment
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self._make_network()
        self.process = self._start()

    @property
    def output(self) -> str:
        fd = self._file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def environment(self) -> dict[str, str]:
        """The manifest's variables in front of what the controller adds; behind both what the image has."""
        found = dict(self.cluster.image)
        for one in self.container.get("env", []):
            found[one["name"]] = one["value"] if "value" in one else self._field(one["valueFrom"])
        return {**found, "HOSTNAME": self.name, **self._extra}

    def _field(self, source: dict[str, Any]) -> str:
        path = source["fieldRef"]["fieldPath"]
        if path == "metadata.name":
            return self.name
        match = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        assert match is not None, f"this kubelet does not know {path}"
        return self.labels[match.group(1)]

    def _volumes(self) -> str:
        """Shell commands that make the volumes which the container mounts."""
        kinds = {one["name"]: one for one in self.spec.get("volumes", [])}
        lines = []
        for mount in self.container.get("volumeMounts", []):
            volume, path = kinds[mount["name"]], mount["mountPath"]
            assert path.startswith(("/srv/", "/run/", "/home/", "/etc/")), "a folder of the container's own"
            lines.append(f"mkdir -p {path}")
            if "secret" in volume:
                mode = volume["secret"]["defaultMode"]
                folder = Path(tempfile.mkdtemp(dir=self.cluster.folder))
                for key, value in self.cluster.secrets[volume["secret"]["secretName"]].items():
                    (folder / key).write_text(value)
                    lines.append(f"install -m {mode:o} {folder}/{key} {path}/{key}")
            elif "persistentVolumeClaim" in volume:
                shared = self.cluster.folder / volume["persistentVolumeClaim"]["claimName"]
                shared.mkdir(exist_ok=True)
                lines.append(f"mount --bind {shared} {path}")
            else:
                assert "emptyDir" in volume, f"this kubelet does not know {volume}"
        return "\n".join(lines)

    def _make_network(self) -> None:
        end, tag = f"v{secrets.token_hex(4)}", self.cluster.tag
        make(self.namespace)
        lay_cable(tag, end, self.namespace, "eth0")
        connect(tag, end, switched=True)
        connect(self.namespace, "eth0", f"{self.address}/24")

    def _start(self) -> subprocess.Popen[bytes]:
        inside = [
            "ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "--pid", "--fork",
            "--mount-proc"
        ]  # fmt: skip
        # Without a command the image's entrypoint is the first process; where tini is not installed, what it would start.
        tini = [] if shutil.which("tini") is None else ["tini", "--"]
        words = [*self.container.get("command", tini), *self.container.get("args", [])]
        variables = self.environment()
        command = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in words]
        ours = {
            "POD_NAME": self.name,
            "CLUSTER": str(self.cluster.folder),
            "IMAGE": str(DEPLOY),
            "VOLUMES": self._volumes(),
        }
        return subprocess.Popen(
            [*inside, "sh", "-euc", SETUP, "sh", *command],
            env={**self.environment(), **ours},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    # --- what the kubelet does

    @property
    def pid(self) -> int:
        """Of the container's first process, as the host numbers it; 0 when it has ended."""
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return 0
        return int(text.split()[0]) if text.split() else 0

    def children(self) -> list[str]:
        """The names of the programs that the container's first process has started and that are still there."""
        names = []
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                names.append(Path(f"/proc/{child}/comm").read_text().strip())
        return names

    def run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """As `kubectl exec`, and as hooks run."""
        words = ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--net", "--pid", *command]
        return ran(*words, env=self.environment(), timeout=timeout_s)

    def terminate(self) -> int:
        """What happens to an evicted or deleted pod: the hook, SIGTERM, and SIGKILL after the grace period. The code with
        which the container has ended."""
        end = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook and self.process.poll() is None and self.pid:
            self.run(hook["exec"]["command"], max(0.0, end - time.monotonic()))
        if self.process.poll() is None and self.pid:
            os.kill(self.pid, signal.SIGTERM)
        try:
            code = self.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            return 137  # unshare says 1: it cannot have the signal's default back that SIGKILL never lost
        return 128 - code if code < 0 else code

    def kill(self) -> None:
        """As when the node is lost, or the container used too much memory."""
        if self.process.poll() is None and (pid := self.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(20)

    def is_ready(self) -> bool:
        """What the container's readiness probe says now."""
        probe = self.container["readinessProbe"]["exec"]["command"]
        return self.process.poll() is None and bool(self.pid) and self.run(probe, 20).returncode == 0

    def restart(self) -> None:
        """The container again, in the same pod."""
        self.process = self._start()

    def wait_for(self, pattern: str, timeout_s: float = 90) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.output)):
            ended = self.process.poll() is not None
            if time.monotonic() > deadline or (ended and not re.search(pattern, self.output)):
                pytest.fail(f"{self.name}: {pattern!r} not seen\n{self.cluster.outputs()}")
            time.sleep(0.05)
        return match

    def close(self) -> None:
        if self.process.poll() is None:
            if pid := self.pid:
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait(10)
        delete(self.namespace)
        self._file.close()


class Cluster:
    """A switch for the pods, the secrets of the namespace, and the names that its DNS knows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag = folder, f"hc-{secrets.token_hex(3)}"
        self.secrets = {"train-secret": {"secret": SECRET}}
        self.pods: list[Pod] = []
        self._names: dict[str, list[tuple[str, str]]] = {}  # service -> (address, host name)
        self._net, self._last = f"10.215.{secrets.randbelow(250)}", 1
        self.image = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONUNBUFFERED": "1",
            "HOME": "/",
            "OMP_NUM_THREADS": "1",
            "HOROCLONE_SELECTION": "fixed",
        }
        (folder / "nsswitch.conf").write_text("hosts: files\n")
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        make(self.tag)
        make_switch(self.tag, "stp_state", "0", "forward_delay", "0")

    def next_address(self) -> str:
        self._last += 1
        return f"{self._net}.{self._last}"

    def start(
        self,
        name: str,
        spec: dict[str, Any],
        service: str,
        labels: dict[str, str] | None = None,
        more: dict[str, str] | None = None,
        **environment: str,
    ) -> Pod:
        """A pod of this name behind a service. environment: what the controller adds. more: of the test, over the image's."""
        address = self.next_address()
        self._names.setdefault(service, []).append((address, name))
        self._write()
        image, self.image = self.image, {**self.image, **(more or {})}
        try:
            pod = Pod(self, name, spec, labels or {}, environment, address)
        finally:
            self.image = image
        self.pods.append(pod)
        return pod

    def remove(self, pod: Pod) -> None:
        """The pod is gone, and DNS knows it."""
        for hosts in self._names.values():
            hosts[:] = [one for one in hosts if one[0] != pod.address]
        self._write()
        pod.kill()

    def _write(self) -> None:
        lines = ["127.0.0.1 localhost"]
        for service, hosts in self._names.items():
            lines += [f"{address} {name}.{service} {service}" for address, name in hosts]
        with (self.folder / "hosts").open("r+") as file:  # the same file: it is mounted
            text = "\n".join(lines) + "\n"
            file.write(text)
            file.truncate(len(text))

    def outputs(self) -> str:
        return "\n".join(
            f"--- {pod.name} ({pod.address}, exit code {pod.process.poll()})\n{pod.output}"
            for pod in self.pods
        )

    def close(self) -> None:
        for pod in self.pods:
            pod.close()
        delete(self.tag)


@pytest.fixture
def cluster(tmp_path: Path, needs_root: None) -> Iterator[Cluster]:
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("needs unshare and nsenter (Debian: util-linux)")
    try:
        made = Cluster(tmp_path)
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    yield made
    made.close()
