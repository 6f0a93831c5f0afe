"""Data between nodes through MPI: real mpirun, Open MPI and MPICH. Every rank says that it is a node of its own."""

from __future__ import annotations

import json
import sys

import pytest

from horoclone import errors
from horoclone.bootstrap.mpi_link import MAX_OFFER_BYTES, Offer, agree, key_of, split
from horoclone.selection import MAX_WAYS_SENT

RANK = """
import json, os, sys
words = sys.argv[1].split(",")
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or os.environ["HOROCLONE_RANK"])
per_node = 2 if "pairs" in words else 1
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


MEMORY = """
import json, os, sys
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
os.environ["HOROCLONE_NODE"] = f"node-{rank}"
import horoclone as hvd
from horoclone import selection
from horoclone.runtime import native
file = selection.cache_file(os.environ)

def life(name, content=None):
    selection._found.clear()  # as in a process that has just begun
    if content is not None and rank == 0:
        file.write_text(content)
    hvd.init()
    found = json.loads(native().counters())
    hvd.shutdown()
    os.write(1, f"\\n@{json.dumps([name, rank, found['way_probes'], found['between_nodes']])}\\n".encode())

life("first")
hvd.init(); again = json.loads(native().counters())["way_probes"]; hvd.shutdown()
assert again == 0, again
life("from the file")
if rank == 1:
    os.environ["UCX_TLS"] = "tcp"
life("another fabric")
os.environ.pop("UCX_TLS", None)
life("broken", "{")
keys = list(json.loads(file.read_text())) if rank == 0 else []
life("given mpi", json.dumps({key: "mpi" for key in keys}))
life("given tcp", json.dumps({key: "tcp" for key in keys}))
life("nonsense", json.dumps({key: "pigeon" for key in keys}))
os.environ["HOROCLONE_SELECTION"] = "fixed"
life("fixed", json.dumps({key: "mpi" for key in keys}))
"""


@pytest.fixture
def ranks(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK)

    def command(*words: str) -> list[str]:
        return [sys.executable, str(path), ",".join(words)]

    return command


@pytest.mark.mpi
@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("open_mpi", 4, ("by=mpi", "pairs", "user")),
        ("mpich", 2, ("by=mpi",)),
        ("open_mpi", 2, ("by=mpi",)),
        ("mpich", 4, ("by=mpi", "pairs", "user")),
    ],
    ids=["Open MPI, 2 nodes of 2", "MPICH, 2 nodes", "Open MPI, 2 nodes", "MPICH, 2 nodes of 2"],
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
def test_what_the_probe_found_is_remembered_for_these_hosts_and_links(launch, open_mpi, tmp_path):
    program = tmp_path / "memory.py"
    program.write_text(MEMORY)
    env = {**open_mpi.env, "XDG_CACHE_HOME": str(tmp_path), "HOROCLONE_SELECTION": ""}
    done = launch([*open_mpi.command(2), sys.executable, str(program)], env=env)
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("@"):
            name, rank, probes, way = json.loads(line[1:])
            found.setdefault(name, {})[rank] = (probes, way)
    assert all(len(ranks) == 2 and len(set(ranks.values())) == 1 for ranks in found.values()), done.output
    probes = {name: ranks[0][0] for name, ranks in found.items()}
    assert [name for name, count in probes.items() if count == 0] == [
        "from the file",
        "given mpi",
        "given tcp",
    ]
    assert found["from the file"][0][1] == found["first"][0][1]
    assert (found["given mpi"][0][1], found["given tcp"][0][1]) == ("mpi", "tcp")


def test_the_key_is_of_hosts_links_layout_and_library():
    def key(*ranks: tuple[str, str], library: str = "Some MPI 5") -> str:
        return key_of([Offer(node, library=library, place=place) for node, place in ranks])

    a, b = ("a", "here (2 cores; eth0 10000 9000)"), ("b", "there (2 cores; eth0 10000 9000)")
    assert key(a, b) == key(b, a)
    others = [
        key(a, b, b),
        key(a, ("c", a[1])),
        key(a, ("b", "there (2 cores; eth0 1000 1500)")),
        key(a, b, library="Some MPI 6"),
    ]
    assert len({key(a, b), *others}) == 5
    many = [(f"n{number}", f"host{number}") for number in range(600)]
    assert len(key(*many)) < 200 and key(*many) != key(*many[:-1], ("n", "host"))
    offer = Offer("n", place="x" * 200, known={f"{n:016x}": "mpi" for n in range(MAX_WAYS_SENT)})
    assert len(offer.around(b"")) < MAX_OFFER_BYTES


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
