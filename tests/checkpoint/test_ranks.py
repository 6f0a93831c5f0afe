"""Saves of real ranks: what all of them hear when one cannot write, comes late, or is killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import Worlds, ranks

import horoclone as hvd
from horoclone.checkpoint import files
from horoclone.runtime import current


def a_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "w": np.full((100, 3), value, np.float32),
        "b": [np.arange(5.0), np.arange(60)],
        "epoch": int(value),
        "mine": hvd.checkpoint.Owned({"of": hvd.rank()}),
    }


def fails(call: Any, kind: type[BaseException] = RuntimeError) -> str:
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path)


@ranks(3)
def test_ranks_save_together_and_load_what_they_saved(place):
    hvd.checkpoint.save(place, a_state(1))
    hvd.checkpoint.save(place, a_state(2), keep=1)
    done = hvd.checkpoint.wait()
    assert done is not None and done.name == "save-00000002" and hvd.checkpoint.wait() is None
    found = hvd.checkpoint.load(place)
    assert found["epoch"] == 2 and (found["w"] == 2).all() and found["w"].shape == (100, 3)
    assert [one["of"] for one in found["mine"]] == list(range(hvd.size()))
    files_there = [n for n in os.listdir(done) if n.endswith(".safetensors") and "own" not in n]
    assert len(files_there) == hvd.size()
    hvd.barrier()
    assert hvd.checkpoint.saves(place) == [2]


@ranks(2)
def test_what_changes_after_save_is_not_saved(place):
    state = a_state(1)
    hvd.checkpoint.save(place, state)
    state["w"][:] = 7
    state["epoch"] = 7
    hvd.checkpoint.wait()
    found = hvd.checkpoint.load(place)
    assert (found["w"] == 1).all() and found["epoch"] == 1


@ranks(2)
def test_training_goes_on_beside_a_save(place):
    for step in range(20):
        hvd.checkpoint.save(place, a_state(step))
        total = hvd.allreduce(np.full(1000, hvd.rank() + step, np.float32), name="gradient", op=hvd.Sum)
        assert (total == 1 + 2 * step).all()
    hvd.checkpoint.wait()
    assert hvd.checkpoint.saves(place) == [18, 19, 20] or hvd.rank() == 1


@ranks(2)
def test_a_slow_disk_of_one_rank_holds_up_the_next_save_and_nothing_else(place):
    real, answers = files._write_all, threading.Event()
    if hvd.rank() == 1:
        files._write_all = lambda *args: (answers.wait(20), real(*args))[1]
    try:
        hvd.checkpoint.save(place, a_state(1))
        total = hvd.allreduce(np.ones(3), name="a step", op=hvd.Sum)
        assert total[0] == 2 and hvd.checkpoint.saves(place) == [], "training goes on beside the save"
        hvd.barrier()
        threading.Timer(0.2, answers.set).start()
        hvd.checkpoint.save(place, a_state(2))
        assert hvd.checkpoint.saves(place)[0] == 1
        done = hvd.checkpoint.wait()
        assert done is not None and hvd.checkpoint.load(place)["epoch"] == 2
    finally:
        files._write_all = real


@ranks(2)
def test_a_save_that_failed_raises_at_the_next_save_and_at_wait_on_every_rank(place):
    if hvd.rank() == 1:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        files.os = type(
            "Os", (), {"__getattr__": lambda _, name: full if name == "fsync" else getattr(os, name)}
        )()
    try:
        hvd.checkpoint.save(place, a_state(1))
        text = fails(lambda: hvd.checkpoint.save(place, a_state(2)))
        assert "rank 1 could not write to" in text and "Free room there" in text, text
        hvd.checkpoint.save(place, a_state(3))
        assert "rank 1 could not write to" in fails(hvd.checkpoint.wait)
    finally:
        files.os = os
    hvd.checkpoint.save(place, a_state(4), async_=False)
    assert hvd.checkpoint.load(place)["epoch"] == 4
    assert sorted(os.listdir(place)) == [".owner", "save-00000001"]


@ranks(2)
def test_a_value_that_one_rank_cannot_save_is_told_on_both(place):
    state = a_state(1) if hvd.rank() == 0 else {"f": print}
    text = fails(lambda: hvd.checkpoint.save(place, state, async_=False), Exception)
    if hvd.rank() == 0:
        assert "rank 1 cannot save its state: state['f'] is a builtins" in text, text
    else:
        assert text.startswith("TypeError: state['f'] is a builtins"), text
    hvd.checkpoint.save(place, a_state(2), async_=False)


@ranks(2)
def test_paths_that_differ_are_told(place):
    own = os.path.join(place, str(hvd.rank()))
    text = fails(lambda: hvd.checkpoint.save(own, a_state(1), async_=False))
    assert "pass one path on all ranks" in text, text


@ranks(2)
def test_a_rank_that_does_not_come_is_told_within_the_deadline(place):
    if hvd.rank() == 0:
        began = time.monotonic()
        hvd.checkpoint.save(place, a_state(1), timeout_s=1.5)
        text = fails(hvd.checkpoint.wait)
        assert re.search(r"some rank has not come to hvd\.checkpoint\.\d+\.1\.begin in time", text), text
        assert 1.4 < time.monotonic() - began < 60
        hvd.send(np.ones(1), 1)
    else:
        hvd.recv(np.empty(1), 0)
        hvd.checkpoint.save(place, a_state(1), timeout_s=1.5)
        fails(hvd.checkpoint.wait)


@ranks(2)
@pytest.mark.parametrize("then", ["nothing", "begins again", "leaves"])
def test_a_save_that_shutdown_overtakes_is_told(place, then):
    begun, waits = threading.Event(), threading.Event()
    real = files.write_arrays

    def slow(*args: Any) -> Any:
        begun.set()
        waits.wait(20)
        return real(*args)

    files.write_arrays = slow
    try:
        hvd.checkpoint.save(place, a_state(1))
        assert begun.wait(20)
        hvd.shutdown()
        if then == "leaves":  # an elastic job, as planned: the others go on, and save again
            current.has_left = True
            waits.set()
            assert hvd.checkpoint.wait() is None
            return
        # As an elastic job does: the loss was told by other means, and saving goes on
        if then == "begins again":
            hvd.init()
            waits.set()
            hvd.checkpoint.save(place, a_state(2), async_=False)
            assert hvd.checkpoint.load(place)["epoch"] == 2
            return
        waits.set()
        assert "Call hvd.checkpoint.wait() before hvd.shutdown()" in fails(hvd.checkpoint.wait)
    finally:
        files.write_arrays, current.has_left = real, False


def killed_while_saving(place: str, call: str, victim: int) -> str:
    """The first save is whole; the second one's victim is killed before that call. What the other rank hears."""
    hvd.checkpoint.save(place, a_state(1), async_=False)
    if hvd.rank() == victim:

        def killed(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        files.os = type(
            "Os", (), {"__getattr__": lambda _, name: killed if name == call else getattr(os, name)}
        )()
    hvd.checkpoint.save(place, a_state(2))
    began = time.monotonic()
    text = fails(hvd.checkpoint.wait)
    assert time.monotonic() - began < 20
    assert hvd.checkpoint.load(place)["epoch"] == 1
    return text


@pytest.mark.in_turn
@pytest.mark.parametrize(("call", "victim"), [("write", 1), ("fsync", 0), ("rename", 0)])
def test_a_rank_that_is_killed_while_saving_hangs_nobody(
    worlds: Worlds, place: str, call: str, victim: int
) -> None:
    said = worlds.run(2, killed_while_saving, dies=[victim], place=place, call=call, victim=victim)
    assert said[1 - victim].startswith("PeerLost"), said


ENDS = """
import sys
import numpy as np
import horoclone as hvd
hvd.init()
if hvd.rank() == 0 or sys.argv[2] == "both":
    hvd.checkpoint.save(sys.argv[1], {"a": np.ones(3)}, timeout_s=20)
"""


@pytest.mark.parametrize("who", ["both", "rank 0"])
def test_a_process_whose_last_save_failed_does_not_end_with_success(
    launch: Any, tmp_path: Any, who: str
) -> None:
    start = [sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, "-c", ENDS]
    done = launch([*start, str(tmp_path / "saves"), who], check=False)
    said = "the last checkpoint has failed" in done.output
    assert (done.returncode == 0, said) == ((True, False) if who == "both" else (False, True)), done.output
