"""The README's commands, word by word: in an empty Debian root where that can be made, as a newcomer would type them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import checkout
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TORCH = "torch==2.13.0"  # as in the Makefile: another version may be gigabytes of another build
LIMIT_S = 2700  # of one way: two downloads and a build on a busy machine


def blocks() -> list[list[str]]:
    """The lines of each block of commands: those without a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    return [
        [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]
        for language, block in found
        if not language
    ]


def test_every_command_of_the_readme_is_run_by_a_test_here() -> None:
    trained, *rest = blocks()
    assert trained[0] == "$ horoclonerun -np 2 python train.py"  # tests/docs runs the script
    assert rest == [
        [
            "git clone REPOSITORY horoclone && cd horoclone",  # the next test begins in a copy
            "python3 -m venv .venv && . .venv/bin/activate",
            "pip install '.[examples]'",
            "horoclonerun -np 2 python examples/torch_digits.py",
        ],
        ["make demo", "make test"],  # the second is what runs this test
    ]
    assert "apt-get install git python3-venv python3-dev g++ make" in README


@contextmanager
def debian_root(folder: Path, release: str) -> Iterator[Path]:
    """A Debian root with nothing in it but what the README asks for."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, debootstrap and unshare (Debian: apt-get install debootstrap)")
    root = folder / "root"
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", release, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        pytest.skip(f"debootstrap cannot make a root here: {(done.stdout + done.stderr)[-300:]}")
    # How this machine reaches its package index is no part of the README.
    for path in ("/etc/resolv.conf", "/etc/pip.conf", str(Path.home() / ".config/pip/pip.conf")):
        if Path(path).exists():
            place = root / ("root/.config/pip/pip.conf" if "pip/pip.conf" in path else path[1:])
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    bundle = os.environ.get("PIP_CERT", "")
    if Path(bundle).is_file():
        shutil.copy(bundle, root / bundle[1:])
    (root / "constraint.txt").write_text(f"{TORCH}\n")
    inside(
        root, "/", "apt-get update -qq && apt-get install -y -qq python3-venv python3-dev g++ make >/dev/null"
    )
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with debian_root(tmp_path_factory.mktemp("debian"), "bookworm") as root:
        yield root


def inside(root: Path, folder: str, commands: str) -> str:
    """What the commands print in a shell in the root, with its own /proc, mounts and shared memory, all gone afterwards."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment |= {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PIP_CONSTRAINT": "/constraint.txt",
    }
    environment |= {"DEBIAN_FRONTEND": "noninteractive", "LANG": "C.UTF-8"}
    at = shlex.quote(str(root))
    mounts = [f"mount -t proc proc {at}/proc", f"mount -t tmpfs tmpfs {at}/dev/shm"]
    wheels = environment.get("PIP_FIND_LINKS", "")
    if Path(wheels).is_dir():
        mounts.append(f"mkdir -p {at}{wheels} && mount --bind {wheels} {at}{wheels}")
    script = " && ".join(
        [*mounts, f"cd {at} && exec chroot . bash -e -c {shlex.quote(f'cd {folder}; {commands}')}"]
    )
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def clone(root: Path, name: str) -> str:
    """A copy of what is committed, or would be: a clone."""
    for file in checkout.files():
        place = root / name / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, place)
    return f"/{name}"


@pytest.mark.long(1200)
@pytest.mark.timeout(3 * LIMIT_S)
def test_the_way_without_make_works_in_an_empty_root(debian: Path) -> None:
    said = inside(debian, clone(debian, "without_make"), "\n".join(blocks()[1][1:]))
    assert re.search(r"accuracy.*9\d\.\d", said), said[-2000:]


@pytest.mark.long(1200)
@pytest.mark.timeout(3 * LIMIT_S)
def test_make_demo_works_in_an_empty_root_and_says_what_it_does(debian: Path) -> None:
    said = inside(debian, clone(debian, "make"), "make demo")
    assert re.search(r"accuracy.*9\d\.\d", said), said[-2000:]
    for step in (
        "== downloading",
        "== building horoclone",
        "   compiled 100 %",
        "== training",
        "   done in ",
    ):
        assert step in said, f"{step!r} was not said:\n{said[-4000:]}"


@pytest.mark.long(600)
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_wheel_is_made_with_the_newest_compiler_and_works_without_one(tmp_path: Path) -> None:
    with debian_root(tmp_path, "trixie") as root:
        folder = clone(root, "wheel")
        said = inside(root, folder, "make wheel")
        assert 'This constrains the platform tag to "manylinux_2_' in said.replace("\n", " "), said[-2000:]
        said = inside(
            root,
            folder,
            "apt-get purge -y -qq g++ gcc cpp python3-dev >/dev/null; apt-get autoremove -y -qq >/dev/null; "
            "! command -v g++ && python3 -m venv /empty && /empty/bin/pip install -q dist/*.whl && "
            "/empty/bin/horoclonerun -np 2 /empty/bin/python examples/numpy_pi.py",
        )
        assert "2 ranks" in said, said[-2000:]
