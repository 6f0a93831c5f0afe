"""A rank that dies while the ranks start or leave: every survivor is told which one it was, in every phase."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("numpy")
pytest.importorskip("horoclone._core", reason="the native module is not built: pip install -e .")

RANKS = 3
NOTICED_WITHIN_S = 5.0  # it takes at most 1 s on a machine with nothing else to do

# One rank. argv: the phase in which the victim kills itself, and its rank.
LIFE = """
import os, sys, threading, time
phase, victim = sys.argv[1], int(sys.argv[2])
rank = int(os.environ.get("HOROVOD_RANK") or os.environ["RANK"])
dies = rank == victim

def die(*_):
    os.write(1, f"died {time.monotonic()}\\n".encode())
    os.kill(os.getpid(), 9)

if dies and phase == "before init":
    die()
import numpy as np
import horoclone as hvd
from horoclone import errors
from horoclone.runtime import lifecycle
from horoclone.bootstrap import exchange

class Dies:
    def __init__(self, native):
        self.native = native
    def __getattr__(self, name):
        return getattr(self.native, name)
    def connect(self, *arguments):
        if phase == "before connecting":
            die()
        self.native.connect(*arguments)
        if phase == "connected":
            die()
    def shutdown(self, *arguments):
        if phase == "before shutdown":
            die()
        self.native.shutdown(*arguments)

if dies:
    new_runtime = lifecycle.new_runtime
    lifecycle.new_runtime = lambda settings: Dies(new_runtime(settings))
    gather = exchange.Job.gather
    def gather_and_die(self, *arguments):
        if phase == "before gathering":
            die()
        blobs = gather(self, *arguments)
        if phase == "gathered":
            die()
        return blobs
    exchange.Job.gather = gather_and_die
    if phase == "while gathering":
        threading.Timer(1.0, die).start()
elif phase == "while gathering" and rank == 2:
    if "MASTER_PORT" in os.environ:
        sys.exit(0)  # with no launcher it would find nobody left to tell it
    time.sleep(2.5)

began = time.monotonic()
try:
    for life in range(3):
        hvd.init()
        assert hvd.allreduce(np.ones(10), op=hvd.Sum, name="w")[0] == hvd.size()
        hvd.shutdown()
        if life == 0 and dies and phase == "between lives":
            die()
    print("survived", rank, flush=True)
except errors.HorovodInternalError as error:
    culprit = getattr(error, "rank", None)
    os.write(1, f"noticed {rank} {type(error).__name__} {culprit} {time.monotonic()} {error}\\n".encode())
"""

# What a user does who starts the ranks with nothing that watches them.
BY_HAND = """
import os, secrets, subprocess, sys
size = int(sys.argv[1])
port = str(1024 + secrets.randbelow(60000))  # only a name here: the ranks are on one host
ranks = []
for rank in range(size):
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}
    ranks.append(subprocess.Popen(sys.argv[2:], env=os.environ | variables))
for one in ranks:
    one.wait()
"""

HOROCLONERUN = [sys.executable, "-m", "horoclone.launch", "-np", str(RANKS)]
WITHOUT = [sys.executable, "-c", BY_HAND, str(RANKS)]
PHASES = [
    "before gathering", "while gathering", "gathered", "before connecting", "connected", "before shutdown",
    "between lives"
]  # fmt: skip


def check(done, victim, survivors):
    words = [line.split("] ")[-1].split(maxsplit=5) for line in done.stdout.splitlines()]
    died = [float(line[1]) for line in words if line[:1] == ["died"]]
    noticed = {int(line[1]): line for line in words if line[:1] == ["noticed"]}
    assert len(died) == 1 and "survived" not in done.stdout, done.output
    assert set(noticed) == survivors - {victim}, done.output
    for line in noticed.values():
        assert line[2:4] == ["PeerLost", str(victim)], done.output
        assert float(line[4]) - died[0] < NOTICED_WITHIN_S, done.output


# Both victims in each phase are below; what the launcher adds is the news of a death, whoever it is.
@pytest.mark.parametrize(
    ("phase", "victim"),
    [("before init", 0), ("before init", 1), *((phase, number % 2) for number, phase in enumerate(PHASES))],
)
def test_under_our_launcher_every_phase_names_the_rank_that_died(launch, phase, victim):
    done = launch([*HOROCLONERUN, sys.executable, "-c", LIFE, phase, str(victim)], check=False)
    check(done, victim, {0, 1, 2})


# Before the first contact nobody but a launcher knows that a rank will not come.
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_without_a_launcher_every_phase_names_the_rank_that_died(launch, phase, victim):
    if phase == "before gathering" and victim == 0:
        pytest.skip(
            "it has started no rendezvous then: the others wait for it, which HOROCLONE_START_TIMEOUT ends"
        )
    done = launch([*WITHOUT, sys.executable, "-c", LIFE, phase, str(victim)], check=False)
    check(done, victim, {0, 1} if phase == "while gathering" else {0, 1, 2})


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


LISTENING = """
import os, re, sys
import horoclone as hvd
from horoclone.bootstrap import exchange

gather = exchange.Job.gather
def gather_and_tell(self, *arguments):
    mine = {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")}
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{name}").read().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                print("listens " + words[1].split(":")[0] + "\\n", end="", flush=True)
    return gather(self, *arguments)
exchange.Job.gather = gather_and_tell
hvd.init()
"""


@pytest.mark.parametrize("start", [HOROCLONERUN, WITHOUT], ids=["horoclonerun", "by hand"])
def test_ranks_of_one_host_listen_on_loopback_only(launch, start):
    done = launch([*start, sys.executable, "-c", LISTENING])
    found = [line.split("listens ")[1] for line in done.stdout.splitlines() if "listens" in line]
    # 127.0.0.1 as the kernel prints it, and ::1 where there is one
    first, last = (0x7F000001, 1) if sys.byteorder == "big" else (0x0100007F, 0x01000000)
    loopback = {first, last}
    assert len(found) >= RANKS and {int(one, 16) for one in found} <= loopback, done.output
