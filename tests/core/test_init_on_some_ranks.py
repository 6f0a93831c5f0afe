"""init() and shutdown() on some of the ranks, twice, and use afterwards: the result, or an error that says who and what."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("numpy")
pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

PROGRAM = """
import os, sys, time
import numpy as np
import horoclone as hvd
rank, began = int(os.environ["HOROVOD_RANK"]), time.monotonic()

def reduced():
    return hvd.rank(), hvd.size(), hvd.allreduce(np.ones(1), op=hvd.Sum, name="w").tolist()

def tried(what, call, *arguments, **named):
    try:
        said = str(call(*arguments, **named))
    except Exception as error:
        said = f"{type(error).__name__} {error}"
    os.write(1, f"said {rank} {what}: {' '.join(said.split())} (after {time.monotonic() - began:.0f} s)\\n".encode())

def done():
    open(f"{os.environ['FOLDER']}/{rank}", "w").close()

def stay_until_done(*others):
    while not all(os.path.exists(f"{os.environ['FOLDER']}/{other}") for other in others):
        time.sleep(0.05)

"""


@pytest.fixture
def said(launch, tmp_path):
    """What three ranks say: [rank][what]."""

    def run(body: str) -> list[dict[str, str]]:
        start = [sys.executable, "-m", "horoclone.launch", "-np", "3", sys.executable, "-c", PROGRAM + body]
        env = {"HOROCLONE_START_TIMEOUT": "6", "FOLDER": str(tmp_path)}
        done = launch(start, env=env, timeout_s=100)
        told: list[dict[str, str]] = [{}, {}, {}]
        for line in done.stdout.splitlines():
            if "said " in line:
                rank, what = line.split("said ", 1)[1].split(" ", 1)
                name, text = what.split(": ", 1)
                told[int(rank)][name] = text
        return told

    return run


def test_a_rank_that_lives_and_does_not_call_init_is_named(said):
    told = said("""
if rank == 1:
    stay_until_done(0, 2)
else:
    tried("init", hvd.init)
    done()
""")
    gave_up = [one["init"] for one in (told[0], told[2]) if one["init"].startswith("Timeout ")]
    assert gave_up and all("missing: rank 1" in text for text in gave_up), (
        told
    )  # the first ends the other's wait
    assert all("HOROCLONE_START_TIMEOUT (seconds)" in text for text in gave_up), told


def test_some_ranks_alone_and_the_others_not_at_all(said):
    told = said("""
if rank != 1:
    hvd.init(comm=[0, 2])
    tried("works", reduced)
else:
    tried("works", reduced)
    tried("init", hvd.init, comm=[0, 2])
""")
    assert told[0]["works"].startswith("(0, 2, [2.0])") and told[2]["works"].startswith("(1, 2, [2.0])"), told
    assert "NotInitialized" in told[1]["works"] and "use hvd.init()" in told[1]["works"], told
    assert (
        "ValueError init(comm=[0, 2]): this process is rank 1, which is not in the list" in told[1]["init"]
    ), told


def test_two_worlds_of_one_job(said):
    told = said("""
hvd.init(comm=[2] if rank == 2 else [0, 1])
tried("works", reduced)
""")
    assert [one["works"].split(") (")[0] for one in told] == [
        "(0, 2, [2.0]",
        "(1, 2, [2.0]",
        "(0, 1, [1.0]",
    ], told


def test_lists_of_ranks_that_differ_end_within_the_limit(said):
    told = said("""
tried("init", hvd.init, comm=[0, 1, 2] if rank == 1 else [0, rank])
""")
    for rank, one in enumerate(told):
        assert one["init"].startswith(("Timeout", "PeerLost", "ValueError", "Mismatch", "None")), told
        assert rank != 1 or not one["init"].startswith("None"), told


def test_another_init_that_asks_for_something_else_says_what_there_is(said):
    told = said("""
pair = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[pair])
tried("same", hvd.init)
tried("alike", hvd.init, comm=[0, 1, 2], process_sets=[hvd.ProcessSet([1, 0])])
tried("ranks", hvd.init, comm=[0, 1])
tried("sets", hvd.init, process_sets=[hvd.ProcessSet([1, 2])])
tried("dynamic", hvd.init, process_sets="dynamic")
tried("works", reduced)
""")
    for rank, one in enumerate(told):
        assert "has been called already, without it" in one["dynamic"], told
        assert one["same"].startswith("None") and one["alike"].startswith("None"), told
        assert (
            f"init(comm=[0, 1]): hvd.init() has been called already, and this process is rank {rank} of 3"
            in one["ranks"]
        )
        assert "hvd.shutdown() before" in one["ranks"] and "hvd.add_process_set()" in one["ranks"], told
        assert "has been called already, without" in one["sets"] and "[1, 2]" in one["sets"], told
        assert one["works"].startswith(f"({rank}, 3, [3.0])"), told


def test_a_rank_that_shuts_down_is_named_to_those_that_go_on_and_its_next_init_names_them(said):
    told = said("""
hvd.init()
reduced()
if rank == 1:
    hvd.shutdown()
    tried("after", reduced)
    tried("again", hvd.init)
    done()
else:
    tried("goes on", hvd.allreduce, np.ones(1), name="x")
    stay_until_done(1)
""")
    for rank in (0, 2):
        assert "rank 1 (" in told[rank]["goes on"] and "has shut down" in told[rank]["goes on"], told
        assert "hvd.join()" in told[rank]["goes on"], told
    assert "NotInitialized" in told[1]["after"], told
    assert "missing: ranks 0, 2" in told[1]["again"], told
