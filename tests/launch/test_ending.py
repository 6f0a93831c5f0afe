"""How a job ends: exit codes, signals, Ctrl-C, a killed launcher. Real processes, real signals; nothing may be left."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time

import pytest

from horoclone.launch import process, termination

RUN = [sys.executable, "-m", "horoclone.launch"]
PYTHON = sys.executable
RANK = "import os, sys, time, signal, subprocess\nr = int(os.environ['HOROVOD_RANK'])\n"
IGNORE = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
SLEEP = RANK + "print('up', flush=True)\ntime.sleep(60)\n"


def _ends(started):
    """Waits for the launcher and checks that nothing is left when it has gone."""
    done = started.finish(30)
    assert not (left := started.left_over(5)), f"left:\n{left}\n{done.output}"
    return done


def with_limits(**limits):
    """horoclonerun with other limits of termination.py."""
    code = "import sys; from horoclone.launch import cli, termination\n"
    code += "".join(f"termination.{name} = {value}\n" for name, value in limits.items())
    return [PYTHON, "-c", f"{code}sys.exit(cli.main())"]


def _end_by(launch, body, size, *numbers, program=RUN, flags=()):
    """The ranks are up, the launcher gets these signals one after the other, and nothing is left of the job."""
    started = launch.start([*program, "-np", str(size), *flags, PYTHON, "-c", body])
    started.wait_for("] up", count=size)
    for number in numbers:
        os.kill(started.process.pid, number)
        time.sleep(0.3)
    return _ends(started)


def test_success_is_silent_and_zero(launch):
    done = launch([*RUN, "-np", "3", "true"])
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_the_exit_code_is_the_culprits(launch):
    done = launch([*RUN, "-np", "3", PYTHON, "-c", RANK + "sys.exit(7 if r == 1 else 0)"], check=False)
    assert done.returncode == 7
    lines = done.stderr.splitlines()
    assert lines[0].startswith("horoclonerun: rank 1 (localhost, pid ") and lines[0].endswith(
        "ended with exit code 7"
    )
    assert lines[-1].startswith("root cause: rank 1 ") and "exit code 7" in lines[-1]


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGUSR2"])
def test_a_signal_is_named_and_gives_128_plus_its_number(launch, name):
    number = getattr(signal, name)
    no_core = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    body = f"{RANK}{no_core}if r == 1: os.kill(os.getpid(), {int(number)})"
    done = launch([*RUN, "-np", "2", PYTHON, "-c", body], check=False)
    assert done.returncode == 128 + number, done.output
    assert f"was killed by {name}" in done.stderr
    if name == "SIGKILL":
        assert "hint: somebody sent it (kill -9), or memory ran out" in done.stderr


def test_ranks_that_hang_after_a_failure_get_sigterm_and_sigkill_after_the_grace_period(launch):
    body = RANK + (
        "def leave(*_): print('asked to leave', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave if r == 1 else signal.SIG_IGN)\n"
        "if r == 0: time.sleep(0.5); sys.exit(3)\n"
        "time.sleep(60)"
    )
    done = launch(
        [*with_limits(FAILURE_WAIT_S=2), "-np", "3", "--grace", "1", PYTHON, "-c", body], check=False
    )
    assert done.returncode == 3 and done.seconds >= 3.0 and done.stdout == "[1] asked to leave\n"
    waits = "horoclonerun: rank 0 failed; waiting for ranks 1-2 to notice and say so; SIGTERM to who is left in 1 s"
    assert waits in done.stderr.splitlines(), done.stderr


def test_a_wait_of_seconds_is_said_and_a_short_one_is_not():
    end = termination.TerminationPolicy(grace_s=30.0)
    end.fail(100.0)
    assert end.word(100.5) is None and end.next_look_s() == 101.0
    assert end.word(101.0) == "waiting for {ranks} to notice and say so; SIGTERM to who is left in 4 s"
    assert end.word(101.1) is None and end.next_look_s() == 105.0
    assert [order.number for order in end.due(105.0)] == [signal.SIGTERM]
    assert end.word(106.0) == "SIGTERM was sent to {ranks}; SIGKILL in 29 s (--grace)"
    end.interrupt(107.0)
    assert end.word(200.0) is None


def test_the_excepthooks_report_gives_traceback_and_blame(launch):
    body = RANK + (
        "from horoclone.bootstrap.client import Client\n"
        "client = Client(os.environ['HOROCLONE_RENDEZVOUS'].split(','),"
        " os.pread(int(os.environ['HOROCLONE_SECRET_FD']), 99, 0), os.environ['HOROCLONE_JOB'], 9.0)\n"
        "if r == 0:\n"
        "    client.report_failure(0, 'Traceback (most recent call last):\\n  x\\nPeerLost: rank 1 raised', True)\n"
        "    sys.exit(4)\n"
        "time.sleep(0.5)\n"
        "client.report_failure(1, 'Traceback (most recent call last):\\n  mine\\nKeyError: lost')\n"
        "print('secret line', file=sys.stderr); sys.exit(5)\n"
    )
    done = launch([*RUN, "-np", "2", PYTHON, "-c", body], check=False)
    assert done.returncode == 5, done.output
    assert "    |   mine" in done.stderr and done.stderr.splitlines()[-1].endswith("KeyError: lost")
    assert "    | secret line" in done.stderr and "rank 0 was stopped because of this." in done.stderr


def test_an_exception_is_the_cause_also_where_the_script_has_a_hook_of_its_own(launch):
    """Set after hvd.init(), as rich.traceback.install() may be: it does not call ours."""
    body = (
        "import sys\nimport horoclone as hvd\nhvd.init()\n"
        "sys.excepthook = lambda kind, error, trace: print('my hook saw', error)\n"
        "if hvd.rank() == 1:\n    raise ValueError('bad batch 17')\n"
        "hvd.barrier()\n"
    )
    done = launch([*RUN, "-np", "2", PYTHON, "-c", body], check=False)
    assert "[0] my hook saw barrier: rank 1 raised ValueError: bad batch 17" in done.stdout, done.output
    assert done.stderr.splitlines()[-1].endswith("ended with exit code 1: ValueError: bad batch 17"), (
        done.output
    )


# When which signal is sent is tested in test_hosts.py, on a clock of its own.


def test_control_c_ends_all_in_one_line(launch):
    done = _end_by(launch, SLEEP, 3, signal.SIGINT)
    assert done.returncode == 130
    assert done.stderr == "horoclonerun: interrupted; ranks 0-2 stopped\n"


def test_a_rank_may_save_its_work_on_control_c(launch):
    body = (
        RANK
        + "try:\n    print('up', flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n    print('saved', flush=True)"
    )
    done = _end_by(launch, body, 2, signal.SIGINT)
    assert done.returncode == 130 and done.stdout.count("saved") == 2


def test_the_second_control_c_kills_at_once(launch):
    program = with_limits(INTERRUPT_TERM_S=600, INTERRUPT_KILL_S=600)
    done = _end_by(launch, f"{IGNORE}{SLEEP}", 2, signal.SIGINT, signal.SIGINT, program=program)
    assert done.returncode == 130


def test_control_c_ends_the_ranks_children_and_stopped_ranks_too(launch):
    body = RANK + (
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print('up', flush=True)\n"
        "if r == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "child.wait()"
    )
    assert _end_by(launch, body, 2, signal.SIGINT).returncode == 130


def test_sigterm_is_forwarded_with_time_to_save(launch):
    body = RANK + (
        "def save(*_):\n    time.sleep(1.0); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    done = _end_by(launch, body, 2, signal.SIGTERM)
    assert done.returncode == 143 and done.stdout.count("saved") == 2
    assert done.stderr == "horoclonerun: SIGTERM was forwarded; ranks 0-1 ended\n"


def test_sigterm_reaches_a_program_behind_a_shell_wrapper(launch, tmp_path):
    script = tmp_path / "train.sh"
    body = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    script.write_text(f'#!/bin/sh\n"{PYTHON}" -c "$BODY"\necho after\n')
    script.chmod(0o755)
    started = launch.start([*RUN, "-np", "1", str(script)], env={"BODY": body})
    started.wait_for("] up", count=1)
    os.kill(started.process.pid, signal.SIGTERM)
    done = _ends(started)
    assert done.returncode == 143 and "saved" in done.stdout


def test_sigusr1_is_passed_through(launch):
    body = (
        RANK + "signal.signal(signal.SIGUSR1, lambda *_: (print('checkpoint', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    done = _end_by(launch, body, 2, signal.SIGUSR1)
    assert done.returncode == 0 and done.stdout.count("checkpoint") == 2


def test_a_killed_launcher_leaves_nothing(launch):
    body = (
        RANK + "subprocess.Popen(['sleep', '60'])\nsignal.signal(15, signal.SIG_IGN)\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    started = launch.start([*RUN, "-np", "2", "sh", "-c", f'"{PYTHON}" -c "$BODY"; true'], env={"BODY": body})
    started.wait_for("] up", count=2)
    assert len(started.processes()) >= 7  # launcher, reaper, and per rank sh, python and sleep
    os.kill(started.process.pid, signal.SIGKILL)
    assert not (left := started.left_over(10)), left


def test_what_a_rank_leaves_running_is_ended_with_the_job(launch):
    body = RANK + "subprocess.Popen(['sleep', '60'])"
    started = launch.start([*RUN, "-np", "2", PYTHON, "-c", body])
    assert _ends(started).returncode == 0


def test_a_closed_reader_ends_the_job(launch, tmp_path):
    command = f'{PYTHON} -m horoclone.launch -np 2 yes | head -n 3; echo "code ${{PIPESTATUS[0]}}"'
    done = launch(["bash", "-c", command])
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and lines[-1] == "code 141" and {line[3:] for line in lines[:3]} <= {" y"}


def test_a_full_disk_under_the_output_is_named(launch):
    done = launch(["bash", "-c", f"{PYTHON} -m horoclone.launch -np 1 yes > /dev/full"], check=False)
    assert done.returncode == 141 and "the output cannot be written: No space left on device" in done.stderr


def test_a_stuck_reader_does_not_hold_up_control_c(launch):
    read_end, write_end = os.pipe()
    try:
        started = launch.start(
            ["sh", "-c", f"exec {PYTHON} -m horoclone.launch -np 2 yes >/proc/{os.getpid()}/fd/{write_end}"]
        )
        time.sleep(1.5)
        os.kill(started.process.pid, signal.SIGINT)
        assert _ends(started).returncode == 130
    finally:
        os.close(read_end)
        os.close(write_end)


def test_descriptors_of_the_launcher_do_not_leak_into_ranks(launch):
    body = (
        "import os\n"
        "for n in sorted(map(int, os.listdir('/proc/self/fd'))):\n"
        "    try: print(n, os.readlink(f'/proc/self/fd/{n}'))\n"
        "    except OSError: pass\n"
    )
    done = launch([*RUN, "-np", "2", PYTHON, "-c", body])
    kinds = [line.split(None, 2)[2] for line in done.stdout.splitlines()]
    assert not [kind for kind in kinds if "socket:" in kind or "eventpoll" in kind or "pidfd" in kind], (
        done.stdout
    )
    assert sum("horoclone-secret" in kind for kind in kinds) == 2


@pytest.mark.parametrize("limit", [7, 18])
def test_too_few_descriptors_are_said_without_a_traceback(launch, limit):
    command = f"ulimit -n {limit}; exec {shlex.quote(sys.executable)} -m horoclone.launch -np 2 true"
    done = launch(["sh", "-c", command], check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.output
    assert (
        f"too few file descriptors for 2 ranks: the limit is {limit}. Raise it: ulimit -n" in done.stderr
    ), done.output


def test_a_kill_in_a_cgroup_below_the_launchers_is_counted(monkeypatch, tmp_path):
    own = tmp_path / "self"
    own.write_text("9:name=systemd:/\n4:memory:/job\n0::/\n")
    monkeypatch.setattr(process, "_OWN_CGROUPS", str(own))
    monkeypatch.setattr(process, "_CGROUPS", str(tmp_path))
    rank = tmp_path / "memory" / "job" / "rank1"
    rank.mkdir(parents=True)
    (rank.parent / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (rank / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert process.memory_kills() == 5
    own.write_text("0::/unit\n")
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "memory.events").write_text("oom 1\noom_kill 7\n")
    assert process.memory_kills() == 7, "version 2 counts what is below by itself"
