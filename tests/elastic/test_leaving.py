"""Leaving on notice: a signal, a command, a host's notice script. Nobody fails, no step is lost."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from world import ran

LEAVE = [
    sys.executable,
    "-c",
    "import sys; from horoclone.launch.tool import main; sys.exit(main())",
    "leave",
]


def steps_are_done_once(job: Any) -> None:
    """No rank did a step twice, or missed one: whoever leaves, leaves behind a commit."""
    done: dict[int, list[int]] = {}
    for who, step in re.findall(r"\[(\d+)\] step (\d+) of ", job.started.stdout):
        done.setdefault(int(who), []).append(int(step))
    assert all(steps == list(range(1, len(steps) + 1)) for steps in done.values()), done


def test_the_signal_of_the_scheduler_means_leave_where_the_user_says_so(elastic: Any) -> None:
    job = elastic(["-np", 3, "--min-np", 1, "--notice-signal", "USR1"])
    first = job.whole(1)
    job.step(5)
    for _ in range(3):  # Slurm's comes to every process of a step, and may come again
        os.kill(first[1], signal.SIGUSR1)
    assert job.whole(2) == {0: first[0], 1: first[2]}
    done = job.finish()
    assert "has left: SIGUSR1" in done.stderr and "lost" not in done.stdout
    steps_are_done_once(job)


def test_the_signal_to_the_launcher_lets_all_leave_with_75(elastic: Any) -> None:
    job = elastic(["-np", 2, "--min-np", 1, "--notice-signal", "USR1"])
    job.whole(1)
    job.step(1)
    job.started.process.send_signal(signal.SIGUSR1)
    done = job.finish(code=75)
    assert "every worker has left" in done.stderr and "lost" not in done.stdout, done.output


def test_the_command_lets_one_worker_leave_at_a_commit_and_waits_for_its_end(elastic: Any) -> None:
    job = elastic(["-np", 3, "--min-np", 1])
    first = job.whole(1)
    job.step(5)
    asked = [*LEAVE, "--pid", str(first[1]), "--wait", "20"]
    done = ran(*asked)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{first[1]}").exists() or "Z" in Path(f"/proc/{first[1]}/stat").read_text()
    assert job.whole(2) == {0: first[0], 1: first[2]}
    ended = job.finish()
    assert f"leaves {first[1]} SIGTERM" in ended.stdout and "has left: SIGTERM" in ended.stderr, ended.output
    assert "lost" not in ended.stdout and "skip True" in ended.stdout, ended.output
    steps_are_done_once(job)


def test_the_command_refuses_a_process_that_is_no_worker() -> None:
    done = ran(*LEAVE, "--pid", str(os.getpid()))
    assert done.returncode == 2 and "is no worker of an elastic job" in done.stderr


def hosts_of_one_machine(folder: Path) -> Path:
    """Two names of this machine, as a discovery script prints them."""
    script = folder / "find.sh"
    script.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
    script.chmod(0o755)
    return script


# On a cloud each host asks its own metadata; here both hosts are one machine, and a file says which loop is the first.
NOTICE = """#!/bin/sh
test -e {folder}/going || exit 1
mkdir {folder}/told 2>/dev/null || exit 1
echo 30
"""


def test_a_host_whose_notice_script_says_so_is_left_and_not_used_again(elastic: Any, tmp_path: Path) -> None:
    notice = tmp_path / "notice.sh"
    notice.write_text(NOTICE.format(folder=tmp_path))
    notice.chmod(0o755)
    flags = ["-np", 3, "--min-np", 1, "--host-discovery-script", hosts_of_one_machine(tmp_path)]
    job = elastic([*flags, "--notice-script", notice])
    first = job.whole(1)
    job.step(3)
    (tmp_path / "going").touch()
    job.says("has left: host ")
    job.wait(lambda: min(job.sizes().values()) < 3, "a smaller generation")
    number = min(found for found, size in job.sizes().items() if size < 3)
    left = job.whole(number)
    assert set(left.values()) < set(first.values())
    job.steps_in(job.newest(), count=60)  # discovery looks once a second, and finds the host as before
    done = job.finish()
    host = re.search(r"has left: host (\S+) is about to go \(30 s\)", done.stderr)
    assert host is not None and "lost" not in done.stdout, done.output
    gone = {"localhost": 2, "127.0.0.1": 1}[host.group(1)]
    assert len(left) == 3 - gone and job.sizes()[job.newest()] == 3 - gone
    steps_are_done_once(job)
