"""The test harness itself: what it says when ranks fail, hang or die, and that it leaves nothing."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from world import WorldFailed, Worlds


def my_rank() -> int:
    return int(os.environ["HOROCLONE_RANK"])


def fails_on_one() -> None:
    wrong = 41
    if my_rank() == 1:
        print("said before it failed")
        assert wrong == 42


def hangs_on_zero() -> None:
    if my_rank() == 0:
        time.sleep(60)
    raise ValueError("the others hang")


def dies_unasked() -> None:
    if my_rank() == 1:
        os.abort()


def test_a_failure_shows_the_traceback_the_values_and_the_output(worlds: Worlds) -> None:
    with pytest.raises(WorldFailed) as failed:
        worlds.run(2, fails_on_one, init=False)
    text = str(failed.value)
    assert "===== rank 0: passed" in text
    assert "assert wrong == 42" in text and "wrong = 41" in text and "said before it failed" in text


def test_a_hang_shows_every_stack_and_the_first_error(worlds: Worlds) -> None:
    began = time.monotonic()
    with pytest.raises(WorldFailed) as failed:
        worlds.run(2, hangs_on_zero, init=False, limit_s=2)
    text = str(failed.value)
    assert "rank 0: no end after 2 s" in text and "in hangs_on_zero" in text and "engine state" in text
    assert "ValueError: the others hang" in text
    assert time.monotonic() - began < 10


def test_an_unasked_death_names_the_signal_and_the_world_is_replaced(worlds: Worlds) -> None:
    with pytest.raises(WorldFailed, match="rank 1: died by SIGABRT"):
        worlds.run(2, dies_unasked, init=False)
    assert worlds.run(2, my_rank, init=False) == [0, 1]


def parent_and_hash() -> tuple[int, int]:
    return os.getppid(), hash("the name of a parameter")


def test_forked_workers_die_alone_and_neighbours_differ_as_programs_do() -> None:
    """They have other hashes of strings, and so other orders of sets: what depends on them is found."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    warm = [sys.modules["worker_pool"].WorkerPool(environment) for _ in range(2)]
    forked = Worlds(warm=lambda folder: warm)
    try:
        first, second, third = forked.run(3, parent_and_hash, init=False)
        assert first == third and first[0] != second[0] and first[1] != second[1]
        with pytest.raises(WorldFailed, match="rank 1: died by SIGABRT"):
            forked.run(3, dies_unasked, init=False)
        assert forked.run(3, my_rank, init=False) == [0, 1, 2]
    finally:
        forked.end()
        for pool in warm:
            pool.close()


def test_a_process_that_outlives_its_command_fails_the_test(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = sys.modules[type(launch).__module__].Started
    monkeypatch.setattr(started.left_over, "__defaults__", (0.2,))  # seconds
    sleeper = "import subprocess, sys; subprocess.Popen(['sleep', '30'], start_new_session=True)"
    with pytest.raises(AssertionError, match=r"processes outlived their command:\s+pid [0-9]+: sleep 30"):
        launch([sys.executable, "-c", sleeper])


def test_a_command_that_does_not_end_is_killed_with_its_children(launch: Any, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="ran for more than 1 s"):
        launch(["sh", "-c", "sleep 30 & sleep 30"], timeout_s=1)
    assert launch(["echo", "fine"]).stdout == "fine\n"
