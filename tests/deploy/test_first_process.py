"""What a container starts is its process 1, for which the kernel knows no default of SIGTERM: it must end by it all the same.

Every container of deploy/ is started in a process namespace of its own, with its manifest's command or the image's. The
program is one that does nothing about signals, as a training script before hvd.init().
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

yaml = pytest.importorskip("yaml")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ENDS_S = 10.0  # far below every grace period

pytestmark = [pytest.mark.netns, pytest.mark.long(60)]


class Container(NamedTuple):
    """command and args as Kubernetes has them: without a command it is the image's entrypoint."""

    name: str
    command: list[str]
    args: list[str]


def entrypoint(dockerfile: Path) -> tuple[list[str], list[str]]:
    """ENTRYPOINT and CMD of a Dockerfile."""
    found: dict[str, list[str]] = {"ENTRYPOINT": [], "CMD": []}
    for line in dockerfile.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word in found:
            found[word] = json.loads(rest)
    return found["ENTRYPOINT"], found["CMD"]


def containers_in(document: Any, name: str) -> list[Container]:
    """Of every pod template in a manifest, and of a TrainJob, whose trainer is one."""
    if isinstance(document, list):
        return [found for one in document for found in containers_in(one, name)]
    if not isinstance(document, dict):
        return []
    found = [
        Container(f"{name}-{one['name']}", one.get("command", []), one.get("args", []))
        for one in document.get("containers", [])
        if "command" in one or "args" in one
    ]
    if "numProcPerNode" in document:
        found.append(Container(f"{name}-trainer", document["command"], document["args"]))
    return found + [one for value in document.values() for one in containers_in(value, name)]


def containers() -> list[Container]:
    found = []
    for path in sorted((DEPLOY / "kubernetes").glob("*/*.yaml")):
        found += containers_in(list(yaml.safe_load_all(path.read_text())), path.parent.name)
    for path in sorted((DEPLOY / "docker").glob("Dockerfile*")):
        found.append(Container(path.name, [], entrypoint(path)[1]))
    return found


def words_of(container: Container, folder: Path) -> list[str]:
    """Its command here. A launcher has another program to start than the script, which only an image has."""
    words = [*(container.command or entrypoint(DEPLOY / "docker" / "Dockerfile")[0]), *container.args]
    program = Path(words[0]).name
    if program in ("horoclonerun", "torchrun"):
        count = "-np" if program == "horoclonerun" else "--no-python"
        return [program, *([count, "1"] if count == "-np" else [count]), "python"]
    if program == "sshd":
        keys = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", keys], check=True, timeout=60)
        own = ["-f", "/dev/null", "-h", str(keys), "-p", "22022"]
        return [words[0], "-De", *own]
    if program == "tini":
        found = shutil.which("tini")
        if found is None:
            pytest.skip("no tini (Debian: apt-get install tini)")
        words[0] = found
    return words


def test_every_manifest_and_image_is_seen() -> None:
    names = {one.name.split("-")[0] for one in containers()}
    assert names == {
        "Dockerfile", "Dockerfile.cuda", "indexed", "jobset", "mpijob", "parameter", "statefulset", "trainjob"
    }  # fmt: skip


@pytest.mark.parametrize("container", containers(), ids=lambda one: one.name)
def test_a_container_ends_by_sigterm(container: Container, tmp_path: Path, needs_root: None) -> None:
    words = words_of(container, tmp_path)
    stub, up = tmp_path / "python", tmp_path / "up"
    stub.write_text(f"#!/bin/sh\n: >{up}\nexec sleep 60\n")
    stub.chmod(0o755)
    place = f"{tmp_path}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    if words[0] != "python" and shutil.which(words[0], path=place) is None:
        pytest.skip(f"no {words[0]}")
    process = subprocess.Popen(
        ["unshare", "--pid", "--mount", "--net", "--mount-proc", "--fork", "--kill-child", "sh", "-c",
         'ip link set lo up; mkdir -p /run/sshd; exec "$@"', "sh", *words],
        env={"PATH": place, "HOME": "/"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not is_up(process.pid, words, up):
            if process.poll() is not None and "unshare" in (said := process.stdout.read()):  # type: ignore[union-attr]
                pytest.skip(f"no namespaces here: {said}")
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.05)
        first = children(process.pid)[0]
        began = time.monotonic()
        subprocess.run(["kill", "-TERM", str(first)], check=True, timeout=20)
        code = process.wait(ENDS_S)
        assert time.monotonic() - began < ENDS_S
        assert code != -signal.SIGKILL
    except subprocess.TimeoutExpired:
        pytest.fail(f"{words} does not end by SIGTERM as the first process")
    finally:
        process.kill()
        process.communicate(timeout=20)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_up(pid: int, words: list[str], up: Path) -> bool:
    """Whether the program is there that the first process starts; sshd starts none before somebody comes."""
    if Path(words[0]).name != "sshd":
        return up.exists()
    first = children(pid)
    return bool(first) and Path(f"/proc/{first[0]}/comm").read_text().strip() == "sshd"
