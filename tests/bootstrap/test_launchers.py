"""The first contact under every launcher, with the launchers themselves; no native code is involved.

Each rank meets the others, re-opens the job many times as init after shutdown does, and prints one line.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from horoclone import errors
from horoclone.bootstrap import detect, exchange, launchers
from horoclone.bootstrap.rendezvous import Server

SECRET = "correct-horse-battery"

# What one rank does. argv: comma list of words. "hide=NAME" takes a variable away, as if the launcher had not set it.
MEMBER = """
import os, sys, time
words = sys.argv[1].split(",")
for word in words:
    if word.startswith("hide="):
        os.environ.pop(word[5:], None)
if "mpi-first" in words:
    from mpi4py import MPI
from horoclone.bootstrap import exchange
comm = None
if "comm" in words:
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
if "split" in words:
    from mpi4py import MPI
    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, -MPI.COMM_WORLD.rank)
    last = MPI.COMM_WORLD.size - 1
    between = comm.Create_intercomm(0, MPI.COMM_WORLD, last - ((last - MPI.COMM_WORLD.rank) % 2 == 0), 7)
    for other, word in (MPI.COMM_NULL, "MPI.COMM_NULL"), (between, "Merge()"):
        try:
            exchange.open_job(other, os.environ, time.monotonic() + 30, print, None)
            assert False, word
        except ValueError as error:
            assert word in str(error), error
for word in words:
    if word.startswith("ranks="):
        comm = [int(rank) for rank in word[6:].split("+")]
job = None
secret = None
for turn in range(100):
    deadline = time.monotonic() + 30
    job = exchange.open_job(comm, os.environ, deadline, print, job)
    blobs = job.gather(b"%d@%d" % (job.rank, turn), deadline, print)
    assert blobs == [b"%d@%d" % (rank, turn) for rank in range(job.size)], blobs
    secrets = job.gather(job.secret, deadline, print)
    assert len(set(secrets)) == 1 and len(job.secret) >= 16
    descriptors = len(os.listdir("/proc/self/fd"))
    if turn == 10:
        first = descriptors
# Rank 0's server may not have noticed yet that the last few connections are closed; a leak would be 90 or more.
assert descriptors <= first + 10, (first, descriptors)
if "mpi-last" in words:
    # Not by an import alone, in which rank 0 would hold the GIL before its server has answered the others.
    from horoclone.bootstrap import mpi_link
    mpi_link.start(time.monotonic() + 60)
    from mpi4py import MPI
    assert MPI.COMM_WORLD.size == job.size
mpi = "mpi4py.MPI" in sys.modules and job.uses_mpi
if mpi:
    from mpi4py import MPI
world = job.world_ranks_of(MPI.COMM_SELF) if mpi else []
line = f"member {job.rank} of {job.size} generation {job.generation} mpi={mpi} self={world}"
os.write(1, f"\\n{line}\\n".encode())  # in one piece, as the others print too
job.close()
"""


@pytest.fixture
def member(tmp_path):
    path = tmp_path / "member.py"
    path.write_text(MEMBER)

    def command(*words):
        return [sys.executable, str(path), ",".join(words)]

    return command


def check(done, size, **expected):
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("member"))
    assert len(lines) == size, done.output
    for rank, line in enumerate(lines):
        assert line.startswith(f"member {rank} of {size} "), done.output
        for name, value in expected.items():
            assert f"{name}={value}" in line, done.output


# When MPI itself is initialised: never, before the first contact, or after it.
WHEN = pytest.mark.parametrize(
    "words", [(), ("mpi-first",), ("mpi-last",)], ids=["plain", "mpi first", "mpi last"]
)


@pytest.mark.mpi
@pytest.mark.in_turn
@WHEN
def test_open_mpi_on_one_host(launch, open_mpi, member, words):
    check(launch([*open_mpi.command(3), *member(*words)], env=open_mpi.env), 3, mpi=bool(words))


@pytest.mark.mpi
@pytest.mark.in_turn
@WHEN
def test_open_mpi_on_several_hosts(launch, open_mpi, member, words):
    hidden = "hide=OMPI_COMM_WORLD_LOCAL_SIZE"
    check(launch([*open_mpi.command(2), *member(hidden, *words)], env=open_mpi.env), 2, mpi=bool(words))


@pytest.mark.mpi
@pytest.mark.in_turn
@WHEN
def test_mpich_on_one_host(launch, mpich, member, words):
    check(launch([*mpich.command(3), *member(*words)], env=mpich.env), 3, mpi=bool(words))


@pytest.mark.mpi
@pytest.mark.in_turn
@WHEN
def test_mpich_on_several_hosts(launch, mpich, member, words):
    hidden = "hide=MPI_LOCALNRANKS"
    check(launch([*mpich.command(3), *member(hidden, *words)], env=mpich.env), 3, mpi=bool(words))


@pytest.mark.mpi
@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["open_mpi", "mpich"])
@pytest.mark.parametrize("which", ["comm", "split"])
def test_a_communicator_is_the_world(launch, request, member, name, which):
    mpi = request.getfixturevalue(name)
    done = launch([*mpi.command(2 if which == "comm" else 4), *member(which)], env=mpi.env)
    if which == "comm":
        check(done, 2, mpi=True)
    else:
        lines = sorted(line for line in done.stdout.splitlines() if line.startswith("member"))
        assert [line[:13] for line in lines] == ["member 0 of 2"] * 2 + ["member 1 of 2"] * 2, done.output


@pytest.mark.mpi
def test_mpiexec_of_one_mpi_with_mpi4py_on_another_is_an_error(launch, mpich, open_mpi, member):
    # Without mpich.env, mpi4py finds Open MPI's library first.
    done = launch([*mpich.command(2), *member("mpi-first")], check=False)
    assert done.returncode != 0
    assert "and says that there are 2 processes; Open MPI v" in done.output, done.output
    assert "which mpi4py uses, says 1. If this process was started alone" in done.output
    assert "belong to different MPIs" in done.output and "package" not in done.output


@pytest.mark.mpi
def test_the_wrong_mpi4py_does_not_matter_when_it_is_not_needed(launch, mpich, open_mpi, member):
    check(launch([*mpich.command(2), *member()]), 2, mpi=False)


def torchrun(size, *command):
    pytest.importorskip("torch")
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", *command]


@pytest.mark.long(8)
def test_torchrun_on_one_host_needs_no_secret(launch, member):
    done = launch([*torchrun(3), *member()[1:]], timeout_s=120)
    check(done, 3, mpi=False)


def test_torchrun_on_several_hosts_uses_its_store_and_a_secret(launch, member):
    env = {"HOROCLONE_SECRET": SECRET}
    command = [*torchrun(2), *member("hide=LOCAL_WORLD_SIZE")[1:]]
    check(launch(command, env=env, timeout_s=120), 2, mpi=False)


@pytest.mark.long(8)
def test_torchrun_on_several_hosts_without_a_secret_says_how_to_fix_it(launch, member):
    command = [*torchrun(2), *member("hide=LOCAL_WORLD_SIZE")[1:]]
    done = launch(command, check=False, timeout_s=120)
    assert done.returncode != 0
    assert "share no secret" in done.output and "HOROCLONE_SECRET_FILE" in done.output


# --- launchers that are not here: their variables, set by hand


class Ranks:
    """Plain processes with the variables that a launcher would set."""

    def __init__(self, member, environments, words=((),)):
        clean = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        self.processes = [
            subprocess.Popen(
                member(*words[rank % len(words)]),
                env={**clean, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, env in enumerate(environments)
        ]

    def outputs(self, timeout_s=60):
        try:
            return [process.communicate(timeout=timeout_s)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()


def step(rank, size, nodes=1, **more):
    per_node = size // nodes
    return {
        "SLURM_JOB_ID": JOB,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
        "SLURM_STEP_NODELIST": "localhost,other",
        **more,
    }


JOB = str(secrets.randbelow(10**9))


def check_ranks(outputs, size):
    for rank, output in enumerate(outputs):
        assert f"member {rank} of {size} generation 200" in output, output


def test_slurm_step_on_one_host(member):
    check_ranks(Ranks(member, [step(rank, 3) for rank in range(3)]).outputs(), 3)


def test_slurm_step_on_several_hosts_with_a_secret(member):
    ranks = Ranks(member, [step(rank, 4, nodes=2, HOROCLONE_SECRET=SECRET) for rank in range(4)])
    check_ranks(ranks.outputs(), 4)


def test_env_variables_without_torchrun(member):
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": JOB[-4:],
        "HOROCLONE_SECRET": SECRET,
    }
    check_ranks(Ranks(member, [{**common, "RANK": str(rank)} for rank in range(2)]).outputs(), 2)


def test_horovods_variables_on_one_host(member):
    def env(rank):
        return {f"HOROVOD_{name}": str(value) for name, value in
                {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}.items()}  # fmt: skip

    check_ranks(Ranks(member, [env(rank) for rank in range(2)]).outputs(), 2)


def test_a_list_of_ranks_is_a_world_of_its_own(member):
    words = [("ranks=2+0",), ("ranks=1",), ("ranks=2+0",), ()]
    outputs = Ranks(member, [step(rank, 4) for rank in range(3)], words).outputs()
    assert "member 1 of 2" in outputs[0] and "member 0 of 2" in outputs[2], outputs
    assert "member 0 of 1" in outputs[1], outputs


def test_our_launchers_rendezvous_with_the_secret_in_a_descriptor():
    secret = secrets.token_bytes(32)
    descriptor = os.memfd_create("secret")
    os.write(descriptor, secret)
    server = Server(secret, "j", 2, ["127.0.0.1"])
    environ = {
        "HOROCLONE_RENDEZVOUS": ",".join(["127.0.0.1:1", *server.addresses]),
        "HOROCLONE_JOB": "j",
        "HOROCLONE_SECRET_FD": str(descriptor),
        "HOROCLONE_RANK": "1",
        "HOROCLONE_SIZE": "2",
    }
    job = exchange.open_job(None, environ, time.monotonic() + 10, None, None)
    assert (job.rank, job.size, job.secret) == (1, 2, secret)
    job.report_failure("Traceback: ValueError", False)
    assert server.failures()[0][:3] == (1, "Traceback: ValueError", False)
    with pytest.raises(errors.Timeout, match="missing: rank 0"):
        job.gather(b"x", time.monotonic() + 0.5, None)
    job.close()
    server.close()
    os.close(descriptor)


def test_a_list_without_this_rank_and_other_wrong_arguments():
    environ = step(1, 4)
    deadline = time.monotonic() + 1
    for comm, text in (
        ([0, 2], "which is not in the list"),
        ([1, 4], "each below the size 4"),
        ([1, 1], "every rank once"),
        ("world", "a list of ranks or an mpi4py communicator"),
        (object(), "a list of ranks or an mpi4py communicator"),
    ):
        with pytest.raises(ValueError, match=text):
            exchange.open_job(comm, environ, deadline, None, None)


def test_rank_0_that_never_comes_is_named():
    started = time.monotonic()
    with pytest.raises(errors.Timeout, match="rank 0") as caught:
        exchange.open_job(None, step(1, 2), started + 1.0, None, None)
    assert time.monotonic() - started < 20
    assert "unix:horoclone-" in str(caught.value)


class Store:
    """What torch's stores do, in one process."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


def test_what_an_earlier_life_has_left_in_torchruns_store_is_not_believed(monkeypatch, capsys):
    store = Store()
    with ThreadPoolExecutor(3) as pool:
        for life in (b"first", b"second"):
            deadline = time.monotonic() + 20
            others = [pool.submit(launchers.told_by_rank_0, store, rank, 3, b"", deadline) for rank in (1, 2)]
            while not store.check(["asks/1", "asks/2"]):
                time.sleep(0.01)
            assert launchers.told_by_rank_0(store, 0, 3, life, deadline) == life
            assert [other.result() for other in others] == [life] * 2
    monkeypatch.setattr(launchers, "SAY_AFTER_S", 0.1)
    with pytest.raises(errors.Timeout, match="missing: ranks 1, 2"):
        launchers.told_by_rank_0(store, 0, 3, b"third", time.monotonic() + 0.3)
    assert capsys.readouterr().err.count("still waiting for the 3 ranks of the job") == 1


def test_agents_of_torchrun_need_not_count_the_lives_of_a_job_alike():
    variables = {
        "TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "node1", "MASTER_PORT": "29400", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    jobs = [
        detect.detect({**variables, "RANK": rank, "TORCHELASTIC_RESTART_COUNT": count}).job
        for rank, count in (("0", "1"), ("1", "0"))
    ]
    assert jobs[0] == jobs[1]
