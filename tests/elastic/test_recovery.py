"""benchmarks/recovery.py in short: ranks die in every phase, each sum is that of those who are left, nothing stays."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "recovery.py"
KINDS = ("forward", "backward", "collective", "step", "commit", "moment", "init", "recovery")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/, as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    return importlib.import_module


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("hosts", "phase"),
    [
        *((1, kind) for kind in KINDS),
        pytest.param(2, "random", marks=[pytest.mark.netns, pytest.mark.long(20)]),
    ],
)
def test_survivors_go_on_wherever_a_rank_dies(
    launch: Any, request: pytest.FixtureRequest, tmp_path: Path, hosts: int, phase: str
) -> None:
    if hosts == 2:
        request.getfixturevalue("needs_root")
    out, kills = tmp_path / "found.json", 12 if phase == "random" else 4
    flags = ["--framework", "numpy", "--kills", kills, "--hosts", hosts, "--phase", phase, "--json", out]
    done = launch([sys.executable, BENCHMARK, *map(str, flags)], timeout_s=170, check=False)
    if "no network namespaces here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.output
    (found,) = json.loads(out.read_text())["found"]
    assert {row["kind"] for row in found["rows"]} >= ({phase} if phase in KINDS else set(KINDS))
    assert len(found["rows"]) >= kills and found["steps_checked"] > kills
    assert all(row["phase"] and 0 < row["formed"] <= row["step"] for row in found["rows"])


@pytest.mark.parametrize("size", [2, 3])  # the average of ranks that were not there, and of those who were
def test_the_model_of_the_benchmark_tells_a_wrong_sum(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    worker = load("recovery_worker")
    codes: list[int] = []
    monkeypatch.setattr(worker.os, "_exit", codes.append)
    check, bases = worker.Check(100), worker.bases(100)
    gradients = [base * np.float32(worker.factor(4) * (3 + 1) / 2) for base in bases]
    weights = [base * np.float32(-worker.RATE * 10.0) for base in bases]
    check.step(4, size, 10.0, gradients, weights)
    assert bool(codes) == (size == 2)
    assert ("WRONG gradient 0 of step 4" in capsys.readouterr().err) == (size == 2)
    codes.clear()
    check.step(4, 3, 10.5, gradients, weights)
    assert codes and "WRONG weights 0 after step 4" in capsys.readouterr().err


def test_a_generation_that_begins_with_another_sum_than_numpys_is_told(load: Any, tmp_path: Path) -> None:
    jobs = load("recovery_jobs")
    arguments = load("recovery").parse([])

    def job(*lines: str) -> Any:
        made = jobs.Job(tmp_path / str(len(list(tmp_path.iterdir()))), arguments)
        for line in lines:
            made._take(line)
        return made

    first = ["generation 1 0 2 11 0 0.0 1.0", "generation 1 1 2 12 0 0.0 1.0"]
    right = 1.5 * sum(load("recovery_worker").factor(step) for step in range(7))
    job(*first, f"[0] generation 2 0 1 12 7 {right} 2.0").check_the_sums()
    for wrong in (
        [*first, f"generation 2 0 1 12 7 {right + 1} 2.0"],
        [*first, f"generation 2 0 1 12 8 {right} 2.0"],
        [*first, f"generation 2 0 2 12 7 {right} 2.0", "generation 2 1 2 13 0 0.0 2.0"],
    ):
        with pytest.raises(jobs.Failed):
            job(*wrong).check_the_sums()


def test_a_kill_counts_until_all_survivors_of_a_generation_did_a_step(load: Any, tmp_path: Path) -> None:
    recovery, jobs = load("recovery"), load("recovery_jobs")
    job = jobs.Job(tmp_path / "job", recovery.parse([]))
    for line in (
        "generation 1 0 2 11 0 0.0 1.0", "generation 1 1 2 12 0 0.0 1.0", "step 1 1.1", "step 1 1.2",
        "lost 1 2.010", "generation 2 0 1 12 7 0.0 2.030", "step 2 2.050",
    ):  # fmt: skip
        job._take(line)
    row = recovery.row_of(job, recovery.Kill("moment", 11, 2.0, "backward"))
    assert (row["generation"], row["left"], row["phase"]) == (2, 1, "backward")
    assert [row[name] for name in ("known", "formed", "step")] == pytest.approx([10, 30, 50])
    with pytest.raises(jobs.Failed, match="nothing came after"):
        recovery.row_of(job, recovery.Kill("moment", 12, 2.1, "pause"))
