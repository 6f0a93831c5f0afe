"""`make gpu` from a copy of the tree, without network, in an environment that has torch: on the doubles, so no GPU takes part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = tuple(
    f"benchmarks/gpu{name}.py" for name in ("", "_buckets", "_contact", "_figures", "_place", "_programs")
)


def environment_with_torch(folder: Path) -> Path:
    """A fresh environment beside ours: what is installed there is installed here. Gives its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch_and_more.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    return folder / "bin" / "python"


@pytest.mark.guards(
    "csrc",
    "horoclone",
    "CMakeLists.txt",
    "pyproject.toml",
    ".ci/gpu",
    "tests/torch/gpu_double.py",
    *BENCHMARKS,
)
@pytest.mark.timeout(1500)
def test_make_gpu_builds_without_network_and_gives_every_part_a_verdict(
    tmp_path: Path, doubles: Path
) -> None:
    for needed in ("pybind11", "scikit_build_core"):
        pytest.importorskip(needed, reason=f"the build needs {needed} beside torch: make installs it")
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
    arguments = f"--doubles {doubles} --budget 900 --tests='-k test_double_join'"
    done = subprocess.run(
        ["make", "gpu", f"ARGS={arguments}"], cwd=tree, env=env, capture_output=True, text=True, timeout=1400
    )
    said = done.stdout + done.stderr
    results = json.loads((tree / "out" / "gpu.json").read_text())
    verdicts = {name: one["status"] for name, one in results.items()}
    logs = "\n".join(path.read_text()[-3000:] for path in sorted((tree / "out" / "gpu").glob("*.log")))
    assert verdicts == {
        "doctor": "passed", "tests": "passed", "one rank": "passed", "two ranks": "passed",
        "cupy and jax": "not here",  # none of their tests has this name
        "sanitizer": "not here", "trace": "not here",
    }, f"{said}\n{logs}"  # fmt: skip
    assert done.returncode == 0, said
    assert results["doctor"]["figures"]["device"] == "double" and results["tests"]["figures"]["passed"] == 1
    one = results["one rank"]["figures"]
    assert set(one["buckets"]) == {"torch.distributed", "horoclone"} and one["facts"]["ranks"] == 1
    assert sum(one["driver calls"].values()) > 1, "what is counted is what horoclone calls"
    assert results["two ranks"]["figures"]["allreduce"]["65536"]["horoclone"] > 0
    table = (tree / "out" / "gpu.txt").read_text()
    assert "there is no GPU to trace" in table and "doctor          passed" in table
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
