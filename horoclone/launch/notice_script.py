"""--notice-script: a command that runs repeatedly on each host and tells when that host is about to be taken away.

Exit code 0 means so, as from `grep -q` or from `curl -f` on a cloud's notice; a number that the command prints is the
time left in seconds. A loop of the host's shell runs it, here or through one ssh connection to each host, and reports
each run. Thread: the job's loop.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable

from horoclone.launch.hosts import is_local
from horoclone.launch.link import SshOptions, ssh_command
from horoclone.launch.process import Reaper, dies_with_parent
from horoclone.launch.usage import say

EVERY_S = 5
LIMIT_S = 30  # a run that takes longer is ended
AGAIN_S = 10.0  # after the loop itself has ended
CANNOT_RUN = (126, 127)  # the shell's codes
MAX_BYTES = 4096
_MARK = "horoclone-notice"
_TOLD = re.compile(rf"{_MARK} (\d+) (.*)")

Going = Callable[[str, float | None], None]  # host, seconds that are left where that is known


def loop_of(command: str, every_s: float = EVERY_S, limited: bool = True) -> str:
    """For sh: runs the command, and writes a line with its code and the first line that it printed.

    limited: the loop itself ends a run that takes too long; else who reads its lines does.
    """
    run = f"{f'timeout {LIMIT_S} ' if limited else ''}sh -c {shlex.quote(command)} </dev/null"
    tell = f'printf \'{_MARK} %s %.200s\\n\' "$code" "$(printf %s "$out" | head -n 1)"'
    return f"while :; do out=$({run}); code=$?; {tell}; sleep {every_s:g}; done"


def parse(line: str) -> tuple[int, float | None] | None:
    """(exit code, seconds that are left) of a line of the loop; None: it is something else."""
    match = _TOLD.fullmatch(line)
    if match is None:
        return None
    first = (match.group(2).split() or [""])[0]
    return int(match.group(1)), float(first) if re.fullmatch(r"\d{1,6}(\.\d+)?", first) else None


class NoticeScript:
    """The loops of all hosts. going(host, seconds) is called for each run that says that its host goes."""

    def __init__(
        self,
        command: str,
        going: Going,
        selector: selectors.BaseSelector,
        ssh: SshOptions,
        reaper: Reaper,
        every_s: float = EVERY_S,
    ) -> None:
        self._command, self._going, self._selector = command, going, selector
        self._ssh, self._reaper, self._every_s = ssh, reaper, every_s
        self._silent_s = 2.0 * LIMIT_S + every_s  # ssh needs a while, too
        self._loops: dict[str, _Loop] = {}
        self._again_at: dict[str, float] = {}
        self._complained: set[tuple[str, int]] = set()

    def watch(self, hosts: list[str], now: float) -> None:
        """The hosts that there are now; loops that have ended begin again after a while."""
        for host in [one for one in self._loops if one not in hosts]:
            self._stop(host)
        for host, loop in list(self._loops.items()):
            if now >= loop.heard_s + self._silent_s:
                self._stop(host)
                self._complain(
                    host, -3, f"--notice-script on {host}: nothing was heard for {self._silent_s:g} s"
                )
        for host in hosts:
            if host not in self._loops and now >= self._again_at.get(host, now):
                self._start(host, now)

    def next_s(self) -> float:
        """When watch() has something to do."""
        silent = [loop.heard_s + self._silent_s for loop in self._loops.values()]
        return min([*self._again_at.values(), *silent], default=float("inf"))

    def close(self) -> None:
        for host in list(self._loops):
            self._stop(host)

    def _start(self, host: str, now: float) -> None:
        here = is_local(host)
        text = loop_of(self._command, self._every_s, limited=not here)
        words = ["sh", "-c", text] if here else [*ssh_command(host, self._ssh)[:-1], text]
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=dies_with_parent() if self._ssh.bind_to_us else None,
            )
        except OSError as error:
            self._complain(host, -1, f"--notice-script on {host}: {error.strerror}")
            self._again_at[host] = now + AGAIN_S
            return
        self._reaper.watch(process.pid)
        self._again_at.pop(host, None)
        loop = self._loops[host] = _Loop(process, now)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read(host, loop))

    def _read(self, host: str, loop: _Loop) -> None:
        assert loop.process.stdout is not None
        data = os.read(loop.process.stdout.fileno(), MAX_BYTES)
        if not data:
            self._stop(host)
            self._again_at[host] = time.monotonic() + AGAIN_S
            self._complain(host, -2, f"--notice-script on {host}: its shell has ended; it is started again")
            return
        loop.heard_s = time.monotonic()
        for line in loop.lines(data):
            told = parse(line)
            if told is None:
                continue
            code, left_s = told
            if code == 0:
                self._going(host, left_s)
            elif code in CANNOT_RUN:
                self._complain(
                    host, code, f"--notice-script {self._command}: cannot be run on {host} ({code})"
                )

    def _complain(self, host: str, code: int, text: str) -> None:
        """Once for each host and trouble: it comes again with every run."""
        if (host, code) not in self._complained:
            self._complained.add((host, code))
            say(text)

    def _stop(self, host: str) -> None:
        loop = self._loops.pop(host)
        self._again_at.pop(host, None)
        assert loop.process.stdout is not None
        self._selector.unregister(loop.process.stdout)
        try:
            os.killpg(loop.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        loop.process.wait()
        self._reaper.forget(loop.process.pid)
        loop.process.stdout.close()


class _Loop:
    def __init__(self, process: subprocess.Popen[bytes], now: float) -> None:
        self.process, self.heard_s = process, now
        self._rest = b""

    def lines(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MAX_BYTES:]
        return [line.decode(errors="replace") for line in whole]
