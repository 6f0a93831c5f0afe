"""horoclone.spark.run in the driver's JVM, and with run_elastic on two executors: values, errors, JVMs that are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]


def test_ranks_know_each_other_and_give_their_values(local: Any) -> None:
    done = local.ask("run_twice")
    # rank, local rank, local size, sum, variables with a secret in their name, a variable of ours
    assert done["values"] == [[0, 0, 2, 3.0, [], "green"], [1, 1, 2, 3.0, [], "green"]]
    assert [one[3] for one in done["again"]] == [5.0, 5.0]
    for rank in (0, 1):
        assert f"[{rank}] rank {rank} is here\n" in done["out"]
        assert f"[{rank}] rank {rank} complains\n" in done["err"]
    assert "SECRET" not in done["conf"].upper().replace("SPARK.REDACTION.REGEX", "")


@pytest.mark.long(40)
def test_errors_say_what_to_do_and_the_application_stays_usable(cluster: Any) -> None:
    done = cluster.ask("errors")
    found = done["found"]
    first = found["before init"]
    assert (
        first["kind"] == "RunError" and first["rank"] == 1 and first["cause"] == "ValueError('bad batch 17')"
    )
    assert "rank 1 (task-1.0@" in first["text"] and first["seconds"] < 60
    few = found["too few"]
    assert few["kind"] == "Timeout" and "0 of 5 Spark tasks were started within 3 s" in few["text"]
    assert "slots for 2" in few["text"] and "num_proc" in few["text"]
    elastic = found["elastic too few"]
    assert elastic["kind"] == "Timeout" and "2 of 5 Spark tasks were started within 3 s" in elastic["text"]
    assert found["mpi"]["kind"] == "Unsupported" and "use_mpi" in found["mpi"]["text"]
    assert found["no function"]["kind"] == "ValueError" and "int" in found["no function"]["text"]
    assert "num_proc" in found["no ranks"]["text"] and "start_timeout=-1" in found["timeout"]["text"]
    assert "min_num_proc=3 <= num_proc=2" in found["sizes"]["text"]
    assert "/no/such/python" in found["python"]["text"] and found["python"]["kind"] == "RunError"
    assert done["after"] == [[0, 0, 2, 3.0], [1, 1, 2, 3.0]]


@pytest.mark.long(40)
def test_two_jobs_share_a_cluster(cluster: Any) -> None:
    assert {value: one[0][3] for value, one in cluster.ask("two_at_once").items()} == {
        "10": 10.0,
        "20": 20.0,
    }


@pytest.mark.long(40)
def test_a_killed_executor_ends_the_job_with_rank_node_and_cause(cluster: Any) -> None:
    failure, after = cluster.ask("executor_killed", 400)
    assert failure["kind"] == "RunError" and failure["rank"] == 1, failure
    assert "rank 1 (task-1.0@" in failure["text"] and "the Spark task was lost" in failure["text"]
    assert "Spark says: " in failure["text"] and "rank 0 was stopped because of this" in failure["text"]
    assert after == [0, 1]


@pytest.mark.long(40)
def test_an_elastic_job_goes_on_without_a_killed_executor(cluster: Any) -> None:
    done = cluster.ask("elastic_executor_killed", 400, pause_s=0.1, count=50)
    assert 0 < done["recovered_s"] < 30, done
    ends = [(rank, size, total - step) for rank, size, step, total, _ in done["values"]]
    assert ends == [(0, 2, 0.0), (1, 2, 0.0)], (
        "the lost rank was replaced, and no step was lost or done twice"
    )


@pytest.mark.long(40)
def test_an_elastic_job_of_which_all_workers_fail_says_why(cluster: Any) -> None:
    failure = cluster.ask("elastic_fails")
    assert failure["kind"] == "RunError" and "bad batch 17" in failure["text"], failure


@pytest.mark.long(40)
def test_ranks_of_a_torch_distributor_find_each_other(cluster: Any) -> None:
    expected = [[0, 0, 2, 3.0], [1, 1, 2, 3.0]]
    assert cluster.ask("torch_distributor", 400, local_mode=True) == expected
    assert cluster.ask("torch_distributor", 400, local_mode=False) == expected


@pytest.mark.long(40)
@pytest.mark.parametrize("elastic", [False, True], ids=["static", "elastic"])
def test_nothing_outlives_a_driver_that_is_killed(elastic: bool, application: Any, tmp_path: Path) -> None:
    driver = application("local-cluster[2,1,1025]" if elastic else "local[2]")
    driver.begin("dies_while_ranks_run", folder=str(tmp_path), elastic=elastic)
    pattern, deadline = "pid.*" if elastic else "rank.*", time.monotonic() + 240
    while len(list(tmp_path.glob(pattern))) < 2:
        assert time.monotonic() < deadline and driver.started.process.poll() is None, driver.started.stderr
        time.sleep(0.1)
    os.kill(driver.started.process.pid, signal.SIGKILL)
    driver.started.process.wait(10)
    left = driver.started.left_over(10.0)
    assert not left, left


def test_a_program_without_a_session_is_told_so(engines: Path, launch: Any) -> None:
    code = "import horoclone.spark as s\ntry: s.run(print)\nexcept s.runner.Unsupported as e: print(e)"
    done = launch([engines, "-c", code], env={"PATH": "/nowhere", "JAVA_HOME": ""})
    assert "Could not find an active SparkContext" in done.stdout and "java is not on PATH" in done.stdout
