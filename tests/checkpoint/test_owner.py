"""One job at a time saves to a directory: a second one that lives is refused, one that has ended is followed at once."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from world import ranks

import horoclone as hvd
from horoclone.checkpoint import CheckpointError, files, load, owner, saves
from horoclone.checkpoint.saving import save_alone

# Saves when it is told to, and says what came of it. A child that it leaves behind lives on, as workers of loaders do.
JOB = """
import os, sys, time
import numpy as np
import horoclone as hvd
hvd.init()
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
for line in sys.stdin:
    try:
        hvd.checkpoint.save(sys.argv[1], {"of": line.strip(), "w": np.ones(3)}, keep=2, async_=False)
        print("saved", flush=True)
    except hvd.checkpoint.CheckpointError as error:
        print(error, flush=True)
"""


class Job:
    """A job of one process."""

    def __init__(self, path: Path, *more: str) -> None:
        command = [sys.executable, "-c", JOB, str(path), *more]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def saves(self, word: str) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start() -> Any:
    started: list[Job] = []

    def begin(*arguments: Any) -> Job:
        started.append(Job(*arguments))
        return started[-1]

    yield begin
    for job in started:
        try:
            os.killpg(job.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        job.process.wait()


def test_two_jobs_that_live_do_not_share_a_directory(tmp_path: Path, start: Any) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert first.saves("a") == "saved"
    text = second.saves("b")
    assert f"process {first.process.pid} on " in text and "directory of its own" in text, text
    assert first.saves("c") == first.saves("d") == "saved" and "still running" in second.saves("e")
    assert saves(tmp_path) == [2, 3] and [load(tmp_path, number=n)["of"] for n in (2, 3)] == ["c", "d"]
    first.kill()
    assert second.saves("f") == "saved" and load(tmp_path)["of"] == "f"


def test_a_job_that_is_started_again_goes_on_though_children_of_its_first_life_are_left(
    tmp_path: Path, start: Any
) -> None:
    first = start(tmp_path, "fork")
    assert first.saves("a") == "saved"
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    os.killpg(first.process.pid, 0)  # the child
    again = start(tmp_path)
    assert again.saves("b") == "saved" and load(tmp_path)["of"] == "b"


def test_a_name_that_leads_to_the_same_directory_is_no_way_around(tmp_path: Path, start: Any) -> None:
    place, other = tmp_path / "saves", tmp_path / "also"
    first = start(place)
    assert first.saves("a") == "saved"
    other.symlink_to(place)
    with pytest.raises(CheckpointError, match="still running saves to"):
        save_alone(other, {"w": np.ones(1)}, 1)
    assert start(other).saves("b").startswith("nothing was saved") and first.saves("c") == "saved"


def test_a_process_that_saves_twice_keeps_what_it_owns(tmp_path: Path, start: Any) -> None:
    """Also by another name of the directory, and after somebody has removed it."""
    place, other = tmp_path / "saves", tmp_path / "also"
    other.symlink_to(place)
    save_alone(place, {"n": 1}, 2)
    save_alone(other, {"n": 2}, 2)
    assert "still running" in start(place).saves("a")
    for name in os.listdir(place):
        files.remove(place / name)
    (place / owner.NAME).unlink()
    place.rmdir()
    save_alone(place, {"n": 3}, 2)
    assert load(place)["n"] == 3 and "still running" in start(place).saves("a")


def test_where_there_are_no_locks_a_save_goes_on_and_removes_nothing_young(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lockf(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(owner.fcntl, "lockf", lockf)
    tmp_path.joinpath(".incomplete-00000001-ab").mkdir()
    save_alone(tmp_path, {"n": 1}, 1)
    assert load(tmp_path)["n"] == 1 and tmp_path.joinpath(".incomplete-00000001-ab").exists()


def test_the_owner_is_no_link_to_somewhere_else(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / owner.NAME).symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        save_alone(tmp_path / "saves", {"n": 1}, 1)
    assert target.read_text() == "mine"


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path)


@ranks(2)
def test_rank_0_may_be_another_process_in_the_next_generation(place):
    hvd.checkpoint.save(place, {"n": 1}, async_=False)
    me = hvd.rank()
    hvd.shutdown()
    hvd.init(comm=[1, 0])
    assert hvd.rank() == 1 - me
    hvd.checkpoint.save(place, {"n": 2}, async_=False)
    assert hvd.checkpoint.load(place)["n"] == 2
    with open(f"{place}/{owner.NAME}") as file:
        assert (json.load(file)["process"] == os.getpid()) is (me == 0)
