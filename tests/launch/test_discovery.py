"""Where the hosts of an elastic job come from: what a script prints, what a file holds, and what of it counts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from world import until

from horoclone import failpoints
from horoclone.launch.discovery import FLAP_S, File, Fixed, FlapFilter, HostPoller, Script, parse_lines
from horoclone.launch.hosts import Host
from horoclone.launch.usage import LaunchError


@contextlib.contextmanager
def failpoints_of(text: str) -> Iterator[None]:
    failpoints.arm(text)
    yield
    failpoints.disarm()


def script(folder: Path, body: str) -> str:
    path = folder / "find.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_lines_keep_their_order_and_each_host_counts_once() -> None:
    text = "c:2\na:1\n\nc:2\nb\n# a comment\n[fe80::1]:4\nfe80::2\nd:0\n"
    expected = [Host("c", 2), Host("a", 1), Host("b", 3), Host("fe80::1", 4), Host("fe80::2", 3)]
    assert parse_lines(text, 3, "x") == expected


@pytest.mark.parametrize(
    "text, said",
    [
        ("a:x", "slots of a"),
        ("a:\u00b2", "slots of a"),  # a digit to str.isdigit(), and none to int()
        ("a:32769", "from 1 to 32768"),
        ("a:99999999999999999999", "from 1 to 32768"),
        ("a:20000\nb:20000", "more than 32768 slots"),
        ("-oProxy:1", "is not a host name"),
        ("<html><body>502 Bad Gateway</body></html>", "is not a host name"),
        ("a", "--slots"),
    ],
)
def test_what_is_no_host_is_refused_with_the_line(text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        parse_lines(text, None, "x")


def test_a_script_with_arguments(tmp_path: Path) -> None:
    assert Script(script(tmp_path, 'echo "$1:$2"') + " h 3", None).find() == [Host("h", 3)]


def test_a_script_without_a_first_line_and_a_command_of_the_shell(tmp_path: Path) -> None:
    path = tmp_path / "hosts.sh"
    path.write_text('echo "$1:2"\n')
    path.chmod(0o755)
    assert Script(f"{path} a", None).find() == [Host("a", 2)]
    assert Script(f"{path} b | sed s/2/3/ # of three", None).find() == [Host("b", 3)]
    with pytest.raises(LaunchError, match="exit code 127: .*no_such_script"):
        Script("/no_such_script", None).find()


def test_a_script_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"more than 0\.3 s"):
        Script(script(tmp_path, "sleep 60 & sleep 60"), None, limit_s=0.3).find()
    assert time.monotonic() - began < 40


def test_a_script_is_not_ended_once_its_number_may_be_that_of_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []

    def note(pid: int, number: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for it yet
        ended.append(pid)

    monkeypatch.setattr(os, "killpg", note)
    one = Script("echo a:1", None)
    assert one.find() == [Host("a", 1)] and len(ended) == 1
    one.stop()
    assert len(ended) == 1


@pytest.mark.parametrize("body, said", [("echo no such cluster >&2; exit 4", "exit code 4: no such cluster")])
def test_a_script_that_fails_says_what_it_said(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        Script(script(tmp_path, body), None).find()


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_script_that_prints_without_end_is_ended_before_it_takes_the_memory(
    tmp_path: Path, stream: str
) -> None:
    with pytest.raises(LaunchError, match="more than 1 MiB"):
        Script(script(tmp_path, f"yes >&{stream}"), None, limit_s=30).find()


def test_a_script_that_closes_its_output_and_goes_on_is_ended(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"more than 0\.3 s"):
        Script(script(tmp_path, "exec >&- 2>&-; sleep 60"), None, limit_s=0.3).find()


def test_a_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    source = File(str(path))
    path.write_text("a slots=2\n")
    assert source.find() == [Host("a", 2)]
    path.write_text("a slots=2\nb slots=1\n")
    assert source.find() == [Host("a", 2), Host("b", 1)] and source.changes and not Fixed([]).changes


def test_what_comes_counts_at_once_and_what_goes_when_it_stays_away() -> None:
    one = FlapFilter()
    assert one.take([Host("a", 2), Host("b", 1)], 0.0) == [Host("a", 2), Host("b", 1)]
    assert one.take([Host("b", 1)], 1.0) == [Host("a", 2), Host("b", 1)]
    assert one.take([Host("a", 2)], 1.5) == [Host("a", 2), Host("b", 1)]
    assert one.take([Host("a", 1), Host("c", 1)], 1.6)[0] == Host("a", 2)
    assert one.take([Host("a", 1), Host("c", 1)], 1.6 + FLAP_S) == [Host("a", 1), Host("c", 1)]
    assert one.take([Host("a", 3)], 9.0) == [Host("a", 3), Host("c", 1)]


def test_hosts_that_flap_every_second_never_count_as_gone() -> None:
    one = FlapFilter()
    both = [Host("a", 2), Host("b", 2)]
    one.take(both, 0.0)
    for second in range(1, 100):
        assert one.take(both if second % 2 else both[second % 4 == 0 :][:1], float(second)) == both


def test_a_look_that_fails_in_an_unforeseen_way_is_told_and_not_the_last() -> None:
    with failpoints_of("discovery.look=raise:ValueError@1"):
        poller = HostPoller(Script("echo a:1", None), lambda: None, every_s=0.02)
        poller.start()
        found: list[object] = []
        until(lambda: found.extend(poller.take()) or any(isinstance(one, list) for one in found))
        poller.close()
    assert "the hosts cannot be found: ValueError: failpoint" in str(found[0]) and [Host("a", 1)] in found


def test_the_poller_tells_what_it_finds_and_what_goes_wrong(tmp_path: Path) -> None:
    woken: list[int] = []
    path = tmp_path / "hosts"
    poller = HostPoller(File(str(path)), lambda: woken.append(1), every_s=0.02)
    poller.start()
    found: list[object] = []
    deadline = time.monotonic() + 10
    while not any(isinstance(one, list) for one in found) and time.monotonic() < deadline:
        time.sleep(0.02)
        found += poller.take()
        if found:
            path.write_text("a slots=2\n")
    poller.close()
    assert isinstance(found[0], LaunchError) and found[-1] == [Host("a", 2)] and woken
