"""Autotune: every rank ends with the same settings, sums stay right meanwhile, the log and the flags do what they say."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import horoclone as hvd

COLUMNS = [
    "sample", "purpose", "steps", "bytes_per_second", "fusion_threshold", "cycle_time_ms",
    "hierarchical_allreduce", "ring_threshold_bytes", "flat_bytes", "block_bytes", "segment_bytes"
]  # fmt: skip
QUICK = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "1",
    "HOROVOD_LOG_LEVEL": "error",
}


def autotune():
    return hvd.metrics()["autotune"]


def reduce_until_settled(most=4000, process_sets=()):
    """Steps in which every sum is checked; True once no rank searches any more. Ranks stop after the same step."""
    rank, size = hvd.rank(), hvd.size()
    shapes = [(3,), (50, 7), (6000,), (40000,)]
    for step in range(most):
        inputs = [np.full(shape, rank + i + step % 5, np.int64) for i, shape in enumerate(shapes)]
        handles = [hvd.allreduce_async(x, name=f"t{i}", op=hvd.Sum) for i, x in enumerate(inputs)]
        mine = [s for s in process_sets if s.included()]
        own = [hvd.allreduce_async(inputs[3], name="own", op=hvd.Sum, process_set=s) for s in mine]
        ranks = sum(range(size))
        for i, handle in enumerate(handles):
            assert (hvd.synchronize(handle) == ranks + size * (i + step % 5)).all()
        for s, handle in zip(mine, own, strict=True):
            assert (hvd.synchronize(handle) == sum(s.ranks) + s.size() * (3 + step % 5)).all()
        if step % 10 == 9:
            searching = hvd.allreduce(np.array([autotune()["searching"]]), name="over", op=hvd.Max)[0]
            if not searching and step > 20:
                return True
    return False


def settle(sets=()):
    made = [hvd.ProcessSet(ranks) for ranks in sets]
    hvd.init(process_sets=made)
    settled = reduce_until_settled(process_sets=made)
    before = autotune()
    for _ in range(30):
        hvd.allreduce(np.ones(1000), name="later")
    after = autotune()
    hvd.shutdown()
    return settled, before, after


def rows_of(path):
    with Path(path).open() as file:
        lines = csv.DictReader(file)
        rows = list(lines)
    assert lines.fieldnames == COLUMNS
    return rows


def check_log(path, settings, most=20, warmups=1):
    """What every log of a finished search has; its last line are the settings in force."""
    rows = rows_of(path)
    assert [int(row["sample"]) for row in rows] == list(range(1, len(rows) + 1))
    purposes = [row["purpose"] for row in rows]
    assert purposes[: warmups + 1] == ["warmup"] * warmups + ["baseline"]
    assert purposes[-1] == "final" and set(purposes[warmups + 1 : -1]) <= {"trial", "recheck", "confirm"}
    assert len(rows) <= most + warmups + 1
    assert all(float(row["bytes_per_second"]) > 0 for row in rows)
    for name in COLUMNS[4:]:
        assert float(rows[-1][name]) == settings[name], name
    return rows


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared", "tcp"])
def test_ranks_settle_for_the_same_settings_and_log_how(worlds, tmp_path, shared):
    log = tmp_path / "autotune.csv"
    env = {**QUICK, "HOROVOD_AUTOTUNE_LOG": str(log), "HOROCLONE_SHARED_MEMORY": shared}
    ends = worlds.run(2, settle, init=False, env=env)
    for settled, before, after in ends:
        assert settled and not after["searching"]
        assert before == after == ends[0][2]
    rows = check_log(log, ends[0][2])
    tried = {name for name in COLUMNS[4:] if len({row[name] for row in rows}) > 1}
    algorithm = {"flat_bytes", "block_bytes"} if shared == "1" else {"ring_threshold_bytes", "segment_bytes"}
    assert tried == {"fusion_threshold", "cycle_time_ms"} | algorithm
    # The first row after the warm-up and everything that was not better: the defaults.
    assert rows[1]["fusion_threshold"] == str(128 << 20) and rows[1]["cycle_time_ms"] == "0"


def test_sets_with_another_first_rank_and_machines_follow(worlds):
    env = {**QUICK, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    ends = worlds.run(3, settle, init=False, env=env, sets=[[1, 2], [0, 2]])
    assert all(settled and after == ends[0][2] for settled, _, after in ends), ends


def three_lives(log):
    import os

    ends = []
    for on in ("1", "0", "1"):
        os.environ["HOROVOD_AUTOTUNE"] = on
        if on == "0":
            Path(log).unlink(missing_ok=True)
        hvd.init()
        assert reduce_until_settled()
        ends.append(autotune())
        hvd.shutdown()
        if on == "0":
            assert not Path(log).exists()
    return ends


def test_every_life_of_the_runtime_tunes_anew(worlds, tmp_path):
    log = tmp_path / "log.csv"
    env = {**QUICK, "HOROVOD_AUTOTUNE_LOG": str(log)}
    for first, without, last in worlds.run(2, three_lives, init=False, env=env, log=str(log)):
        assert first["changes"] > 0 and last["changes"] > 0
        assert without["changes"] == 0 and without["fusion_threshold"] == 128 << 20
    check_log(log, last)


def join_unevenly():
    """Ranks that join early stand in with zeros while settings go on changing."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    sums = []
    for step in range(100 + 60 * rank):
        here = sum(r + 1 for r in range(size) if step < 100 + 60 * r)
        got = hvd.allreduce(np.full(9000, rank + 1, np.int64), name=f"t{step % 3}", op=hvd.Sum)
        sums.append(bool((got == here).all()))
    last = hvd.join()
    end = autotune()
    hvd.shutdown()
    return all(sums), last, end


def test_ranks_that_join_stay_in_step(worlds):
    ends = worlds.run(3, join_unevenly, init=False, env=QUICK)
    assert [(right, last) for right, last, _ in ends] == [(True, 2)] * 3


def test_the_flags_of_the_launcher_reach_it(tmp_path):
    log = tmp_path / "log.csv"
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\nimport horoclone as hvd\nhvd.init()\n"
        "for step in range(50_000):\n"
        "    hvd.allreduce(np.ones(2000), name='x')\n"
        "    if step % 10 == 9:\n"
        "        mine = np.array([hvd.metrics()['autotune']['searching']])\n"
        "        if not hvd.allreduce(mine, name='over', op=hvd.Max)[0] and step > 20: break\n"
        "print('settled', not hvd.metrics()['autotune']['searching'])\n"
    )
    flags = (
        f"--autotune --autotune-log-file {log} --autotune-warmup-samples 2 --autotune-steps-per-sample 1 "
        "--autotune-bayes-opt-max-samples 4 --autotune-gaussian-process-noise 0.5"
    )
    command = [
        sys.executable, "-m", "horoclone.launch", "-np", "2", *flags.split(), sys.executable, str(script)
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.count("settled True") == 2, done.stdout + done.stderr
    assert "has no effect" not in done.stderr
    purposes = [row["purpose"] for row in rows_of(log)]
    assert purposes[:3] == ["warmup", "warmup", "baseline"] and purposes[-1] == "final"
    assert len(purposes) <= 2 + 4 + 1


def test_a_log_that_cannot_be_written_costs_a_warning(worker_pool):
    team = worker_pool(
        settle,
        2,
        env={**QUICK, "HOROVOD_AUTOTUNE_LOG": "/no such folder/x.csv", "HOROVOD_LOG_LEVEL": "warning"},
    )
    assert team.wait(60) == [0, 0], team.outputs()
    assert "HOROVOD_AUTOTUNE_LOG: '/no such folder/x.csv' cannot be written" in team.output(0)
    assert "autotune runs without a log" in team.output(0) and "HOROVOD_AUTOTUNE_LOG" not in team.output(1)
