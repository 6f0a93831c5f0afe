"""The first contact through Open MPI's PMIx server, with its mpirun; no native code is involved.

All ranks are on this host; the variable that says so is hidden from them, so that they take the way across hosts.
"""

from __future__ import annotations

import ctypes.util
import os
import shlex
import subprocess
import sys

import pytest

from horoclone.bootstrap import pmix

pytestmark = pytest.mark.mpi

# What one rank does. argv: comma list of words, in any order.
MEMBER = """
import os, signal, sys, time
words = sys.argv[1].split(",")
del os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
if "mpi-first" in words:
    from mpi4py import MPI
if "no-mpi4py" in words:
    sys.modules["mpi4py"] = None
from horoclone.bootstrap import detect, exchange, pmix
if "no-library" in words:
    pmix.find_library = lambda environ: os.devnull
if "late-0" in words and rank == 0:
    time.sleep(1.5)
if "killed-early" in words and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if "stuck-0" in words and rank == 0:
    time.sleep(30)
if "absent-0" in words and rank == 0:
    sys.exit(0)
limit_s = 3 if "hurry" in words else 30
if "wrong-size" in words:
    try:
        pmix.broadcast(os.environ, rank, 7, b"x", time.monotonic() + limit_s)
    except pmix.Unavailable as error:
        os.write(1, f"\\nrefused: {error}\\n".encode())
    sys.exit(0)
if "again" in words:
    sign = __file__ + ".published"
    for blob in (b"old", b"new") if rank == 0 else ():
        pmix.broadcast(os.environ, rank, 2, blob, time.monotonic() + limit_s)
    if rank == 0:
        open(sign, "w").close()
    while not os.path.exists(sign):
        time.sleep(0.01)
    if rank != 0:
        given = pmix.broadcast(os.environ, rank, 2, b"", time.monotonic() + limit_s)
        assert given == b"new", given
        open(sign + ".taken", "w").close()
    while not os.path.exists(sign + ".taken"):
        time.sleep(0.01)
if "large" in words:
    blob = bytes(range(256)) * 64
    for turn in range(3):
        given = blob[turn:] if rank == 0 else b""
        assert pmix.broadcast(os.environ, rank, 2, given, time.monotonic() + limit_s) == blob[turn:]
        open(f"{__file__}.{turn}.{rank}", "w").close()
        while not os.path.exists(f"{__file__}.{turn}.{1 - rank}"):
            time.sleep(0.01)
for contact in range(2):
    job = None
    for turn in range(20):
        deadline = time.monotonic() + limit_s
        job = exchange.open_job(None, os.environ, deadline, print, job)
        blobs = job.gather(b"%d@%d" % (job.rank, turn), deadline, print)
        assert blobs == [b"%d@%d" % (other, turn) for other in range(job.size)], blobs
    assert len(set(job.gather(job.secret, deadline, print))) == 1 and len(job.secret) == 32
    if "killed-late" in words:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    if rank == 0:
        time.sleep(0.2)  # the others' connections end first: no noise about a server that left
    job.close()
if "mpi-last" in words:
    from mpi4py import MPI
mpi = "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized()
if mpi:
    from mpi4py import MPI
    assert MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank) == job.size * (job.size - 1) // 2
    assert job.world_ranks_of(MPI.COMM_SELF) == [job.rank]
line = f"member {job.rank} of {job.size} mpi={bool(mpi)} exchanges={pmix._exchanges}"
how = [line for line in detect.explain(os.environ).splitlines() if "first contact" in line]
os.write(1, f"\\n{line}{how[0]}\\n".encode())
"""


@pytest.fixture
def ranks(launch, open_mpi, tmp_path):
    """ranks(size, *words, check=True): what became of a job whose ranks do as the words say."""
    path = tmp_path / "member.py"
    path.write_text(MEMBER)

    def run(size, *words, check=True):
        command = [*open_mpi.command(size), sys.executable, str(path), ",".join(words)]
        return launch(command, env=open_mpi.env, check=check)

    return run


def members(done, size):
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("member"))
    assert [line.split(" mpi=")[0] for line in lines] == [f"member {r} of {size}" for r in range(size)], (
        done.output
    )
    return lines


# MPI spins while it waits: with more ranks than cores it can take minutes on a busy machine, so only two ranks use it.
@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("size", "words"),
    [(4, ()), (2, ("mpi-last",)), (2, ("mpi-first",))],
    ids=["plain", "mpi last", "mpi first"],
)
def test_ranks_connect_without_mpi_and_mpi_works_beside_it(ranks, size, words):
    for line in members(ranks(size, *words), size):
        assert f"mpi={bool(words)} exchanges=2" in line
        assert "first contact: PMIx (OpenPMIx " in line


def test_a_late_rank_0_is_waited_for(ranks):
    assert all("mpi=False exchanges=2" in line for line in members(ranks(2, "late-0"), 2))


def test_a_large_value_arrives_whole_and_a_later_one_is_not_the_first(ranks):
    assert all("exchanges=5" in line for line in members(ranks(2, "large"), 2))


def test_a_rank_that_missed_an_exchange_catches_up(ranks):
    first, second = members(ranks(2, "again"), 2)
    assert "exchanges=4" in first and "exchanges=3" in second


def test_a_second_program_of_the_same_launcher_does_not_get_the_first_ones_value(launch, open_mpi, tmp_path):
    path = tmp_path / "exchange.py"
    path.write_text(EXCHANGE)
    python = shlex.quote(sys.executable)
    both = f"{python} {path} {path} first && {python} {path} {path} second 1"
    done = launch([*open_mpi.command(2), "sh", "-c", both], env=open_mpi.env)
    assert done.stdout.count(f"{os.uname().nodename} ") == 4, done.output


# argv: 1 = rank 1 does not call init, and rank 0 gives up; 2 = rank 0 is late. And a file for a sign between them.
PROGRAM = """
import os, sys, time
os.environ.pop("OMPI_COMM_WORLD_LOCAL_SIZE")  # as on several hosts
os.environ["HOROCLONE_START_TIMEOUT"] = "1" if sys.argv[1] == "1" else "60"
import horoclone as hvd
rank = os.environ["OMPI_COMM_WORLD_RANK"]
if sys.argv[1] == "1" and rank == "1":
    while not os.path.exists(sys.argv[2]):  # its next program begins when rank 0 has given up
        time.sleep(0.01)
    sys.exit(0)
if sys.argv[1] == "2" and rank == "0":
    time.sleep(1.5)
try:
    hvd.init()
    print("met", hvd.rank(), flush=True)
except hvd.Timeout:
    print("gave up", rank, flush=True)
    open(sys.argv[2], "w").close()
"""


def test_a_rank_that_never_came_does_not_take_an_earlier_programs_value_for_the_new_one(
    launch, open_mpi, tmp_path
):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    first = f"{shlex.quote(sys.executable)} {path}"
    done = launch(
        [*open_mpi.command(2), "sh", "-c", f"{first} 1 {path}.sign && {first} 2 {path}.sign"],
        env=open_mpi.env,
    )
    said = sorted(line for line in done.stdout.splitlines() if line)
    assert said == ["gave up 0", "met 0", "met 1"], done.output


# Does what ssh would; the daemon that the launcher wants there believes to be on another host.
OTHER_HOST = """#!/bin/sh
host=$1
shift
exec unshare --uts sh -c "hostname $host; $*"
"""
# argv: a file's path, what is exchanged, and for how long rank 0 is late.
EXCHANGE = """
import os, sys, time
from horoclone.bootstrap import pmix
rank, size = (int(os.environ["OMPI_COMM_WORLD_" + name]) for name in ("RANK", "SIZE"))
if rank == 0:
    time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
for turn in range(3):
    blob = b"%s %d" % (sys.argv[2].encode(), turn)
    given = pmix.broadcast(os.environ, rank, size, blob if rank == 0 else b"", time.monotonic() + 30)
    assert given == blob, given
    signs = [f"{sys.argv[1]}.{sys.argv[2]}.{turn}.{other}" for other in range(size)]
    open(signs[rank], "w").close()
    while not all(map(os.path.exists, signs)):
        time.sleep(0.01)
os.write(1, f"{os.uname().nodename} {rank}\\n".encode())
"""


@pytest.fixture
def three_hosts(launch, open_mpi, tmp_path):
    """run(*words): four ranks on hosts with three names, below three daemons, with a path for signs between them."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root: it gives processes another host name")
    agent = tmp_path / "agent"
    agent.write_text(OTHER_HOST)
    agent.chmod(0o755)
    hosts = f"{os.uname().nodename}:1,horoclone-b:2,horoclone-c:1"
    options = ["--host", hosts, "--prtemca", "plm_ssh_agent", str(agent)]
    # No oversubscription
    env = {name: value for name, value in open_mpi.env.items() if not name.startswith("PRTE")}

    def run(script, *words):
        program = [sys.executable, "-c", script, str(tmp_path / "sign"), *words]
        return launch([*open_mpi.command(4), *options, *program], env=env)

    return run


def test_rank_0s_value_reaches_ranks_below_other_daemons(three_hosts):
    done = three_hosts(EXCHANGE, "blob")
    assert sorted(filter(None, done.stdout.split("\n")), key=lambda line: line[-1]) == [
        f"{os.uname().nodename} 0",
        "horoclone-b 1",
        "horoclone-b 2",
        "horoclone-c 3",
    ]


# argv: a file's path, and the ranks that come only when all others have given up once.
TWICE = """
import os, sys, time
import numpy as np
import horoclone as hvd
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
late = [int(one) for one in sys.argv[2].split("+")]
signs = [f"{sys.argv[1]}.{other}" for other in range(4) if other not in late]
if rank not in late:
    os.environ["HOROCLONE_START_TIMEOUT"] = "3"
    try:
        hvd.init()
    except hvd.Timeout:
        open(f"{sys.argv[1]}.{rank}", "w").close()
while not all(map(os.path.exists, signs)):
    time.sleep(0.01)
os.environ["HOROCLONE_START_TIMEOUT"] = "60"
for life in range(2):
    hvd.init()
    assert hvd.allreduce(np.ones(3), op=hvd.Sum, name="w").tolist() == [4.0] * 3
    hvd.shutdown()
print("met", rank, flush=True)
"""


@pytest.mark.in_turn
@pytest.mark.parametrize("late", ["0", "3", "1+3"])
def test_init_works_again_after_a_timeout_whoever_was_late(three_hosts, late):
    done = three_hosts(TWICE, late)
    assert sorted(line for line in done.stdout.splitlines() if line) == [f"met {r}" for r in range(4)], (
        done.output
    )


def test_without_the_library_the_ranks_connect_through_mpi4py(ranks):
    for line in members(ranks(2, "no-library"), 2):
        assert "mpi=True exchanges=0" in line
        assert f"first contact: mpi4py, as PMIx cannot be used: {os.devnull} cannot be loaded" in line


def test_without_the_library_and_mpi4py_the_error_names_both(ranks):
    done = ranks(2, "no-library", "no-mpi4py", check=False)
    assert done.returncode != 0
    assert f"PMIx cannot be used ({os.devnull} cannot be loaded" in done.output
    assert "mpi4py cannot be loaded" in done.output and "pip install mpi4py" in done.output


def test_what_pmix_says_is_compared_with_the_variables(ranks):
    done = ranks(2, "wrong-size")
    assert done.stdout.count("refused: PMIx says size 2 (type 14), not 7") == 2, done.output


@pytest.mark.in_turn
@pytest.mark.parametrize("when", ["killed-late", "killed-early"])
def test_a_killed_rank_ends_the_job(ranks, when):
    done = ranks(3, when, check=False)
    assert done.returncode != 0 and done.seconds < 20, done.output


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["stuck-0", "absent-0"])  # it hangs, or leaves without init
def test_a_rank_0_that_does_not_come_is_not_waited_for_past_the_deadline(ranks, how):
    done = ranks(2, how, "hurry", check=False)
    assert done.returncode != 0 and done.seconds < 25, done.output
    said = "Timeout: rank 1 waited 3 s at the launcher's PMIx server"
    assert how == "absent-0" or said in done.output, done.output


def test_a_process_that_is_offered_no_pmix_is_told_why():
    environ = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "a@1", "PMIX_SERVER_URI4": "tcp4://", "PRTE_LAUNCHED": "1"}
    assert pmix.refusal(environ) == ""
    for name, said in (
        ("PMIX_RANK", "PMIX_RANK and"),
        ("PMIX_SERVER_URI4", "PMIX_SERVER_URI"),
        ("PRTE_LAUNCHED", "Open MPI 5"),
    ):
        less = {key: value for key, value in environ.items() if key != name}
        assert said in pmix.refusal(less)
        assert pmix.explain(less).startswith("mpi4py, as PMIx cannot be used: ")
        with pytest.raises(pmix.Unavailable, match=said.split()[0]):
            pmix.broadcast(less, 0, 2, b"x", 0.0)


def test_another_library_under_that_name_is_not_used(monkeypatch):
    environ = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "a@1", "PMIX_SERVER_URI4": "tcp4://", "PRTE_LAUNCHED": "1"}
    libc = ctypes.util.find_library("c")
    monkeypatch.setattr(pmix, "find_library", lambda environ: libc)
    assert "undefined symbol: PMIx_Get_version" in pmix.explain(environ)


def test_the_library_beside_the_launcher_is_found(tmp_path):
    library = tmp_path / "lib64" / pmix.NAME
    library.parent.mkdir()
    library.touch()
    assert pmix.find_library({"PMIX_PREFIX": str(tmp_path)}) == str(library)
    assert pmix.find_library({"PATH": str(tmp_path)}) == pmix.NAME  # the loader's choice
