"""--notice-script: what its loop tells of a host, and what becomes of a loop that ends, hangs or cannot run."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horoclone.launch import notice_script
from horoclone.launch.link import SshOptions
from horoclone.launch.notice_script import NoticeScript, parse
from horoclone.launch.process import Reaper

Told = list[tuple[str, float | None]]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("horoclone-notice 0 120", (0, 120.0)),
        ("horoclone-notice 0 12.5 seconds", (0, 12.5)),
        ('horoclone-notice 0 {"action": "terminate"}', (0, None)),
        ("horoclone-notice 0 ", (0, None)),
        ("horoclone-notice 22 404", (22, 404.0)),
        ("Last login: yesterday", None),
        ("horoclone-notice x 1", None),
    ],
)
def test_a_line_of_the_loop(line: str, expected: object) -> None:
    assert parse(line) == expected


@pytest.fixture
def reaper() -> Iterator[Reaper]:
    one = Reaper()
    yield one
    one.close()


@pytest.fixture
def scripts(reaper: Reaper) -> Iterator[Callable[..., tuple[NoticeScript, Told, Callable[..., None]]]]:
    opened: list[tuple[NoticeScript, selectors.BaseSelector]] = []

    def start(command: str) -> tuple[NoticeScript, Told, Callable[..., None]]:
        told: Told = []
        selector = selectors.DefaultSelector()
        one = NoticeScript(
            command, lambda host, left: told.append((host, left)), selector, SshOptions(), reaper, 0.02
        )
        opened.append((one, selector))

        def turn_until(what: Callable[[], object]) -> None:
            deadline = time.monotonic() + 20
            while not what():
                assert time.monotonic() < deadline, told
                for key, _ in selector.select(0.1):
                    key.data()

        return one, told, turn_until

    yield start
    for one, selector in opened:
        one.close()
        assert not selector.get_map(), "nothing of a loop is left"
        selector.close()


def test_code_zero_says_that_the_host_goes_and_when(scripts: Callable[..., tuple], tmp_path: Path) -> None:
    one, told, turn_until = scripts(f"test -e {tmp_path}/going && echo 45")
    one.watch(["localhost"], 0.0)
    time.sleep(0.2)
    assert told == []
    (tmp_path / "going").touch()
    turn_until(lambda: told)
    assert told[0] == ("localhost", 45.0)


def test_a_host_that_is_gone_is_not_asked_any_more(scripts: Callable[..., tuple]) -> None:
    one, told, turn_until = scripts("true")
    one.watch(["localhost"], 0.0)
    turn_until(lambda: told)
    one.watch([], 1.0)
    told.clear()
    time.sleep(0.1)
    assert told == [] and one.next_s() == float("inf")


def test_a_command_that_does_not_exist_is_told_once(
    scripts: Callable[..., tuple], capfd: pytest.CaptureFixture[str]
) -> None:
    one, told, turn_until = scripts("no-such-command-here")
    one.watch(["localhost"], 0.0)
    turn_until(lambda: one._complained)
    time.sleep(0.2)
    said = capfd.readouterr().err
    assert said.count("cannot be run on localhost (127)") == 1 and told == []


def test_a_loop_that_ends_or_is_silent_begins_again(
    scripts: Callable[..., tuple], capfd: pytest.CaptureFixture[str]
) -> None:
    one, told, turn_until = scripts("echo 7")
    now = time.monotonic()
    one.watch(["localhost"], now)
    turn_until(lambda: told)
    os.killpg(one._loops["localhost"].process.pid, 9)
    turn_until(lambda: not one._loops)
    one.watch(["localhost"], now)
    assert not one._loops and one.next_s() > now
    told.clear()
    one.watch(["localhost"], one.next_s())
    turn_until(lambda: told)
    first = one._loops["localhost"]
    one.watch(["localhost"], first.heard_s + 2 * notice_script.LIMIT_S + 1)
    assert one._loops["localhost"] is not first
    said = capfd.readouterr().err
    assert "its shell has ended" in said and "nothing was heard for 60" in said
