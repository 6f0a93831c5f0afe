"""Runs the steps of a Dockerfile where there is no docker: each stage is a folder, each RUN a chroot into it.

Only what the Dockerfiles of deploy/docker use: FROM, ARG, ENV, RUN, COPY, WORKDIR, USER, ENTRYPOINT, CMD. What a base image
would be is told by the caller, as a folder that is copied.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass
class Stage:
    """An image while it is made. root: its files."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """(word, the rest) of each instruction, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in pairs]


class Build:
    """context: where COPY takes from. base: makes the folder of a base image. extra: environment of the builder's network."""

    def __init__(
        self,
        context: Path,
        work: Path,
        base: Callable[[str, Path], None],
        extra: dict[str, str],
        binds: list[str],
    ) -> None:
        self._context, self._work, self._base, self._extra, self._binds = context, work, base, extra, binds
        self.stages: dict[str, Stage] = {}

    def run(self, dockerfile: Path, target: str) -> Stage:
        """Up to the stage `target`; stages that it does not need are made as well, as the old builder does."""
        stage: Stage | None = None
        for word, rest in instructions(dockerfile.read_text()):
            if word == "FROM":
                if target in self.stages and stage is self.stages[target]:
                    break
                stage = self._from(rest)
                continue
            assert stage is not None, "an instruction before FROM"
            getattr(self, f"_{word.lower()}")(stage, rest)
        return self.stages[target]

    def _from(self, rest: str) -> Stage:
        image, _, name = re.sub(r"\s+(?i:as)\s+", "\0", rest).partition("\0")
        name = name or f"stage{len(self.stages)}"
        root = self._work / name
        if image in self.stages:
            stage = replace(self.stages[image], root=root)
            subprocess.run(["cp", "-a", self.stages[image].root, root], check=True, timeout=300)
        else:
            self._base(image, root)
            stage = Stage(root)
        self.stages[name] = stage
        return stage

    def _arg(self, stage: Stage, rest: str) -> None:
        name, _, value = rest.partition("=")
        stage.arguments[name] = value.strip('"')

    def _env(self, stage: Stage, rest: str) -> None:
        stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))

    def _workdir(self, stage: Stage, rest: str) -> None:
        stage.workdir = rest
        (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, stage: Stage, rest: str) -> None:
        stage.user = rest

    def _entrypoint(self, stage: Stage, rest: str) -> None:
        stage.entrypoint = json.loads(rest)

    def _cmd(self, stage: Stage, rest: str) -> None:
        stage.command = json.loads(rest)

    def _copy(self, stage: Stage, rest: str) -> None:
        words = rest.split()
        source_root = self._context
        if words[0].startswith("--from="):
            source_root = self.stages[words.pop(0).removeprefix("--from=")].root
        *sources, last = words
        target = stage.root / last.lstrip("/")
        for source in sources:
            path = source_root / source.lstrip("/")
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc")
                shutil.copytree(path, target, dirs_exist_ok=True, ignore=ignored)
            else:
                into = target / path.name if last.endswith("/") else target
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, into)

    def _run(self, stage: Stage, rest: str) -> None:
        done = self.execute(
            stage, ["/bin/sh", "-c", rest], {**stage.arguments, **self._extra}, timeout_s=1500
        )
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-6000:]}"

    def execute(
        self, stage: Stage, command: list[str], more: dict[str, str] | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """In the stage's root, environment and folder, as its user; in namespaces of its own for mounts and processes."""
        root, user = shlex.quote(str(stage.root)), stage.user
        lines = ["set -eu", f"mount --bind {root} {root}", f"mount -t proc proc {root}/proc"]
        for name in ("/dev", *self._binds):
            place = f"{root}{shlex.quote(name)}"
            is_folder = Path(name).is_dir()
            lines.append(f"mkdir -p {place}" if is_folder else f"mkdir -p $(dirname {place}); touch {place}")
            lines.append(f"mount --bind {shlex.quote(name)} {place}")
        ids = "" if user in ("root", "0") else f"--userspec={user} "
        lines.append(f'exec chroot {ids}{root} /bin/sh -c \'cd "$0" && exec "$@"\' {stage.workdir} "$@"')
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines), "sh", *command],
            env={**environment, **stage.environment, **(more or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip


def network() -> tuple[dict[str, str], list[str]]:
    """What a build needs to reach the package registries from here: environment, and files and folders of this host."""
    names = ("PIP_", "SSL_", "REQUESTS_", "CURL_", "http_proxy", "https_proxy", "no_proxy")
    environment = {key: value for key, value in os.environ.items() if key.startswith(names)}
    places = [
        "/etc/resolv.conf",
        "/etc/ssl/certs",
        "/usr/share/ca-certificates",
        "/usr/local/share/ca-certificates",
    ]
    places += [
        "/etc/pip.conf", "/etc/xdg/pip", "/opt/wheels", "/opt/pypi", "/opt/pypi-more", "/etc/apt/apt.conf.d"
    ]  # fmt: skip
    return environment, [one for one in places if Path(one).exists()]
