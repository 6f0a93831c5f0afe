"""Under Horovod's name: a shell command of which no process is left, whether it ends, is ended, or we are killed.

The command leads a process group of its own; the launcher's guardian ends that group if this process dies.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import IO, Any

from horoclone.launch.process import Guardian, LocalRank
from horoclone.runner.util.threads import in_thread, on_event

# Seconds between SIGTERM and SIGKILL. Scripts raise it for ranks that save a checkpoint: execute() reads it when it
# ends a command, and horoclone.run() takes it as `grace` where a script has changed it.
GRACEFUL_TERMINATION_TIME_S: float = 5
_LOOK_EVERY_S = 0.05  # a process group has no event to wait for


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    index: int | None = None,
    events: Iterable[Any] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Runs a line in /bin/sh and returns its exit code, 128 + N when signal N has ended it.

    env: all its variables (None: ours). stdout, stderr: where its text goes, anything with write() and flush()
    (None: our own). index: the rank that is put before every line, `[3]<stdout>:`, after the time if that is asked for.
    events: as soon as one of them is set, everything that the command has started is ended: SIGTERM, then SIGKILL after
    GRACEFUL_TERMINATION_TIME_S. KeyboardInterrupt and other exceptions end it likewise and are raised then.
    """
    guardian = Guardian()
    stop = threading.Event()
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        guardian.watch(process.pid)
        shell = LocalRank(index or 0, process, guardian, None)
        marks = (index, prefix_output_with_timestamp)
        readers = [
            in_thread(_forward, (source, target, name, *marks))
            for source, target, name in (
                (shell.stdout, sys.stdout if stdout is None else stdout, "stdout"),
                (shell.stderr, sys.stderr if stderr is None else stderr, "stderr"),
            )
        ]
        for event in events or ():
            on_event(event, _end, (shell,), stop=stop, check_stop_interval_s=0.2)
        try:
            process.wait()
            for reader in readers:  # whoever still holds the pipes belongs to the command
                reader.join()
        except BaseException:
            _end(shell)
            raise
        finally:
            stop.set()
        _wait_for_group(shell)
        code = shell.poll() or 0
        shell.close()
        return code if code >= 0 else 128 - code
    finally:
        guardian.close()


def _end(shell: LocalRank) -> None:
    shell.signal(signal.SIGTERM, group=True)
    shell.signal(signal.SIGCONT, group=True)  # a stopped process would keep its SIGTERM pending
    deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S
    while shell.group_alive() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    shell.signal(signal.SIGKILL, group=True)


def _wait_for_group(shell: LocalRank) -> None:
    """What has closed our pipes and stays is not ours to wait for, unless it is just being ended."""
    deadline = time.monotonic() + 1.0
    while shell.group_alive() and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)


def _forward(source: IO[bytes], target: Any, name: str, index: int | None, timestamps: bool) -> None:
    """Line by line, so that the lines of several commands do not mix; a last line without an end as it is."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    line = ""
    while data := os.read(source.fileno(), 1 << 16):
        *ended, line = re.split(r"(?<=[\r\n])", line + decoder.decode(data))
        for one in ended:
            _write(target, one, name, index, timestamps)
    line += decoder.decode(b"", final=True)
    if line:
        _write(target, line, name, index, timestamps)


def _write(target: Any, line: str, name: str, index: int | None, timestamps: bool) -> None:
    if index is not None:
        line = f"{time.asctime() if timestamps else ''}[{index}]<{name}>:{line}"
    try:
        target.write(line)
        target.flush()
    except (OSError, ValueError):
        pass  # closed: the command is read to its end nevertheless, or it would block
