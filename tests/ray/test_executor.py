"""RayExecutor with a fixed number of workers, on a real cluster of two logical nodes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)
BODIES = "static_jobs.py"


def test_workers_run_functions_and_keep_their_executables(ray_cluster: Any) -> None:
    ray_cluster("everything")


@pytest.mark.long(15)
def test_what_scripts_import_has_horovods_names(ray_cluster: Any) -> None:
    ray_cluster("names")


@pytest.mark.long(15)
def test_callbacks_hear_what_rank_0_logs(ray_cluster: Any) -> None:
    heard = ray_cluster("told", values=5)
    assert [one for one in heard if "value" in one] == [{"value": value, "rank": "0"} for value in range(5)]
    assert heard.count({"everybody": 1}) == 2


@pytest.mark.long(15)
def test_workers_of_a_host_are_together(ray_cluster: Any) -> None:
    ray_cluster("colocated")


@pytest.mark.long(15)
def test_inside_of_a_placement_group_workers_are_placed_there(ray_cluster: Any) -> None:
    ray_cluster("in_the_callers_group")


@pytest.mark.long(15)
def test_workers_of_a_node_see_each_others_gpus(ray_cluster: Any) -> None:
    ray_cluster("gpus_of_a_node")


@pytest.mark.long(15)
def test_the_secret_is_in_nobodys_environment(ray_cluster: Any) -> None:
    assert ray_cluster("hidden_secret") > 10


@pytest.mark.long(15)
def test_two_jobs_run_at_once_and_a_third_waits_for_room(ray_cluster: Any) -> None:
    ray_cluster("two_jobs")


@pytest.mark.long(15)
def test_a_killed_worker_is_named_with_its_node_and_the_cause(ray_cluster: Any) -> None:
    found = ray_cluster("killed_actor")
    print(f"raised after {found['seconds']:.2f} s")
    address, node, pid = found["place"]
    assert found["rank"] == 1 and found["cause"] in ("ActorDiedError", "RayActorError")
    for word in ("rank 1", address, node, str(pid)):
        assert word in found["text"], found["text"]
    assert "call shutdown() and start()" in found["after"]


@pytest.mark.long(15)
def test_a_killed_node_is_named_with_its_rank(ray_cluster: Any) -> None:
    found = ray_cluster("killed_node")
    print(f"raised after {found['seconds']:.2f} s")
    assert found["rank"] == found["killed"]
    assert f"rank {found['rank']}" in found["text"] and found["node"] in found["text"], found["text"]


@pytest.mark.long(15)
def test_a_placement_group_that_has_lost_a_node_is_made_anew(ray_cluster: Any) -> None:
    found = ray_cluster("half_dead_group")
    assert found["sizes"] == [3, 3, 3] and found["groups"] >= 2, found


@pytest.mark.long(15)
def test_a_worker_that_is_stopped_after_its_start_is_named(ray_cluster: Any) -> None:
    found = ray_cluster("stopped_worker")
    assert "of 2 have started and do not answer within 10 s" in found["text"], found["text"]
    assert str(found["pid"]) in found["text"], found["text"]


@pytest.mark.long(15)
def test_too_few_resources_end_with_what_was_asked_for_and_what_there_is(ray_cluster: Any) -> None:
    workers, hosts = ray_cluster("too_few_resources")
    assert "9 x {'CPU': 1} (PACK) for 2 s" in workers and "free in all: 4 CPU" in workers, workers
    assert "3 x {'CPU': 1} (STRICT_SPREAD)" in hosts and "2 CPU, 0 GPU, " in hosts, hosts


@pytest.mark.long(15)
def test_what_a_worker_raises_is_raised_in_the_driver(ray_cluster: Any) -> None:
    texts = ray_cluster("failing_functions")
    assert "no such data" in texts["constructor"] and "a mistake on every rank" in texts["all"]
    assert "SystemExit(4)" in texts["exit"] and "return a list" in texts["generator"]
    assert "only rank 1" in texts["one"] and "raised by rank 1 on " in texts["one"], texts["one"]
    assert "rank 1 has failed while ranks [0] wait" in texts["after one"]
    assert "rank 1 on " in texts["before init"] and "(node " in texts["before init"], texts["before init"]
