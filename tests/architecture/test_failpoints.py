"""Failpoints: the list in the code, the calls, and the page name the same ones; what is asked for is what happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import run_python, until

from horoclone import errors, failpoints
from horoclone.launch import doctor

ROOT = Path(__file__).resolve().parents[2]
REACH = 'import sys; from horoclone import failpoints; [failpoints.reach("init.wait") for _ in range(3)]; print("past")'


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    failpoints.disarm()
    yield
    failpoints.disarm()


def test_code_and_list_have_the_same_names_and_the_page_their_groups() -> None:
    calls = [
        name
        for path in (ROOT / "horoclone").rglob("*.py")
        for name in re.findall(r'failpoints\.reach\(\s*"([\w.]+)"', path.read_text())
    ]
    assert sorted(calls) == sorted(failpoints.POINTS), "each point is reached in one place"
    page = (ROOT / "docs/failpoints.md").read_text()
    groups = {name.rpartition(".")[0] for name in failpoints.POINTS}
    assert not [group for group in groups if f"`{group}`" not in page]


def test_nothing_is_armed_and_counted_by_default() -> None:
    assert failpoints.reach is failpoints._nothing
    failpoints.reach("init.wait")
    assert failpoints._reached == {}


@pytest.mark.parametrize(
    "text, said",
    [
        ("init.wiat=kill", "there is no failpoint 'init.wiat'"),
        ("init.wait", "'init.wait' is not understood"),
        ("init.wait=explode", "has no such action"),
        ("init.wait=raise:NoSuchError", "has no such action"),
        ("init.wait=raise:str", "has no such action"),
        ("init.wait=exit:256", "has no such action"),
        ("init.wait=delay:soon", "has no such action"),
        ("init.wait=delay:-1", "has no such action"),
        ("init.wait=kill:9", "has no such action"),
        ("init.wait=kill@", "is not understood"),
        ("init.wait=kill@0", "is not understood"),  # it would never act
        ("init.wiat=kill", "did you mean 'init.wait'?"),
        ("nonsense=kill", "there are elastic.run.failed, "),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_entry(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        failpoints.arm(f"init.told=delay:0; {text}")


def test_counts_and_ranks_choose_when_and_where() -> None:
    failpoints.arm(
        "init.wait=raise:PeerLost@2; init.told=raise:OSError@2+ ;init.gathered=raise:OSError#3", "1"
    )
    failpoints.reach("init.wait")
    with pytest.raises(errors.PeerLost, match="failpoint init.wait=raise:PeerLost@2"):
        failpoints.reach("init.wait")
    failpoints.reach("init.wait")
    failpoints.reach("init.told")
    for _ in range(2):
        with pytest.raises(OSError):
            failpoints.reach("init.told")
    failpoints.reach("init.gathered")


def test_several_threads_count_together() -> None:
    seen: list[float] = []
    failpoints.on("membership.form", lambda: seen.append(time.monotonic()), first=51)
    threads = [
        threading.Thread(target=lambda: [failpoints.reach("membership.form") for _ in range(20)])
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(seen) == 50


@pytest.mark.parametrize(
    "text, code, said",
    [
        ("init.wait=kill@2", -signal.SIGKILL, ""),
        ("init.wait=exit:7", 7, ""),
        ("init.wait=raise:OSError@3#2", 1, "failpoint init.wait=raise:OSError@3#2"),
        ("init.wait=kill#1", 0, ""),
        ("init.wait=delay:0.1", 0, ""),
        ("init.waits=kill", 1, "there is no failpoint 'init.waits'"),
    ],
)
def test_the_variable_is_read_once_at_import(text: str, code: int, said: str) -> None:
    environment = {**os.environ, failpoints.VARIABLE: text, "HOROVOD_RANK": "2"}
    began = time.monotonic()
    done = run_python(REACH, env=environment)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert ("past" in done.stdout) == (code == 0)
    assert "delay" not in text or time.monotonic() - began >= 0.3


def test_a_stopped_process_stays_and_goes_on_when_it_is_woken() -> None:
    environment = {**os.environ, failpoints.VARIABLE: "init.wait=stop@1"}
    with subprocess.Popen([sys.executable, "-c", REACH], env=environment, stdout=subprocess.PIPE) as process:
        until(lambda: "T (stopped)" in Path(f"/proc/{process.pid}/status").read_text())
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and b"past" in out


@pytest.mark.parametrize(
    "command, program",
    [
        (["horoclone.launch", "-np", "1", "true"], "horoclonerun"),
        (["horoclone.launch", "--min-np", "1", "true"], "horoclonerun"),
        (["horoclone.launch.tool", "run", "-np", "1", "true"], "horoclone run"),
        (["horoclone.ps", "--register", "0"], "horoclone.ps"),
    ],
)
def test_a_command_refuses_a_wrong_variable_with_one_line(launch, command: list[str], program: str) -> None:
    wrong = {failpoints.VARIABLE: "init.told=delay:0; init.wait=explode"}
    done = launch([sys.executable, "-m", *command], env=wrong, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{program}: HOROCLONE_FAILPOINTS: 'init.wait=explode' has no such action: kill, stop, exit:CODE, "
        "raise:CLASS, delay:SECONDS.\n"
    )


def test_a_script_can_import_everything_and_init_raises(launch) -> None:
    """The traceback leads to the call of init(), not through the imports of our modules."""
    script = (
        "import horoclone.elastic, horoclone as hvd\n"
        "for start in (hvd.init, lambda: horoclone.run(print)):\n"
        "    try:\n"
        "        start()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    done = launch([sys.executable, "-c", script], env={failpoints.VARIABLE: "init.wait"})
    line = "HOROCLONE_FAILPOINTS: 'init.wait' is not understood; an entry is NAME=ACTION"
    assert [text.startswith(line) for text in done.stdout.splitlines()] == [True, True], done.output


@pytest.mark.parametrize(
    "text, status, said",
    [
        ("init.waits=kill", "bad", "there is no failpoint 'init.waits'"),
        ("init.wait=kill", "note", "jobs fail"),
    ],
)
def test_the_doctor_names_the_variable(monkeypatch, text: str, status: str, said: str) -> None:
    """That it is among the doctor's findings, tests/launch/test_command.py shows."""
    monkeypatch.setenv(failpoints.VARIABLE, text)
    monkeypatch.setattr(failpoints, "_refused", "")
    failpoints._read(os.environ)
    (found,) = doctor._failpoints()
    assert found.status == status and said in found.text
