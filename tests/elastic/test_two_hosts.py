"""An elastic job on two hosts, which are network namespaces: a host is lost, is cut off, and comes by discovery."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from namespaces import Hosts
from world import until

WORKER = Path(__file__).with_name("steps.py")
RUN = [sys.executable, "-m", "horoclone.launch"]

# ssh to the second host: its words after the host, by a shell in its namespace. Like sshd's, that shell outlives it; and
# nothing passes while the file `cut` is there.
SSH = """#!{python}
import os, subprocess, sys, threading, time
words = sys.argv[1:]
while words and words[0].startswith("-"):
    words = words[1 if words[0] == "-T" else 2:]
command = ["ip", "netns", "exec", {name!r}, "sh", "-c", " ".join(words[1:])]
shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
def carry(source, to):
    while data := os.read(source, 65536):
        while os.path.exists({cut!r}):
            time.sleep(0.02)
        while data:
            data = data[os.write(to, data):]
    if to != 1:
        shell.stdin.close()
threading.Thread(target=carry, args=(0, shell.stdin.fileno()), daemon=True).start()
carry(shell.stdout.fileno(), 1)
sys.exit(shell.wait())
"""


# Runs a worker whose stderr and exit code can be read where its launcher cannot be reached.
RECORDED = 'f=$0/rank.$HOROVOD_RANK; "$@" 2>>$f.err; code=$?; echo $code >>$f.code; exit $code'
QUICK = {
    "HOROCLONE_LIVENESS_ERROR_S": "2", "HOROCLONE_LIVENESS_WARN_S": "1", "HOROCLONE_LIVENESS_PROBE_S": "0.5",
}  # fmt: skip


class TwoHosts:
    """names, addresses: of the two namespaces. path: PATH with the ssh of the first one."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.names, self.addresses = hosts.names, [addresses[0] for addresses in hosts.addresses]
        self.hosts, self._cut_file = hosts, folder / "cut"
        self.path = path_with_ssh(folder, self.names[1], self._cut_file)

    def slots(self, *counts: int) -> str:
        return ",".join(f"{one}:{count}" for one, count in zip(self.addresses, counts, strict=True))

    def cut(self) -> None:
        self._cut_file.touch()
        self.hosts.set_cable("down")

    def heal(self) -> None:
        self.hosts.set_cable("up")
        self._cut_file.unlink()


def path_with_ssh(folder: Path, name: str, cut_file: Path) -> str:
    """A PATH on which ssh goes into the namespace."""
    script = folder / "ssh"
    script.write_text(SSH.format(python=sys.executable, name=name, cut=str(cut_file)))
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def hosts(tmp_path: Path, opened: Callable[[Any], Any]) -> TwoHosts:
    return TwoHosts(opened(Hosts()), tmp_path)


@pytest.fixture
def job(launch: Any, watch: Any, hosts: TwoHosts, tmp_path: Path) -> Any:
    """A job of steps.py that is started on the first host, and trains until finish(), or end().

    recorded: stderr and exit codes of the workers are in rank.N.err and rank.N.code, N by their slots.
    """

    def start(*flags: object, recorded: bool = False, **environment: str) -> Any:
        end = tmp_path / "end"
        inside = ["ip", "netns", "exec", hosts.names[0]]
        worker = ["env", f"STEPS_END={end}", sys.executable, str(WORKER), "1000000", "0.05"]
        if recorded:
            worker = ["sh", "-c", RECORDED, str(tmp_path), *worker]
        words = [*inside, *RUN, *map(str, flags), *worker]
        return watch(launch.start(words, env={**environment, "PATH": hosts.path}), end)

    return start


def wait_for(path: Path, text: str, timeout_s: float = 60) -> str:
    """The file, once the text is in it."""
    until(
        lambda: path.exists() and text in path.read_text(),
        timeout_s,
        lambda: f"{text!r} is not in {path}: {path.exists() and path.read_text()}",
    )
    return path.read_text()


@pytest.mark.netns
def test_the_cut_off_side_ends_with_75_and_new_workers_come_when_the_network_is_whole(
    job: Any, hosts: TwoHosts, tmp_path: Path
) -> None:
    run = job(
        "-np", 4, "--min-np", 2, "--elastic-timeout", 6, "-H", hosts.slots(2, 2), recorded=True, **QUICK
    )  # fmt: skip
    first = run.whole(1)
    run.step(5)
    hosts.cut()
    assert run.of_size(2, after=1) == {0: first[0], 1: first[1]}
    for rank in (2, 3):
        assert wait_for(tmp_path / f"rank.{rank}.code", "\n") == "75\n"
        assert (
            "the membership coordinator of this job cannot be reached"
            in (tmp_path / f"rank.{rank}.err").read_text()
        )
    assert run.newest() == 2
    hosts.heal()
    back = run.of_size(4, after=2)
    assert [back[0], back[1]] == [first[0], first[1]] and not {back[2], back[3]} & set(first.values())


@pytest.mark.netns
@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["cut", "stopped"])
def test_a_host_that_falls_silent_is_lost_within_seconds(job: Any, hosts: TwoHosts, how: str) -> None:
    """With the real deadlines: 2.4 s until the next step on a machine that does nothing else."""
    run = job("-np", 4, "--min-np", 2, "-H", hosts.slots(2, 2))
    first = run.whole(1)
    run.step(5)
    silent = time.monotonic()
    if how == "cut":
        hosts.cut()
    for rank in (2, 3) if how == "stopped" else ():
        os.kill(first[rank], signal.SIGSTOP)
    assert run.of_size(2, after=1) == {0: first[0], 1: first[1]}
    assert 1.5 < time.monotonic() - silent < 20


@pytest.mark.netns
def test_connections_that_break_between_living_processes_cost_nothing(job: Any, hosts: TwoHosts) -> None:
    """All of them between the hosts at once: the ranks', and those to the coordinator."""
    run = job("-np", 4, "--min-np", 2, "-H", hosts.slots(2, 2))
    run.whole(1)
    run.step(5)
    for host in range(2):
        hosts.hosts.reset(host)
        time.sleep(0.4)
    run.finish()
    assert run.newest() == 1, "nobody was lost"


@pytest.mark.netns
def test_a_bit_that_changes_between_the_hosts_costs_the_steps_since_the_last_commit(
    launch: Any, watch: Any, changing_device: Any, tmp_path: Path
) -> None:
    hosts, names = ",".join(changing_device.addresses), changing_device.names
    inside, flags = ["ip", "netns", "exec", names[0]], ["-np", "2", "--min-np", "1", "-H", hosts]
    end = tmp_path / "end"
    worker = ["env", f"STEPS_END={end}", sys.executable, str(WORKER), "1000000", "0.05"]
    environment = {"PATH": path_with_ssh(tmp_path, names[1], tmp_path / "cut")}
    run = watch(launch.start([*inside, *RUN, *flags, *worker], env=environment), end)
    first = run.whole(1)
    run.step(5)
    changing_device.change(1000, 70_000, 3, 4321)
    assert run.of_size(2, after=1) == first, "both live"
    run.finish()
    assert len(changing_device.changed) == 1 and "changed on its way" in run.started.stdout


@pytest.mark.netns
def test_ranks_on_two_hosts_go_on_when_their_launcher_dies(job: Any, hosts: TwoHosts, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    run = job(
        "-np", 4, "--min-np", 2, "-H", hosts.slots(2, 2), "--survive-launcher", "--output-filename", lines
    )
    first = run.whole(1)
    run.step(5)
    run.is_alone = True
    run.started.process.kill()
    far = lines / "rank.2"
    # The lowest of the other host
    wait_for(far / "stderr", "this process is the membership coordinator now (generation 1)")
    for rank in (0, 1, 3):
        found = "rank 2 of generation 1 is the membership coordinator now"
        wait_for(lines / f"rank.{rank}" / "stderr", found)
    assert "generation" not in (far / "stdout").read_text().split("\n", 1)[1], "nobody was interrupted"
    os.kill(first[1], signal.SIGKILL)
    text = wait_for(far / "stdout", "of 3 pid")
    run.wait(lambda: run.newest() > 1, "the next generation on the first host")
    assert run.newest() == (1 << 48) + (2 << 32) + 2, "its number says who has counted it"
    run.end()
    wait_for(far / "stdout", "done ")
    assert not run.started.left_over(30)
    assert f"rank 1 of 3 pid {first[2]} " in text and "done 0 3 " in run.started.stdout


@pytest.mark.netns
@pytest.mark.long(25)
def test_of_a_cut_network_the_majority_goes_on_without_the_launcher(
    job: Any, hosts: TwoHosts, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    run = job(
        "-np", 3, "--min-np", 1, "-H", hosts.slots(1, 2), "--survive-launcher", "--elastic-timeout", 15,
        "--output-filename", lines, recorded=True, **QUICK,
    )  # fmt: skip
    run.whole(1)
    run.step(5)
    hosts.cut()
    done = run.started.finish(60)
    assert done.returncode == 75 and "1 of 3 ranks are on this side of a cut network" in done.stderr, (
        done.output
    )
    assert (tmp_path / "rank.0.code").read_text() == "75\n"
    hosts.heal()
    run.end()
    assert "done 0 2 " in wait_for(lines / "rank.1" / "stdout", "done ")
    assert not run.started.left_over(30)
    assert [(tmp_path / f"rank.{rank}.code").read_text() for rank in (1, 2)] == ["0\n", "0\n"]


@pytest.mark.netns
@pytest.mark.long(28)
def test_the_host_with_the_launcher_and_rank_0_is_lost_and_the_other_host_goes_on(
    job: Any, hosts: TwoHosts, tmp_path: Path
) -> None:
    """As when its power fails: nobody says anything any more, and the members that it had are silent."""
    lines = tmp_path / "lines"
    run = job(
        "-np", 3, "--min-np", 1, "-H", hosts.slots(1, 2), "--survive-launcher", "--output-filename", lines, **QUICK
    )  # fmt: skip
    first = run.whole(1)
    run.step(5)
    run.is_alone = True
    hosts.cut()
    run.started.process.kill()
    os.kill(first[0], signal.SIGKILL)
    wait_for(lines / "rank.1" / "stdout", "of 2 pid")
    run.end()
    text = wait_for(lines / "rank.1" / "stdout", "done ")
    assert "done 0 2 " in text and f"rank 0 of 2 pid {first[1]} " in text, text
    assert (
        "this process is the membership coordinator now (generation 1)"
        in (lines / "rank.1" / "stderr").read_text()
    )
    hosts.heal()
    assert not run.started.left_over(30)


@pytest.mark.netns
def test_a_host_that_the_script_finds_later_joins(job: Any, hosts: TwoHosts, tmp_path: Path) -> None:
    listed, script = tmp_path / "hosts", tmp_path / "find.sh"
    listed.write_text(f"{hosts.addresses[0]}:2\n")
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    run = job("-np", 2, "--min-np", 1, "--host-discovery-script", script)
    first = run.whole(1)
    listed.write_text(f"{hosts.addresses[1]}:1\n{hosts.addresses[0]}:2\n")
    grown = run.of_size(3)
    assert (grown[0], grown[1]) == (first[0], first[1])
    run.finish()


@pytest.mark.netns
@pytest.mark.long(25)
def test_a_whole_host_is_killed_and_nothing_that_only_its_ranks_had_is_lost(
    launch: Any, watch: Any, hosts: TwoHosts, tmp_path: Path
) -> None:
    """Sharded Adam, loaders and random numbers of two ranks; the weights are those of a job that lost nothing."""
    pytest.importorskip("torch")
    flags = ["-np", "4", "--min-np", "2", "-H", hosts.slots(2, 2)]
    shards = [sys.executable, WORKER.with_name("shards.py"), "24", "2", "0.05"]
    environment = {"PATH": hosts.path, "OMP_NUM_THREADS": "1", "SHARDS_ONCE": str(tmp_path)}
    run = watch(launch.start(["ip", "netns", "exec", hosts.names[0], *RUN, *flags, *shards], env=environment))
    first = run.whole(1)
    run.step(7)
    for rank in (2, 3):
        os.kill(first[rank], signal.SIGKILL)
    second = run.of_size(2, after=1)
    assert second == {0: first[0], 1: first[1]}
    done = run.started.finish(60)
    assert done.returncode == 0 and not run.started.left_over(), done.output
    for rank, size in ((0, 2), (1, 2)):
        own = {"stream": 100 + rank, "at": 24}
        assert f"finished {rank} of {size} loader {own} equal True near True" in done.stdout, done.output
    pieces = next(line for line in done.stdout.splitlines() if "pieces of" in line and "[]" not in line)
    assert pieces.endswith("[100, 101, 102, 103]")
