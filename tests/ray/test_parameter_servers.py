"""Servers of a parameter server as actors of a real Ray cluster: Ray starts those that die, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(700), pytest.mark.long(60)]
BODIES = "parameter_server_jobs.py"


def test_killed_servers_are_started_again_and_no_update_is_lost(ray_cluster: Any) -> None:
    found = ray_cluster("killed_processes", timeout_s=640)
    assert found["lives"] == [True, True] and found["acknowledged"] > 1000 and found["exact"]


def test_a_server_moves_when_its_node_dies(ray_cluster: Any) -> None:
    assert ray_cluster("killed_node", timeout_s=640) == {"spread": 2, "moved": True, "exact": True}


def test_tasks_share_a_table(ray_cluster: Any) -> None:
    found = ray_cluster("tasks_share_a_table")
    assert found["row"] == [3.0, 3.0]
    assert found["secret"] not in found["text"]


def test_what_cannot_be_is_told(ray_cluster: Any) -> None:
    said = ray_cluster("wrong_wishes")
    assert said["copies"].startswith("ValueError: replicas=2 with servers=1")
    assert said["memory"].startswith("ValueError: memory=0")
    assert said["room"].startswith("TimeoutError: ") and "50" in said["room"] and "2 CPU" in said["room"]
