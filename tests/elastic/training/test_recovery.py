"""Where the state of a generation comes from (memory, others, the disk, the script), and what is told about it."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from horoclone.elastic import recovery
from horoclone.elastic.recovery import PARTS
from horoclone.elastic.run import run_fn
from horoclone.elastic.state import ObjectState
from horoclone.errors import PeerLost

SCRIPT = Path(__file__).with_name("from_disk.py")
JOB = [
    sys.executable, "-m", "horoclone.launch", "-np", "2", "--min-np", "1", "-H", "localhost:2",
    sys.executable, SCRIPT
]  # fmt: skip


def records(text: str) -> list[tuple[dict[str, Any], int]]:
    """What the processes said, and the step at which each went on."""
    return [
        (json.loads(said), int(step)) for said, step in re.findall(r"recovery (\{.*?\}\}) at (\d+)", text)
    ]


def test_a_job_whose_ranks_were_all_killed_goes_on_from_the_disk_unless_a_save_is_damaged(
    launch: Any, tmp_path: Path
) -> None:
    checkpoint, saves = pytest.importorskip("horoclone.checkpoint"), tmp_path / "saves"
    started = launch.start([*JOB, tmp_path, "5000", "0"])
    started.until(lambda: len(checkpoint.saves(saves)) >= 2)
    told = records(started.stdout)  # before: who is killed last may go on alone for a moment
    started.kill()
    assert {record["source"] for record, _ in told} == {"start"}
    saved = checkpoint.load(saves)["attributes"]["step"]
    assert saved > 0
    done = launch([*JOB, tmp_path, str(saved + 7), "0"], timeout_s=60)
    told = records(done.stdout)
    assert [(record["source"], step) for record, step in told] == [("disk", saved)] * 2, done.output
    assert done.stdout.count(f"done {saved + 7}") == 2

    damaged = max(saves.iterdir()) / "rank-00001.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = launch([*JOB, tmp_path, str(saved + 20), "0"], timeout_s=60, check=False)
    assert done.returncode != 0 and not records(done.stdout), "nobody begins anew"
    text = r"rank 0 could not go on from the disk: .*rank-00001\.safetensors is damaged: "
    assert re.search(text, done.stderr), done.output


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"FROM_DISK_FULL": "1"}, "File too large"),
        (
            {"HOROCLONE_FAILPOINTS": "checkpoint.written=delay:600@2#1", "FROM_DISK_TIMEOUT": "3"},
            "some rank has not come to hvd.checkpoint",
        ),
    ],
    ids=["full", "stuck"],
)
def test_a_disk_that_is_full_or_stuck_ends_the_job_with_its_reason_and_the_save_before_stays(
    launch: Any, tmp_path: Path, fault: dict[str, str], said: str
) -> None:
    checkpoint = pytest.importorskip("horoclone.checkpoint")
    done = launch([*JOB, tmp_path, "5000", "0"], env=fault, timeout_s=90, check=False)
    assert done.returncode == 1 and "CheckpointError" in done.stderr and said in done.stderr, done.output
    saved = checkpoint.load(tmp_path / "saves")["attributes"]  # a job goes on from it: the test above
    assert 0 < saved["step"] <= 10 and saved["seen"] == list(range(1, saved["step"] + 1)), done.output


def test_a_lost_rank_is_in_the_record_and_in_the_timeline(launch: Any, tmp_path: Path) -> None:
    env = {"HOROVOD_TIMELINE": str(tmp_path / "timeline.json"), "FROM_DISK_UNTIL": "3"}
    done = launch([*JOB, tmp_path, "20", "12"], env=env, timeout_s=60)
    told = [record for record, _ in records(done.stdout)]
    alone = next(record for record in told if record["size"] == 1)
    assert alone["source"] == "memory" and alone["lost"] == [1] and alone["newcomers"] == []
    assert alone["generation"] == 2 and alone["commit"] > 0 and set(alone["seconds"]) == set(PARTS)
    later = [record for record in told if record["generation"] > 2]
    assert {record["source"] for record in later} == {"memory", "peers"}, done.output
    assert all(record["newcomers"] == [1] and record["bytes_moved"] > 0 for record in later)

    assert "RECOVERY" in (tmp_path / "timeline.json").read_text()
    events = json.loads((tmp_path / "timeline.generation2.json").read_text())
    spans = {one["name"]: one for one in events if one.get("ph") == "X" and one["name"].isupper()}
    assert set(spans) == {"RECOVERY", *(part.upper() for part in PARTS)}
    assert spans["RECOVERY"]["args"]["source"] == "memory" and spans["RECOVERY"]["args"]["lost"] == [1]
    took = sum(spans[part.upper()]["dur"] for part in PARTS)
    assert spans["RECOVERY"]["ts"] > 0 and took == pytest.approx(spans["RECOVERY"]["dur"], abs=10)


def test_the_record_of_one_process(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures before the next commit are one recovery; its parts add up to it."""
    monkeypatch.setattr(recovery.watch, "record", None)
    state, tries = ObjectState(lambda obj: obj, lambda: 0, step=0), []

    def train(state: Any) -> str:
        tries.append(recovery.last_recovery())
        if len(tries) == 1:
            state.commit()
            time.sleep(0.02)
        if len(tries) < 3:
            raise PeerLost("rank 1 is gone", 1)
        state.commit()
        return "done"

    numbers = iter((2, 3))
    assert run_fn(train, lambda: job.becomes(next(numbers), commit=2))(state) == "done"
    assert [record.source for record in tries] == ["start", "memory", "memory"]
    assert [record.generation for record in tries] == [1, 2, 3]
    assert "first_step" not in tries[1].seconds
    last = recovery.last_recovery()
    assert last is tries[2] and list(last.seconds) == list(PARTS) and last.seconds["noticed"] >= 0.02
    assert last.total_s == pytest.approx(sum(last.seconds.values()) - last.seconds["noticed"])


def test_numbers_of_saves_are_at_least_one(tmp_path: Path) -> None:
    pytest.importorskip("horoclone.checkpoint")
    state = ObjectState(lambda obj: obj, lambda: 0, step=0)
    with pytest.raises(ValueError, match="every=0, keep=3: both are at least 1"):
        state.checkpoint(tmp_path, every=0)
