"""`make gpu` from a copy of the tree, without network, in an environment that has torch: on the fakes, so no GPU takes part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import types
from pathlib import Path
from typing import Any

import pytest
from world import ran

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def environment_with_torch(folder: Path) -> Path:
    """A fresh environment beside ours: what is installed there is installed here. Gives its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch_and_more.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    return folder / "bin" / "python"


@pytest.mark.long(400)
@pytest.mark.timeout(1500)
def test_make_gpu_builds_without_network_and_gives_every_part_a_verdict(tmp_path: Path, fakes: Path) -> None:
    pytest.importorskip("pybind11", reason="the build needs pybind11 beside torch: make installs it")
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "build", "out", "*.so", "__pycache__", "*.egg-info", "node_modules"
    )
    shutil.copytree(ROOT, tree, ignore=ignore)
    nowhere = {f"PIP_{name}": "http://127.0.0.1:9/" for name in ("INDEX_URL", "EXTRA_INDEX_URL")}
    env = {**os.environ, **nowhere, "HC_NVCC": "OFF", "CCACHE_BASEDIR": str(tree),
           "GPU_PYTHON": str(environment_with_torch(tmp_path / "there"))}  # fmt: skip
    for name in ("MAKEFLAGS", "MAKELEVEL", "VIRTUAL_ENV", "PYTHONPATH"):
        env.pop(name, None)
    arguments = f"--fakes {fakes} --budget 900 --few few --tests='-k test_fake_groups_mixed_places'"
    said, results = "", {}
    for verb, name in (("gpu", "gpu"), ("gpu-second", "gpu-second")):
        done = ran("make", verb, f"ARGS={arguments}", cwd=tree, env=env, timeout=900)
        said += done.stdout + done.stderr
        results |= json.loads((tree / "out" / f"{name}.json").read_text())
        assert done.returncode == 0, said
    verdicts = {name: one["status"] for name, one in results.items()}
    logs = "\n".join(path.read_text()[-3000:] for path in sorted((tree / "out" / "gpu").glob("*.log")))
    assert verdicts == {
        "kernels": "passed", "doctor": "passed", "nccl": "passed", "ends": "passed", "nccl buckets": "passed",
        "features": "not here", "cupy and jax": "not here",  # none of their tests has this name
        "one rank": "passed", "two ranks": "passed", "peers": "passed", "sanitizer": "not here", "trace": "not here",
    }, f"{said}\n{logs}"  # fmt: skip
    kernels = results["kernels"]["figures"]
    assert kernels["compared"] > 8000 and not kernels["differ"] and kernels["speed"][0]["GB/s"] > 0
    assert results["doctor"]["figures"]["gpu"]["0"]["backend"] == "peers"
    nccl = results["nccl"]["figures"]
    assert nccl["sums"]["gpu"]["0"]["backend"] == "nccl" and nccl["passed"] == 1
    for part in ("ends", "peers"):
        assert all(one["names rank 1"] for one in results[part]["figures"]["death"].values())
    assert results["ends"]["figures"]["lives"]["lives"] == 20
    assert set(results["nccl buckets"]["figures"]["buckets"]) == {"torch.distributed", "horoclone"}
    one = results["one rank"]["figures"]
    assert set(one["buckets"]) == {"torch.distributed", "horoclone"} and one["facts"]["ranks"] == 1
    assert results["two ranks"]["figures"]["allreduce"]["65536"]["horoclone"] > 0
    tools = results["sanitizer"]["figures"]
    assert {name: len(found["errors, by rank"]) for name, found in tools.items()} == {
        "memcheck": 2,
        "initcheck": 2,
    }
    assert results["trace"]["figures"]["trace"].endswith("gpu_trace.json")
    few = tree / "few"
    kinds = ("json", "tar.gz", "txt")
    assert sorted(path.name for path in few.iterdir()) == [
        *(f"gpu-second.{kind}" for kind in kinds), *(f"gpu.{kind}" for kind in kinds)
    ]  # fmt: skip
    with tarfile.open(few / "gpu-second.tar.gz") as archive:
        assert {"gpu/doctor.log", "gpu/nccl.xml", "gpu/trace.log"} <= set(archive.getnames())
    assert "kernels         passed" in (tree / "out" / "gpu.txt").read_text()
    assert "there is no GPU to trace" in (tree / "out" / "gpu-second.txt").read_text()
    assert not list(tree.glob(".venv")), "nothing was installed but into build/gpu"


@pytest.fixture
def contact(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_contact

    return gpu_contact


def test_a_part_that_fails_or_takes_too_long_is_named_and_the_rest_goes_on(
    contact: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(text: str) -> Any:
        def part(run: Any) -> Any:
            run([sys.executable, "-c", text])
            gate = {"figure": "speed", "aim": ">= 2", "found": 1.0, "holds": False}
            return contact.Result(figures={"a": 1}, gates=[gate])

        return part

    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(600)"
    monkeypatch.setattr(contact, "END_S", 1.0)
    monkeypatch.setattr(contact, "PARTS", {
        "breaks": (program("raise SystemExit('no such kernel')"), 60),
        "hangs": (program(stubborn), 3),
        "works": (program("print('done')"), 60),
    })  # fmt: skip
    assert contact.main(["--out", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: one["status"] for name, one in results.items()} == {
        "breaks": "FAILED", "hangs": "OUT OF TIME", "works": "passed",
    }  # fmt: skip
    assert "no such kernel" in results["breaks"]["reason"] and "3 s" in results["hangs"]["reason"]
    assert "begun" in (tmp_path / "gpu" / "hangs.log").read_text()
    table = (tmp_path / "gpu.txt").read_text()
    assert "MISSED" in table and "OUT OF TIME" in table
    assert contact.main(["--out", str(tmp_path), "--budget", "0.5", "--parts", "works"]) == 1
    assert "not begun" in (tmp_path / "gpu.txt").read_text()


def test_of_a_part_that_runs_out_of_time_its_finished_tests_are_known(
    contact: types.ModuleType, tmp_path: Path
) -> None:
    log = tmp_path / "tests.log"
    log.write_text(
        "$ python -m pytest -v\ncollecting ... collected 5 items\n\n"
        "tests/t.py::test_a[1 rank] PASSED                 [ 20%]\n"
        "tests/t.py::test_b SKIPPED (no GPU here)          [ 40%]\n"
        "tests/t.py::test_c FAILED                         [ 60%]\n"
        "tests/t.py::test_d ERROR                          [ 80%]\n"
        "tests/t.py::test_e "
    )
    found = contact.told(log.read_text())
    assert found["passed"] == 1 and found["failed"] == ["tests/t.py::test_c", "tests/t.py::test_d"]
    assert found["skipped"][0].startswith("tests/t.py::test_b (no GPU here)")
    assert found["under way"] == ["tests/t.py::test_e"]
    assert contact.told("tests/t.py::test_a[1 rank] PASSED     [ 20%]\n")["under way"] == []


def test_the_results_fit_into_few_files_and_a_failing_part_shows_the_end_of_its_log(
    contact: types.ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the run is ended from outside after the first part: then the first part's are there."""
    few = tmp_path / "few"

    def broken(run: Any) -> Any:
        run([sys.executable, "-c", "print('said before'); raise SystemExit('no such kernel')"])

    def ended(run: Any) -> Any:
        with tarfile.open(few / "gpu.tar.gz") as archive:
            assert "gpu/broken.log" in archive.getnames()
        assert json.loads((few / "gpu.json").read_text())["broken"]["status"] == "FAILED"
        raise KeyboardInterrupt

    monkeypatch.setattr(contact, "PARTS", {"broken": (broken, 60), "ended": (ended, 60)})
    with pytest.raises(KeyboardInterrupt):
        contact.main(["--out", str(tmp_path / "out"), "--few", str(few)])
    assert sorted(path.name for path in few.iterdir()) == ["gpu.json", "gpu.tar.gz", "gpu.txt"]
    assert "said before" in capsys.readouterr().out


def test_what_libraries_print_around_an_object_of_json_does_not_hide_it(contact: types.ModuleType) -> None:
    said = 'warning: {"odd\n{broken\n{"cuda": {"found": true}}\nDeprecationWarning: {}\n'
    assert contact.first_object(said) == {"cuda": {"found": True}}
    assert contact.first_object("nothing") == {}


def test_compute_sanitizer_knows_the_options_that_it_is_given(contact: types.ModuleType) -> None:
    program = contact.sanitizer()
    if not program:
        pytest.skip("no compute-sanitizer here: it is part of CUDA's toolkit")
    known = ran(*program, "--help").stdout
    for tool in contact.GATE_OF_TOOL:
        options = [word for word in contact.sanitizing([], tool) if str(word).startswith("--")]
        assert options and all(f" {option} " in known for option in options)
        # Deprecated ones are known and not shown.
        given = [*program, *contact.sanitizing([], tool), "--require-cuda-init", "no", "true"]
        done = ran(*given)
        assert "deprecated" not in done.stdout + done.stderr and done.returncode == 0, done.stderr


def test_without_a_gpu_it_ends_at_once_and_says_why(tmp_path: Path) -> None:
    """Before anything is built. The Python is this one, whichever torch it has; then one that claims to be made for CUDA."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    made_for_cuda = tmp_path / "torch"
    made_for_cuda.mkdir()
    (made_for_cuda / "__init__.py").write_text("raise SystemExit('it is not imported')")
    (made_for_cuda / "version.py").write_text("__version__, cuda = '2.11.0+cu130', '13.0'")
    of_this = "no GPU here: " if torch.version.cuda else "is not made for CUDA"
    for path, why in (("", of_this), (str(tmp_path), "no GPU here: ")):
        env = {**os.environ, "GPU_PYTHON": sys.executable, "PYTHONPATH": path}
        began = time.monotonic()
        done = ran(ROOT / ".ci" / "gpu", env=env)
        assert done.returncode == 1 and why in done.stderr and "building" not in done.stdout, done.stderr
        assert time.monotonic() - began < 50
