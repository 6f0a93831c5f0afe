"""Data between nodes through MPI: real mpirun, Open MPI and MPICH. Every rank says that it is a node of its own."""

from __future__ import annotations

import sys

import pytest

from horoclone import errors
from horoclone.bootstrap.mpi_link import Offer, agree, split

RANK = """
import json, os, sys
words = sys.argv[1].split(",")
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["HOROCLONE_RANK"])
per_node = 2 if "pairs" in words else 1
if "one-node" not in words:
    os.environ["HOROCLONE_NODE"] = f"node-{rank // per_node}"
for word in words:
    if word.startswith("by="):
        os.environ["HOROVOD_CPU_OPERATIONS"] = word[3:]
    if word == f"rank{rank}-by-tcp":
        os.environ["HOROVOD_CPU_OPERATIONS"] = "gloo"
if "mpi-first" in words:
    from mpi4py import MPI
import numpy as np
import horoclone as hvd
from horoclone.runtime import native

def say(text):
    os.write(1, f"\\nrank {rank}: {text}\\n".encode())

def check():
    size = hvd.size()
    for count in (1, 1023, 1 << 20):
        for dtype in ("float32", "int64"):
            mine = (np.arange(count) % 11 + hvd.rank()).astype(dtype)
            whole = np.asarray(hvd.allreduce(mine, op=hvd.Sum, name=f"sum.{count}.{dtype}"))
            np.testing.assert_array_equal(whole, sum((np.arange(count) % 11 + r).astype(dtype) for r in range(size)))
    rows = hvd.allgather(np.full((hvd.rank() + 1, 300), hvd.rank(), np.float32), name="rows")
    assert [int(r) for r in rows[:, 0]] == [r for r in range(size) for _ in range(r + 1)]
    last = hvd.broadcast(np.full(100_000, hvd.rank(), np.float32), size - 1, name="last")
    assert (last == size - 1).all()
    handles = [hvd.allreduce_async(np.full(3000, i, np.float32), op=hvd.Sum, name=f"many.{i}") for i in range(40)]
    assert all((hvd.synchronize(handle) == size * i).all() for i, handle in enumerate(handles))

try:
    for life in range(2):
        hvd.init()
        check()
        try:
            hvd.allreduce(np.ones(3 + hvd.rank(), np.float32), name="different")
        except hvd.HorovodInternalError as error:
            assert "different" in str(error)
        check()
        way = json.loads(native().counters())["between_nodes"]
        if "user" in words:  # the user's own messages are left alone
            from mpi4py import MPI
            assert MPI.COMM_WORLD.allreduce(1) == hvd.size()
        hvd.shutdown()
    say(f"done by {way}")
except hvd.HorovodInternalError as error:
    say(f"{type(error).__name__}: {error}")
    sys.exit(3)
"""


@pytest.fixture
def ranks(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK)

    def command(*words: str) -> list[str]:
        return [sys.executable, str(path), ",".join(words)]

    return command


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["open_mpi", "mpich"])
@pytest.mark.parametrize(
    ("size", "words"),
    [(2, ("by=mpi",)), (4, ("by=mpi", "pairs", "user"))],
    ids=["2 nodes", "2 nodes of 2"],
)
def test_mpi_moves_the_data_when_it_is_asked_to(launch, request, ranks, name, size, words):
    mpi = request.getfixturevalue(name)
    done = launch([*mpi.command(size), *ranks(*words)], env=mpi.env)
    assert done.stdout.count("done by mpi") == size, done.output


@pytest.mark.mpi
def test_an_mpi_that_is_up_is_tried_and_one_that_is_not_is_left_alone(launch, open_mpi, ranks):
    done = launch([*open_mpi.command(2), *ranks("by=auto", "mpi-first")], env=open_mpi.env)
    ways = [line.rsplit(" ", 1)[1] for line in done.stdout.splitlines() if "done by" in line]
    assert ways in (["mpi", "mpi"], ["tcp", "tcp"]), done.output  # the faster one: both ranks say the same
    done = launch([*open_mpi.command(2), *ranks("by=auto")], env=open_mpi.env)
    assert done.stdout.count("done by tcp") == 2, done.output


@pytest.mark.mpi
def test_within_one_node_mpi_is_not_needed(launch, open_mpi, ranks):
    done = launch([*open_mpi.command(2), *ranks("by=mpi", "one-node")], env=open_mpi.env)
    assert done.stdout.count("done by tcp") == 2, done.output


@pytest.mark.mpi
def test_every_rank_says_which_one_cannot_and_why(launch, open_mpi, ranks):
    done = launch([*open_mpi.command(2), *ranks("by=mpi", "rank1-by-tcp")], env=open_mpi.env, check=False)
    assert done.returncode != 0
    assert done.stdout.count("rank 1 cannot use it: HOROCLONE_CPU_OPERATIONS is gloo there") == 2, done.output


def offers(*ranks: int, **more: object) -> list[Offer]:
    return [
        Offer(f"node-{i}", rank=rank, world_size=2, library="Some MPI", **more)
        for i, rank in enumerate(ranks)
    ]


def test_ranks_of_different_mpi_jobs_are_refused_only_if_mpi_is_demanded():
    import time

    deadline = time.monotonic() + 5
    assert agree(offers(0, 0), "job", deadline) is None
    with pytest.raises(errors.Unsupported, match="not one MPI job"):
        agree(offers(0, 0, forced=True), "job", deadline)
    with pytest.raises(errors.Unsupported, match="rank 1 cannot use it: MPI is not initialised there"):
        agree([*offers(0, forced=True), Offer("other")], "job", deadline)
    one_node = [Offer("same", forced=True), Offer("same", forced=True)]
    assert agree(one_node, "job", deadline) is None


def test_an_introduction_that_cannot_be_read_names_its_rank():
    good = Offer("node").around(b"endpoint")
    assert split([good]) == ([b"endpoint"], [Offer("node")])
    for bad in (b"", b"\xff\xff\xff\xff", good[:-1], good[:-1] + b',"x":1}'):
        with pytest.raises(errors.HorovodInternalError, match="rank 1 introduced itself"):
            split([good, bad])
