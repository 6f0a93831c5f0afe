"""A command in a terminal of its own (a pty), whose size the test chooses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ["TERM"] = "xterm-256color"  # wherever the tests run
ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"  # the other screen of a terminal
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """text: all that was written so far."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self.text = process, master, ""

    def read(self, for_s: float) -> None:
        end = time.monotonic() + for_s
        while (left := end - time.monotonic()) > 0 and select.select([self._master], [], [], left)[0]:
            try:
                self.text += os.read(self._master, 1 << 16).decode(errors="replace")
            except OSError:  # the other side is closed
                return

    def wait_for(self, pattern: str, timeout_s: float = 15) -> None:
        """In what is on the screen, without its control sequences."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.plain):
            assert time.monotonic() < deadline, f"{pattern!r} was never shown:\n{self.plain[-6000:]}"
            if self.process.poll() is not None:
                self.read(0.2)
                assert re.search(pattern, self.plain), f"{pattern!r} was never shown:\n{self.plain[-6000:]}"
            self.read(0.1)

    @property
    def plain(self) -> str:
        return _SEQUENCE.sub("", self.text)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._master)

    def end(self, timeout_s: float = 30) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.05)
        self.read(0.2)
        return self.process.wait(0.1)


@contextlib.contextmanager
def terminal(command: Sequence[Any], columns: int, lines: int, env: Mapping[str, str]) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal then
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        os.close(master)
