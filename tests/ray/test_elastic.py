"""Elastic jobs on a real Ray cluster: workers and nodes are killed, come and go, and the job goes on."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(240), pytest.mark.long(60)]
BODIES = "elastic_jobs.py"


def test_slots_are_those_of_the_nodes(ray_cluster: Any) -> None:
    found = ray_cluster("discovery")
    assert sorted(found["all"].values()) == [2, 2] and sorted(found["large"].values()) == [1, 1]
    assert found["too large"] == {} and found["gpu"] == {}
    assert set(found["changing"]) == {1, 2}


def test_when_a_worker_is_killed_the_others_go_on_and_another_comes(ray_cluster: Any) -> None:
    found = ray_cluster("killed_actor")
    print(f"others after {found['others']:.2f} s, whole after {found['whole']:.2f} s")
    assert found["pids"][0] == found["before"][0] and found["pids"][1] == found["before"][2], (
        "survivors come first"
    )
    assert found["pids"][2] not in found["before"]
    assert [(rank, size) for rank, size, _ in found["values"]] == [(0, 3), (1, 3), (2, 3)]


def test_when_a_node_is_killed_the_others_go_on_and_a_spare_place_is_used(ray_cluster: Any) -> None:
    found = ray_cluster("killed_node")
    print(f"others after {found['others']:.2f} s, whole after {found['whole']:.2f} s")
    assert found["lost"] == 2 and [size for _, size, _ in found["values"]] == [4] * 4
    assert found["whole"] < 25, "something waits until Ray itself has seen the end of the node, 30 s"


def test_a_node_that_comes_is_used_and_one_that_drains_is_left_at_a_commit(ray_cluster: Any) -> None:
    found = ray_cluster("grows_and_shrinks")
    before, after = found["pids"]
    assert found["came"] == 4 and before == after, "no other process has changed"
    assert found["steps"][0] > found["steps"][1]
    assert [size for _, size, _ in found["values"]] == [4] * 4


def test_what_fails_on_every_worker_ends_the_job_with_its_cause(ray_cluster: Any) -> None:
    texts = ray_cluster("failing")
    assert "no such data" in texts["before_init"] and "Process name: " in texts["before_init"]
    assert "a mistake" in texts["after_init"] and "(node " in texts["after_init"]
    assert "was lost" in texts["dies"]


def test_too_few_slots_end_with_what_there_is(ray_cluster: Any) -> None:
    text = ray_cluster("too_few_slots")
    assert text.startswith("TimeoutException") and "at least 9" in text and "there were 4 slots" in text, text


def test_a_busy_cluster_is_used_as_far_as_it_is_free(ray_cluster: Any) -> None:
    found = ray_cluster("busy_cluster")
    assert found["sizes"] == [1, 2] and [size for _, size, _ in found["values"]] == [2, 2]


def test_the_older_executor_does_the_same(ray_cluster: Any) -> None:
    found = ray_cluster("older_executor")
    assert found["values"] == [[0, "yes"], [1, "yes"]] and found["heard"] == [{"size": 2}]


def test_the_secret_is_in_nobodys_environment(ray_cluster: Any) -> None:
    assert ray_cluster("hidden_secret") > 10
