"""Ranks on other hosts, through an ssh that is a small script (it does what sshd does: `sh -c` of one string) and
through a real sshd on loopback where one is installed."""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from world import free_port

from horoclone.bootstrap import wire
from horoclone.launch import link

RUN = [sys.executable, "-m", "horoclone.launch"]
PYTHON = sys.executable
RANK = "import os, sys, time, signal, subprocess\nr = int(os.environ['HOROVOD_RANK'])\n"

# Options end at the host; the rest is joined with spaces and given to a shell that starts in another folder, with
# another environment, as sshd does. Every call is noted, so that a test sees what could be seen in the process list.
_FAKE_SSH = """#!{python}
import os, sys
words = sys.argv[1:]
with open({calls!r}, "a") as file:
    file.write(repr(words) + "\\n")
while words and words[0].startswith("-"):
    words = words[1 if words[0] == "-T" else 2:]
host, command = words[0], " ".join(words[1:])
if host == "closed-host":
    sys.stderr.write("ssh: connect to host closed-host port 22: Connection refused\\n")
    sys.exit(255)
if host == "silent-host":
    import time
    time.sleep(60)
os.chdir("/")
print("Welcome to", host, flush=True)
keep = {{name: os.environ[name] for name in ("PATH", "HOROCLONE_TEST_RUN") if name in os.environ}}
os.execve("/bin/sh", ["sh", "-c", command], {{**keep, "HOME": "/", "REMOTE_HOST": host}})
"""


@pytest.fixture
def ssh(tmp_path) -> dict[str, str]:
    """Environment in which `ssh` is our script; the calls are in tmp_path/calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "ssh"
    script.write_text(_FAKE_SSH.format(python=PYTHON, calls=str(tmp_path / "calls")))
    script.chmod(0o755)
    return {"PATH": f"{folder}:{Path(PYTHON).parent}:{os.environ['PATH']}"}


HOSTS = "host-a.invalid:2,localhost:1,host-b.invalid:2"


def test_ranks_run_on_their_hosts_with_their_numbers_and_our_environment(launch, ssh, tmp_path):
    body = RANK + (
        "print(os.environ.get('REMOTE_HOST'), os.environ['HOROVOD_HOSTNAME'], os.environ['HOROVOD_LOCAL_RANK'],"
        " os.environ['HOROVOD_CROSS_RANK'], os.environ['DATA'], os.getcwd())"
    )
    logs = ["--output-filename", tmp_path / "logs"]
    done = launch(
        [*RUN, "-np", "5", "-H", HOSTS, *logs, PYTHON, "-c", body], env={**ssh, "DATA": "it's; $(here)"}
    )
    rest = f"it's; $(here) {Path(__file__).resolve().parents[2]}"  # the folder of the launcher, on every host
    assert sorted(done.stdout.splitlines()) == [
        f"[0] host-a.invalid host-a.invalid 0 0 {rest}",
        f"[1] host-a.invalid host-a.invalid 1 0 {rest}",
        f"[2] None localhost 0 1 {rest}",
        f"[3] host-b.invalid host-b.invalid 0 2 {rest}",
        f"[4] host-b.invalid host-b.invalid 1 1 {rest}",
    ]
    assert (tmp_path / "logs" / "rank.4" / "stdout").read_text().startswith("host-b.invalid ")
    calls = (tmp_path / "calls").read_text()
    assert calls.count("\n") == 2 and "BatchMode=yes" in calls


def test_torchs_variables_name_this_host_as_the_user_does_and_number_unequal_hosts(launch, ssh):
    body = RANK + "print(os.environ['GROUP_RANK'], os.environ['MASTER_ADDR'])"
    for name, address in (("localhost", wire.routable_addresses()[0]), (socket.gethostname(),) * 2):
        hosts = f"{name}:1,host-a.invalid:2,host-b.invalid:2"
        done = launch([*RUN, "-np", "5", "-H", hosts, PYTHON, "-c", body], env=ssh)
        numbers = [line.split()[1:] for line in sorted(done.stdout.splitlines())]
        assert numbers == [[node, address] for node in "01122"]


def test_arguments_pass_through_no_shell(launch, ssh, tmp_path):
    nasty = [
        "a b", "it's", '"q"', ";", f"$(touch {tmp_path}/bad)", f"`touch {tmp_path}/bad`", "*", "", "&&", "\\",
        "new\nline", "ä"
    ]  # fmt: skip
    done = launch(
        [
            *RUN, "-np", "1", "-H", "host-a.invalid", PYTHON, "-c", "import sys; print(repr(sys.argv[1:]))",
            *nasty
        ],
        env=ssh,
    )  # fmt: skip
    assert done.stdout == f"[0] {nasty!r}\n" and not (tmp_path / "bad").exists()


def test_neither_secret_nor_command_nor_environment_is_in_sshs_arguments(launch, ssh, tmp_path):
    body = (
        "import os; print(os.pread(int(os.environ['HOROCLONE_SECRET_FD']), 99, 0).hex(), os.environ['TOKEN'])"
    )
    done = launch(
        [*RUN, "-np", "3", "-H", "host-a.invalid:2,localhost:1", PYTHON, "-c", body],
        env={**ssh, "TOKEN": "xyzzy"},
    )
    secrets = {line.split()[1] for line in done.stdout.splitlines()}
    assert len(secrets) == 1 and len(next(iter(secrets))) == 64
    calls = (tmp_path / "calls").read_text()
    assert next(iter(secrets)) not in calls and "xyzzy" not in calls and "pread" not in calls
    assert "xyzzy" in done.stdout


def test_exit_codes_signals_and_stderr_of_remote_ranks_are_exact(launch, ssh):
    base = [*RUN, "-np", "2", "-H", "localhost:1,host-a.invalid:1", PYTHON, "-c"]
    done = launch([*base, RANK + "print('why', file=sys.stderr); sys.exit(7 * r)"], env=ssh, check=False)
    assert (
        done.returncode == 7 and "rank 1 (host-a.invalid, pid " in done.stderr and "[1] why\n" in done.stderr
    )
    done = launch([*base, RANK + "if r: os.kill(os.getpid(), 9)"], env=ssh, check=False)
    assert done.returncode == 137 and "was killed by SIGKILL" in done.stderr


def test_a_host_that_refuses_is_explained_and_ends_the_job(launch, ssh):
    done = launch([*RUN, "-np", "2", "-H", "localhost:1,closed-host:1", "sleep", "60"], env=ssh, check=False)
    assert done.returncode == 1 and done.seconds < 40
    assert (
        "Connection refused" in done.stderr
        and "Try it by hand: ssh " in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_host_that_never_answers_is_given_up_after_the_start_timeout(launch, ssh):
    done = launch(
        [*RUN, "-np", "1", "--start-timeout", "1", "-H", "silent-host", "true"], env=ssh, check=False
    )
    assert done.returncode == 1 and done.seconds < 40 and "did not answer within 1 s" in done.stderr


def test_control_c_while_a_host_does_not_answer(launch, ssh):
    started = launch.start(
        [*RUN, "-np", "2", "-H", "silent-host:1,localhost:1", "sh", "-c", "echo up; exec sleep 60"], env=ssh
    )
    started.wait_for("up", count=1)
    os.kill(started.process.pid, signal.SIGINT)
    done = started.finish(30)
    assert done.returncode == 130 and not started.left_over(5)


def test_no_python_on_the_other_host_is_explained(launch, ssh):
    command = [*RUN, "-np", "1", "-H", "host-a.invalid", "--remote-python", "/no/python", "true"]
    done = launch(command, env=ssh, check=False)
    assert done.returncode == 1 and "/no/python" in done.stderr and "--remote-python" in done.stderr


def test_a_script_alone_is_run_by_the_python_of_its_host(launch, ssh, tmp_path):
    other = tmp_path / "other-python"
    other.symlink_to(PYTHON)
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.orig_argv[0])")
    options = ["-np", "2", "-H", "localhost:1,host-a.invalid:1", "--remote-python", str(other)]
    # The environment's packages are not beside the link
    path = os.pathsep.join(one for one in sys.path if one)
    done = launch([*RUN, *options, str(script)], env={**ssh, "PYTHONPATH": path})
    assert sorted(done.stdout.splitlines()) == [f"[0] {PYTHON}", f"[1] {other}"]


def test_a_command_that_is_missing_there_is_named_with_its_host(launch, ssh):
    done = launch([*RUN, "-np", "1", "-H", "host-a.invalid", "no-such-command"], env=ssh, check=False)
    assert done.returncode == 127 and "host-a.invalid: cannot run 'no-such-command'" in done.stderr


def test_control_c_and_sigterm_reach_remote_ranks(launch, ssh):
    body = RANK + "subprocess.Popen(['sleep', '60'])\nprint('up', flush=True)\ntime.sleep(60)"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        started = launch.start(
            [*RUN, "-np", "3", "-H", "localhost:1,host-a.invalid:2", PYTHON, "-c", body], env=ssh
        )
        started.wait_for("up", count=3)
        os.kill(started.process.pid, number)
        done = started.finish(30)
        assert done.returncode == code, done.output
        assert not (left := started.left_over(5)), left


class Closed:
    """An ssh that has closed its output. code: with which it has ended, None: it goes on."""

    pid = 1 << 22

    def __init__(self, code):
        self.code = code
        ends = [os.pipe() for _ in range(3)]
        os.close(ends[1][1])
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(ends[0][1], "wb", 0),
            *(os.fdopen(one, "rb", 0) for one, _ in ends[1:]),
        )
        self.others = ends[0][0], ends[2][1]

    def poll(self):
        return self.code

    def wait(self, limit_s=None):
        raise AssertionError("the loop waits")


@pytest.mark.parametrize("code", [None, 255])
def test_an_ssh_that_has_closed_its_output_and_goes_on_does_not_hold_up_the_loop(code, monkeypatch):
    process, lost = Closed(code), []
    monkeypatch.setattr(link.subprocess, "Popen", lambda *_, **__: process)
    events = SimpleNamespace(host_lost=lambda _, why, stage: lost.append(str(why)))
    one = link.HostLink("host", link.SshOptions(), events, SimpleNamespace(watch=lambda _: None))
    one.ranks = {0}
    with selectors.DefaultSelector() as selector:
        one.open(selector, b"")
        ((key, _),) = selector.select(5)
        key.data()
        now = time.monotonic()
        one.check_deadline(now)
        assert len(lost) == (code is not None) and one.is_ending
        one.check_deadline(now + link.ENDS_S)
        one.check_deadline(now + link.ENDS_S)
        assert len(lost) == 1 and f"(exit code {code})" in lost[0] and not selector.get_map()
    for stream in (process.stdin, process.stdout, process.stderr):
        stream.close()
    for descriptor in process.others:
        os.close(descriptor)


def test_when_ssh_dies_the_remote_ranks_die_and_the_job_ends(launch, ssh):
    body = RANK + "print('up', flush=True)\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(60)"
    soon = "import sys; from horoclone.launch import cli, termination; termination.FAILURE_WAIT_S = 0.5; sys.exit(cli.main())"
    for victim in ("launcher", "agent"):
        started = launch.start(
            [
                PYTHON,
                "-c",
                soon,
                "-np",
                "2",
                "--grace",
                "1",
                "-H",
                "localhost:1,host-a.invalid:1",
                PYTHON,
                "-c",
                body,
            ],
            env=ssh,
        )
        started.wait_for("up", count=2)
        if victim == "launcher":
            os.kill(started.process.pid, signal.SIGKILL)
        else:
            agents = [
                pid
                for pid in started.processes()
                if b"horoclone.launch.remote" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            assert len(agents) == 1
            os.kill(agents[0], signal.SIGKILL)
            done = started.finish(15)
            assert done.returncode == 255 and "the ssh connection was lost" in done.stderr, done.output
        assert not (left := started.left_over(10)), f"{victim}: {left}"


# --- a real sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A real sshd on a loopback port with a throw-away key: {'port', 'key', 'PATH'}."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd: apt-get install openssh-server openssh-client")
    if os.geteuid() != 0:
        pytest.skip("sshd needs root here")
    folder = tmp_path_factory.mktemp("sshd")
    folder.chmod(0o700)
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=20
        )
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    port = free_port()
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        "UsePAM no\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [program, "-D", "-e", "-f", folder / "config"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    # The launcher only sees what a user could set up in ~/.ssh: here a wrapper names the key file of known hosts.
    (folder / "bin").mkdir()
    wrapper = folder / "bin" / "ssh"
    options = f"-F /dev/null -o UserKnownHostsFile={folder}/known -o HostName=127.0.0.1"
    options += f" -o HostKeyAlias=[127.0.0.1]:{port}"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(str(shutil.which("ssh")))} {options} "$@"\n')
    wrapper.chmod(0o755)
    try:
        deadline = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"sshd does not start here: {(folder / 'log').read_text()[-300:]}")
            time.sleep(0.05)
        yield {"port": str(port), "key": str(folder / "user"), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    finally:
        server.terminate()
        server.wait(10)


def _over_sshd(sshd: dict[str, str], size: int) -> list[str]:
    hosts = "localhost:1,node-b.invalid:8"
    return [*RUN, "-np", str(size), "-H", hosts, "-p", sshd["port"], "-i", sshd["key"], PYTHON, "-c"]


def test_a_real_sshd_runs_ranks_and_carries_quotes_codes_and_secrets(launch, sshd):
    env = {"PATH": sshd["PATH"], "DATA": "it's; $(here)"}
    body = (
        RANK + "secret = os.fstat(int(os.environ['HOROCLONE_SECRET_FD'])).st_size\n"
        "print(r, bool(os.environ.get('SSH_CONNECTION')), os.environ['DATA'], sys.argv[1:], secret)"
    )
    done = launch([*_over_sshd(sshd, 3), body, "a b", "$(x)"], env=env)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {rank} {rank > 0} it's; $(here) ['a b', '$(x)'] 32" for rank in range(3)
    ]
    done = launch([*_over_sshd(sshd, 2), RANK + "sys.exit(5 * r)"], env=env, check=False)
    assert done.returncode == 5 and "rank 1 (node-b.invalid" in done.stderr


@pytest.mark.in_turn
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_real_sshd_leaves_nothing_when_the_launcher_is_killed_or_interrupted(launch, sshd, number, code):
    body = RANK + "print('up', flush=True)\ntime.sleep(60)"
    started = launch.start([*_over_sshd(sshd, 2), body], env={"PATH": sshd["PATH"]})
    started.wait_for("up", count=2)
    os.kill(started.process.pid, number)
    assert started.finish(30).returncode == code
    assert not (left := started.left_over(10)), left


def test_a_real_sshd_that_refuses_the_key_is_explained(launch, sshd, tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True, timeout=20
    )
    command = _over_sshd({**sshd, "key": str(tmp_path / "other")}, 2)
    done = launch([*command, "pass"], env={"PATH": sshd["PATH"]}, check=False)
    assert (
        done.returncode == 1
        and "Permission denied" in done.stderr
        and "login without a password" in done.stderr
    )
