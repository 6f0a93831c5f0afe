"""torch's own tests of process groups on the backend `horoclone`: a choice of them in every run, all in `make test-long`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("expecttest", reason="torch's tests need the package expecttest")

PROGRAM = Path(__file__).with_name("torchs_own.py")
CHOICE_S, ALL_S = 400, 1500  # what one pass over the choice, or over all of them, may take on a busy machine

# Where the group is -> tests of what is not in our own, or not in the same words; torch runs them on three ranks for gloo, too.
CHOICE = {
    "gloo": [
        "test_DistributedDataParallelCPU",
        "test_accumulate_gradients_no_sync_grad_is_view",
        "test_all_gather_coalesced_with_empty",
        "test_batch_isend_irecv_gloo_tags",
        "test_ddp_logging_data_cpu",
        "test_gather_checks",
        "test_get_future",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_static_graph_api_cpu",
    ],
    "mpi": [
        "test_all_to_all_complex",
        "test_all_to_all_group",
        "test_all_to_all_single_equal_split_full_group",
        "test_all_to_all_single_unequal_split",
        "test_broadcast_group",
    ],
}


def outcomes(
    launch: Any, report: Path, *arguments: str, timeout_s: float
) -> tuple[dict[str, list[str]], str]:
    """Name -> (passed, skipped or failed; why) and everything that was printed."""
    command = [sys.executable, PROGRAM, "--limit", "60", "--report", report, *arguments]
    done = launch(command, timeout_s=timeout_s, check=False)
    assert report.exists(), done.output
    return json.loads(report.read_text()), done.output


def of_kind(found: dict[str, list[str]], kind: str) -> dict[str, str]:
    return {name: text for name, (outcome, text) in found.items() if outcome == kind}


@pytest.mark.slow
@pytest.mark.timeout(CHOICE_S + 60)
@pytest.mark.parametrize("place", ["gloo", pytest.param("mpi", marks=pytest.mark.long(40))])
def test_a_choice_of_torchs_tests_passes(place: str, launch: Any, tmp_path: Path) -> None:
    names = CHOICE[place]
    found, output = outcomes(
        launch, tmp_path / "report", "--in-place-of", place, "--names", *names, timeout_s=CHOICE_S
    )
    wrong = {name: found.get(name) for name in names if found.get(name) != ["passed", ""]}
    assert not wrong, f"{wrong}\n{output}"


# Where the group is -> how many pass at least; the others are skipped by torch, for want of GPUs or by backend names.
PASS = {"horoclone": 65, "gloo": 86, "mpi": 90}


@pytest.mark.long(500)
@pytest.mark.timeout(ALL_S + 60)
@pytest.mark.parametrize("place", PASS)
def test_all_of_torchs_tests_pass_that_are_not_listed(place: str, launch: Any, tmp_path: Path) -> None:
    where = [] if place == "horoclone" else ["--in-place-of", place]
    found, output = outcomes(launch, tmp_path / "report", *where, timeout_s=ALL_S)
    assert not of_kind(found, "failed"), output
    passed = of_kind(found, "passed")
    assert len(passed) >= PASS[place], (
        f"{len(passed)} passed, the others were skipped: {of_kind(found, 'skipped')}"
    )


@pytest.mark.long(200)
@pytest.mark.timeout(CHOICE_S + 60)
@pytest.mark.parametrize("place", [place for place in PASS if place != "horoclone"])
def test_what_is_listed_still_fails(place: str, launch: Any, tmp_path: Path) -> None:
    found, output = outcomes(launch, tmp_path / "report", "--in-place-of", place, "--listed", timeout_s=160)
    assert found and of_kind(found, "failed").keys() == found.keys(), (
        f"take out what passes: {found}\n{output}"
    )
