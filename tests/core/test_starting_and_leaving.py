"""A rank that dies while the ranks start or leave: every survivor is told which one it was, in every phase."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import horoclone as hvd
from horoclone.bootstrap import exchange
from horoclone.runtime import lifecycle

RANKS = 3
NOTICED_WITHIN_S = 15.0  # it takes at most 1 s on a machine with nothing else to do
PHASES = [
    "before gathering", "while gathering", "gathered", "before connecting", "connected", "before shutdown",
    "between lives"
]  # fmt: skip


# --- in the ranks


def write(*words):
    """A line, in one piece."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def die():
    write("died", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


class Dies:
    """The runtime of a rank that ends in this phase."""

    def __init__(self, native, phase):
        self.native, self.phase = native, phase

    def __getattr__(self, name):
        return getattr(self.native, name)

    def connect(self, *arguments):
        if self.phase == "before connecting":
            die()
        self.native.connect(*arguments)
        if self.phase == "connected":
            die()

    def shutdown(self, *arguments):
        if self.phase == "before shutdown":
            die()
        self.native.shutdown(*arguments)


def prepare_to_die(phase):
    new_runtime, gather = lifecycle.new_runtime, exchange.Job.gather

    def gather_and_die(self, *arguments):
        if phase == "before gathering":
            die()
        if phase == "while gathering":
            threading.Timer(0.5, die).start()
        blobs = gather(self, *arguments)
        if phase == "gathered":
            die()
        return blobs

    lifecycle.new_runtime = lambda settings: Dies(new_runtime(settings), phase)
    exchange.Job.gather = gather_and_die


def start_by_hand(port):
    """From here on with the variables of a user who starts the ranks with nothing that watches them."""
    rank, size = os.environ["HOROCLONE_RANK"], os.environ["HOROCLONE_SIZE"]
    for name in [name for name in os.environ if name.startswith("HOROCLONE_")]:
        if name != "HOROCLONE_SELECTION":
            del os.environ[name]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # only a name here: all are on one host


def live(phase, victim, port=0):
    """One rank. port: it is started by hand."""
    rank = int(os.environ["HOROCLONE_RANK"])
    if port:
        start_by_hand(port)
    if rank == victim:
        if phase == "before init":
            die()
        prepare_to_die(phase)
    elif phase == "while gathering" and rank == 2:
        if port:
            sys.exit(0)  # with no launcher it would find nobody left to tell it
        time.sleep(1.5)
    try:
        for life in range(3):
            hvd.init()
            assert hvd.allreduce(np.ones(10), op=hvd.Sum, name="w")[0] == hvd.size()
            hvd.shutdown()
            if life == 0 and rank == victim and phase == "between lives":
                die()
        write("survived", rank)
    except hvd.HorovodInternalError as error:
        write("noticed", rank, type(error).__name__, getattr(error, "rank", None), time.monotonic(), error)


if __name__ == "__main__":
    live(sys.argv[1], int(sys.argv[2]))
    sys.exit()


# --- in the test

HOROCLONERUN = [sys.executable, "-m", "horoclone.launch", "-np", str(RANKS)]


def a_port():
    """Only a name here."""
    return 1024 + secrets.randbelow(60000)


def check(text, victim, survivors):
    died = re.findall(r"died ([\d.]+)", text)
    noticed = {
        int(rank): (kind, culprit, float(at))
        for rank, kind, culprit, at in re.findall(r"noticed (\d) (\w+) (\w+) ([\d.]+)", text)
    }
    assert len(died) == 1 and "survived" not in text, text
    assert set(noticed) == survivors - {victim}, text
    for kind, culprit, at in noticed.values():
        assert (kind, culprit) == ("PeerLost", str(victim)), text
        assert at - float(died[0]) < NOTICED_WITHIN_S, text


@pytest.mark.parametrize(("phase", "victim"), [("before init", 0), ("before connecting", 1)])
def test_our_launcher_tells_the_others_which_rank_died(launch, phase, victim):
    done = launch([*HOROCLONERUN, sys.executable, __file__, phase, str(victim)], check=False)
    check(done.output, victim, {0, 1, 2})


# Both victims in each phase are below; what a launcher adds is the news of a death, whoever it is.
@pytest.mark.parametrize(
    ("phase", "victim"), [("before init", 1), *((phase, number % 2) for number, phase in enumerate(PHASES))]
)
def test_with_the_news_of_a_launcher_every_phase_names_the_rank_that_died(worker_pool, phase, victim):
    team = worker_pool(live, RANKS, phase=phase, victim=victim)
    team.wait(ranks=[victim])
    team.server.rank_ended(victim, "was killed by SIGKILL")
    team.wait()
    check(team.outputs(), victim, {0, 1, 2})


# Before the first contact nobody but a launcher knows that a rank will not come.
@pytest.mark.in_turn("victim")
@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        (phase, victim)
        for phase in PHASES
        for victim in (0, 1)
        # It has started no rendezvous then: the others wait for it, which HOROCLONE_START_TIMEOUT ends.
        if (phase, victim) != ("before gathering", 0)
    ],
)
def test_without_a_launcher_every_phase_names_the_rank_that_died(worker_pool, phase, victim):
    team = worker_pool(live, RANKS, phase=phase, victim=victim, port=a_port())
    team.wait()
    check(team.outputs(), victim, {0, 1} if phase == "while gathering" else {0, 1, 2})


LEAVES = """
import os, sys
rank = int(os.environ["HOROVOD_RANK"])
if rank == 1:
    sys.exit(0)
import horoclone as hvd
try:
    hvd.init()
except hvd.PeerLost as error:
    os.write(1, f"noticed {rank} {error.rank} {'ended with exit code 0' in str(error)}\\n".encode())
"""


def test_a_rank_that_ends_with_zero_before_init_is_named_to_the_others(launch):
    done = launch([*HOROCLONERUN, sys.executable, "-c", LEAVES], check=False)
    found = sorted(line.split("] ")[-1] for line in done.stdout.splitlines() if "noticed" in line)
    assert found == ["noticed 0 1 True", "noticed 2 1 True"] and done.seconds < 30, done.output


def tell_where_it_listens(port):
    if port:
        start_by_hand(port)
    gather = exchange.Job.gather

    def gather_and_tell(self, *arguments):
        descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        mine = {os.readlink(path) for path in descriptors if os.path.lexists(path)}
        for name in ("tcp", "tcp6"):
            with open(f"/proc/self/net/{name}") as table:
                for words in map(str.split, table.read().splitlines()[1:]):
                    if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                        write("listens", words[1].split(":")[0])
        return gather(self, *arguments)

    exchange.Job.gather = gather_and_tell
    hvd.init()


@pytest.mark.parametrize("by_hand", [False, True], ids=["launcher", "by hand"])
def test_ranks_of_one_host_listen_on_loopback_only(worker_pool, by_hand):
    team = worker_pool(tell_where_it_listens, RANKS, port=a_port() if by_hand else 0)
    assert team.wait() == [0] * RANKS, team.outputs()
    found = re.findall(r"listens (\w+)", team.outputs())
    # 127.0.0.1 as the kernel prints it, and ::1 where there is one
    first, last = (0x7F000001, 1) if sys.byteorder == "big" else (0x0100007F, 0x01000000)
    assert len(found) >= RANKS and {int(one, 16) for one in found} <= {first, last}, team.outputs()


core = pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

RANK = """
import os, sys
if os.environ["HOROVOD_RANK"] == "1":
    sys.path.insert(0, sys.argv[1])
import horoclone as hvd
try:
    hvd.init()
    print("connected")
except hvd.HorovodInternalError as error:
    os.write(1, f"refused {os.environ['HOROVOD_RANK']} {type(error).__name__} {error}\\n".encode())
"""


def test_the_build_names_the_version_and_a_digest():
    import horoclone

    version, _, digest = json.loads(core.build_info())["build"].partition("+")
    assert version == horoclone.__version__ and len(digest) == 12 and int(digest, 16) >= 0


def test_ranks_of_two_builds_refuse_each_other_and_both_name_both(launch, tmp_path):
    build = json.loads(core.build_info())["build"]
    other = build[:-6] + ("abcdef" if build[-6:] != "abcdef" else "fedcba")
    package = Path(core.__file__).parent
    shutil.copytree(package, tmp_path / "horoclone", ignore=shutil.ignore_patterns("__pycache__"))
    library = tmp_path / "horoclone" / "libhoroclone.so"
    content = library.read_bytes()
    assert content.count(build.encode() + b"\0") == 1
    library.write_bytes(content.replace(build.encode(), other.encode()))
    command = [
        sys.executable, "-m", "horoclone.launch", "-np", "2", sys.executable, "-c", RANK, str(tmp_path)
    ]  # fmt: skip
    done = launch(command, check=False, env=dict(os.environ))
    words = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    refused = sorted(line for line in words if line.startswith("refused"))
    assert len(refused) == 2 and "connected" not in done.stdout, done.output
    for rank, (own, theirs) in enumerate([(build, other), (other, build)]):
        assert refused[rank].startswith(f"refused {rank} Unsupported the endpoint of rank {1 - rank}: "), (
            done.output
        )
        assert f"the other side is horoclone {theirs}, this one is horoclone {own};" in refused[rank], (
            done.output
        )
