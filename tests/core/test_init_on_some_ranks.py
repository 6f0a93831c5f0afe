"""init() and shutdown() on some of the ranks, twice, and use afterwards: the result, or an error that says who and what."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from worker_pool import say

import horoclone as hvd


def my_rank():
    """As which this process was started."""
    return int(os.environ["HOROCLONE_RANK"])


def reduced():
    return hvd.rank(), hvd.size(), hvd.allreduce(np.ones(1), op=hvd.Sum, name="w").tolist()


def tried(what, call, *arguments, **named):
    try:
        text = str(call(*arguments, **named))
    except Exception as error:
        text = f"{type(error).__name__} {error}"
    say(what=what, text=" ".join(text.split()))


def done(folder):
    Path(folder, str(my_rank())).touch()


def stay_until_done(folder, *others):
    while not all(Path(folder, str(other)).exists() for other in others):
        time.sleep(0.02)


@pytest.fixture
def told(worker_pool):
    """told(body): what three ranks say, [rank][what]."""

    def run(body, **more):
        team = worker_pool(body, 3, env={"HOROCLONE_START_TIMEOUT": "3"}, **more)
        team.wait(60)
        return [{one["what"]: one["text"] for one in team.said(rank, "what")} for rank in range(3)]

    return run


def two_of_three():
    if my_rank() != 1:
        hvd.init(comm=[0, 2])
        tried("works", reduced)
    else:
        tried("works", reduced)
        tried("init", hvd.init, comm=[0, 2])


def test_some_ranks_alone_and_the_others_not_at_all(told):
    said = told(two_of_three)
    assert said[0]["works"].startswith("(0, 2, [2.0])") and said[2]["works"].startswith("(1, 2, [2.0])"), said
    assert "NotInitialized" in said[1]["works"] and "use hvd.init()" in said[1]["works"], said
    text = "ValueError init(comm=[0, 2]): this process is rank 1, which is not in the list"
    assert text in said[1]["init"], said


def different_lists():
    tried("init", hvd.init, comm=[0, 1, 2] if my_rank() == 1 else [0, my_rank()])


def test_lists_of_ranks_that_differ_end_within_the_limit(told):
    said = told(different_lists)
    for rank, one in enumerate(said):
        assert one["init"].startswith(("Timeout", "PeerLost", "ValueError", "Mismatch", "None")), said
        assert rank != 1 or not one["init"].startswith("None"), said


def again_and_differently():
    hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    tried("same", hvd.init)
    tried("alike", hvd.init, comm=[0, 1, 2], process_sets=[hvd.ProcessSet([1, 0])])
    tried("ranks", hvd.init, comm=[0, 1])
    tried("sets", hvd.init, process_sets=[hvd.ProcessSet([1, 2])])
    tried("dynamic", hvd.init, process_sets="dynamic")
    tried("works", reduced)


def test_another_init_that_asks_for_something_else_says_what_there_is(told):
    said = told(again_and_differently)
    for rank, one in enumerate(said):
        assert "has been called already, without it" in one["dynamic"], said
        assert one["same"] == one["alike"] == "None", said
        there = f"init(comm=[0, 1]): hvd.init() has been called already, and this process is rank {rank} of 3"
        assert there in one["ranks"], said
        assert "hvd.shutdown() before" in one["ranks"] and "hvd.add_process_set()" in one["ranks"], said
        assert "has been called already, without" in one["sets"] and "[1, 2]" in one["sets"], said
        assert one["works"] == f"({rank}, 3, [3.0])", said


def one_shuts_down(folder):
    hvd.init()
    reduced()
    if my_rank() == 1:
        hvd.shutdown()
        tried("after", reduced)
        tried("again", hvd.init)
        done(folder)
    else:
        tried("goes on", hvd.allreduce, np.ones(1), name="x")
        stay_until_done(folder, 1)


def test_a_rank_that_shuts_down_is_named_to_those_that_go_on_and_its_next_init_names_them(told, tmp_path):
    said = told(one_shuts_down, folder=str(tmp_path))
    for rank in (0, 2):
        assert "rank 1 (" in said[rank]["goes on"] and "has shut down" in said[rank]["goes on"], said
        assert "hvd.join()" in said[rank]["goes on"], said
    assert "NotInitialized" in said[1]["after"], said
    assert "missing: ranks 0, 2" in said[1]["again"], said
    assert "HOROCLONE_START_TIMEOUT (seconds)" in said[1]["again"], said
