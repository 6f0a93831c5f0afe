"""pytorch-ignite's own tests of its Horovod backend, as its source package brings them, on four ranks of horoclone.

Nothing of it is installed here: it is unpacked into a temporary folder and runs in an environment of its own, which sees
the packages of this one. docs/decisions/horovod-compatibility.md says why.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import checkout
import pytest

pytest.importorskip("torch")
pytest.importorskip("horoclone._core", reason="the native module is not built")

ROOT = Path(__file__).resolve().parents[2]
PINNED = "pytorch-ignite==0.5.5"
LIMIT_S = 700.0  # a minute on a quiet machine of two cores; the ranks mostly import torch

# What its tests take from outside: a fixture of pytest-xdist, by which they tell parallel runs apart.
FIXTURES = """
import pytest

@pytest.fixture(scope="session")
def worker_id():
    return "master"
"""
HOROVODRUN = "#!{python}\nimport sys\nfrom horoclone.launch.cli import horovodrun\nsys.exit(horovodrun())\n"

# Two halves that run side by side: its tests sleep for two seconds in every job.
HALVES = {
    "operations": (
        (
            "tests/ignite/distributed/utils/test_horovod.py",
            "all_gather or new_group or broadcast or single_device",
        ),
        (
            "tests/ignite/distributed/utils/test_horovod.py",
            "not (all_gather or new_group or broadcast or single_device)",
        ),
    ),
    "models and launchers": (
        ("tests/ignite/distributed/test_auto.py", "hvd"),
        (
            "tests/ignite/distributed/comp_models/test_horovod.py tests/ignite/distributed/test_launcher.py",
            "hvd",
        ),
    ),
}
# Tests that need a GPU, run only where Horovod is absent, or in a process that a launcher has started.
MAY_SKIP = re.compile(r"GPU|Skip if has Horovod package|Skip as controller is not Gloo")
MUST_PASS = {
    "operations": {
        "test_hvd_distrib_single_node_spawn", "test_sync_as_hvd_inside_gloo_executor",
        "test_idist_methods_in_hvd_context", "test_idist_all_reduce_hvd", "test_idist_all_gather_hvd",
        "test_idist_broadcast_hvd", "test_idist_barrier_hvd", "test_idist_new_group_hvd",
        "test_idist_one_rank_only"
    },
    "models and launchers": {
        "test__hvd_dist_model_create_no_dist",
        "test__hvd_dist_model_create_dist_1",
        "test__hvd_dist_model_spawn",
        "test_auto_methods_hvd",
        "test_check_idist_parallel_hvdrun_launch_n_procs",
        "test_check_idist_parallel_spawn_n_procs_hvd",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source package."""
    folder = tmp_path_factory.mktemp("ignite")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    words = [*pip, "download", "--no-deps", "--no-binary", "pytorch-ignite", "-d", folder, PINNED]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{PINNED} cannot be fetched: pip did not end within 120 s")
    if done.returncode != 0:
        pytest.skip(f"{PINNED} cannot be fetched: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    (archive,) = folder.glob("*.tar.gz")
    checkout.unpack(archive, folder)
    (found,) = folder.glob("*/pyproject.toml")
    assert (found.parent / "tests/ignite/conftest.py").exists()
    return found.parent


@pytest.fixture(scope="module")
def python(source: Path) -> Path:
    """The interpreter of an environment that has ignite, the packages of this environment, and horovodrun."""
    home = source.parent / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    shared = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    fixtures = source.parent / "fixtures"
    fixtures.mkdir()
    (fixtures / "outside_fixtures.py").write_text(FIXTURES)
    (packages / "shared.pth").write_text("\n".join([str(source), str(fixtures), str(ROOT), *shared]) + "\n")
    command = home / "bin" / "horovodrun"
    command.write_text(HOROVODRUN.format(python=home / "bin" / "python"))
    command.chmod(0o755)
    return home / "bin" / "python"


@pytest.mark.long(120)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("half", sorted(HALVES))
def test_its_own_tests_of_horovod_pass(source: Path, python: Path, half: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(tmp_path),
    }
    environment.pop("PYTHONPATH", None)
    runs = []
    for number, (files, chosen) in enumerate(HALVES[half]):
        report = tmp_path / f"report.{number}.xml"
        words = [
            python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "outside_fixtures", "-W", "ignore"
        ]  # fmt: skip
        words += [
            *files.split(),
            "-k",
            chosen,
            f"--junitxml={report}",
            f"--basetemp={tmp_path / str(number)}",
        ]
        output = (tmp_path / f"output.{number}").open("w+")
        process = subprocess.Popen(
            words, cwd=source, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT
        )  # fmt: skip
        runs.append((process, output, report))
    try:
        for process, output, _ in runs:
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                output.seek(0)
                raise AssertionError(f"had not ended after {LIMIT_S:g} s\n{output.read()[-8000:]}") from None
    finally:
        for process, _, _ in runs:
            process.terminate()  # its launcher ends the ranks
        for process, _, _ in runs:
            process.wait()
    passed: set[str] = set()
    for process, output, report in runs:
        output.seek(0)
        assert process.returncode == 0, output.read()[-12000:]
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            skipped = case.find("skipped")
            if skipped is None:
                passed.add(case.attrib["name"])
            else:
                assert MAY_SKIP.search(skipped.attrib["message"]), (
                    case.attrib["name"],
                    skipped.attrib["message"],
                )
        output.close()
    assert passed >= MUST_PASS[half], sorted(MUST_PASS[half] - passed)
