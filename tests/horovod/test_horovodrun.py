"""packages/horovodrun: built and installed from its folder, its command starts ranks in Horovod's format."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """horovodrun in a fresh environment, installed from a wheel without any network."""
    pytest.importorskip("setuptools", "77", reason="building the wheel here needs setuptools >= 77")
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("horovodrun")
    source = folder / "source"  # a build writes beside its sources
    source.mkdir()
    for file in (ROOT / "packages" / "horovodrun").glob("*.*"):
        (source / file.name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--no-cache-dir"]
    offline = ["--no-deps", "--no-index"]
    wheels = folder / "wheels"
    subprocess.run(
        [*pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(source)],
        check=True,
        timeout=120,
    )
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("horoclone_horovodrun-")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", *offline, str(wheel)], check=True, timeout=120)
    found = folder / "venv" / "bin" / "horovodrun"
    assert found.exists()
    return found


def test_it_runs_two_ranks_of_a_horovod_script(launch, command: Path) -> None:
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    body = (
        "import horoclone.horovod_alias as alias; alias.install()\n"
        "import numpy as np, horovod as hvd\n"
        "hvd.init(); print(f'{hvd.rank()} of {hvd.size()}:', hvd.allreduce(np.ones(1), op=hvd.Sum).tolist())"
    )
    flags = [
        "-np", "2", "-H", "localhost:2", "--gloo", "--fusion-threshold-mb", "32", "--cycle-time-ms", "3.5"
    ]  # fmt: skip
    done = launch([command, *flags, sys.executable, "-c", body], env={"PYTHONPATH": str(ROOT)}, timeout_s=60)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:0 of 2: [2.0]", "[1]<stdout>:1 of 2: [2.0]"]


def test_its_errors_carry_its_name_and_it_leaves_a_real_horovod_alone(
    launch, command: Path, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(ROOT)}
    done = launch([command, "-np", "2", "--jsrun", "true"], env=env, check=False)
    assert done.returncode == 2 and done.stderr.startswith("horovodrun: --jsrun ") and "LSF" in done.stderr
    done = launch([command, "-np", "2", "--verbose", "true"], env=env)
    said = [line.partition(": ") for line in done.stderr.splitlines()]
    assert {name for name, _, _ in said} == {"horovodrun"} and len(said) == 5, done.stderr
    real = tmp_path / "horovod-0.28.1.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = launch([command, "-np", "1", "true"], env=env, check=False)
    assert done.returncode == 2 and "Horovod 0.28.1 is installed here" in done.stderr
    assert "horoclonerun" in done.stderr and "pip uninstall horovod" in done.stderr
