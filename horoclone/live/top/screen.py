"""Shows a job in the terminal until it ends or q is pressed, and does what the keys ask for. One thread.

Where standard output is no terminal, or one that cannot move its cursor, everything is printed once.
"""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.live import Live

from horoclone.live import stack_dump_client
from horoclone.live.job import Job
from horoclone.live.overview import Observer, Overview, Row
from horoclone.live.top.table import NARROWEST, ORDERS, ViewOptions, chosen_place, once, ordered, screenful

INTERVAL_S, MANY_INTERVAL_S, MANY_RANKS = 1.0, 2.0, 32  # so that looking costs a busy machine less than 1 %
FIRST_RATE_S = 0.5  # between the two looks that a rate takes
WIDTH_OF_A_PIPE = 120
_KEYS = {"\x1b[A": "k", "\x1b[B": "j", "\x1bOA": "k", "\x1bOB": "j", "\x1b[5~": "K", "\x1b[6~": "J"}
_PAGE = 10


def show(job: Job, interval_s: float | None, only_once: bool) -> int:
    """Returns the exit code. interval_s: between two looks; None: by the number of ranks."""
    for name in ("COLUMNS", "LINES"):  # rich would believe a 0
        if not os.environ.get(name, "").isdigit() or int(os.environ[name]) == 0:
            os.environ.pop(name, None)
    console = Console(highlight=False, soft_wrap=True)
    if only_once or not console.is_terminal or console.is_dumb_terminal:
        _print_once(job, console)
        return 0
    top = Top(job, console, interval_s)
    with _ends_on_sigterm():
        top.run()
    console.print(once(top.overview, top.title, _size()[0]))
    if top.is_over:
        console.print("The job has ended; this is what was seen last.")
    return 0


def title_of(job: Job) -> str:
    """Without the folders of absolute paths, which would push the script's name off a narrow line."""
    words = [os.path.basename(word) if word.startswith("/") else word for word in job.command.split(" ")]
    return f"job {job.id}: {' '.join(words)}"


def _print_once(job: Job, console: Console) -> None:
    observer = Observer(job)
    observer.look()
    time.sleep(FIRST_RATE_S)
    width = _size()[0] if console.is_terminal else _width_wanted()
    console.print(once(observer.look(), title_of(job), width))


def _width_wanted() -> int:
    return max(NARROWEST, int(os.environ.get("COLUMNS", WIDTH_OF_A_PIPE)))


def _size() -> tuple[int, int]:
    """Columns and lines of the terminal, or what the environment says; 80 and 24 where it says 0 or nothing."""
    columns, lines = shutil.get_terminal_size((80, 24))
    return max(NARROWEST, columns), max(6, lines)


class Top:
    """One run of the command on a terminal."""

    def __init__(self, job: Job, console: Console, interval_s: float | None) -> None:
        self._job, self._console = job, console
        self._observer = Observer(job)
        self._options = ViewOptions()
        self._message_until = 0.0
        self.title = title_of(job)
        self.overview = self._observer.look()
        usual_s = INTERVAL_S if len(self.overview.rows) < MANY_RANKS else MANY_INTERVAL_S
        self._interval_s = usual_s if interval_s is None else interval_s
        self.is_over = False

    def run(self) -> None:
        """Until the job has ended, q or Ctrl-C."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live, _keys() as keyboard:
            next_s = time.monotonic()
            try:
                while True:
                    self._draw(live)
                    next_s = max(next_s + self._interval_s, time.monotonic() + 0.1)
                    if not self._obey_until(next_s, keyboard, live):
                        return
                    if not self._look():
                        return
            except KeyboardInterrupt:
                return

    def _look(self) -> bool:
        """False: the job is over; what was seen last stays."""
        found = self._observer.look()
        if not found.rows:
            self.is_over = True
            self.overview = dataclasses.replace(self.overview, events=found.events or self.overview.events)
            return False
        self.overview = found
        return True

    def _draw(self, live: Live) -> None:
        if time.monotonic() > self._message_until:
            self._options.message = ""
        width, height = _size()
        live.update(screenful(self.overview, self.title, width, height, self._options), refresh=True)

    def _obey_until(self, until_s: float, keyboard: int | None, live: Live) -> bool:
        """Waits, and does what keys ask for meanwhile. False: q was pressed."""
        while (left_s := until_s - time.monotonic()) > 0:
            if keyboard is None:
                time.sleep(left_s)
                return True
            if not select.select([keyboard], [], [], left_s)[0]:
                return True
            typed = os.read(keyboard, 64)
            if not typed:  # the terminal is gone
                return False
            for key in _split(typed.decode(errors="replace")):
                if key in "q\x03\x04":
                    return False
                self._obey(key)
            self._draw(live)
        return True

    def _obey(self, key: str) -> None:
        if self._options.overlay is not None:
            self._options.overlay = None
            return
        rows = ordered(self.overview.rows, self._options.order)
        at = chosen_place(rows, self._options)
        step = {"j": 1, "k": -1, "J": _PAGE, "K": -_PAGE}.get(key)
        if step is not None and rows:
            self._options.chosen = rows[min(max(0, at + step), len(rows) - 1)].rank
        elif key == "o":
            names = list(ORDERS)
            self._options.order = names[(names.index(self._options.order) + 1) % len(names)]
            self._say(f"ordered by {self._options.order}")
        elif key == "s" and rows:
            self._show_stacks(rows[at])
        elif key == "r":
            self._record()

    def _say(self, text: str) -> None:
        self._options.message, self._message_until = text, time.monotonic() + 5.0

    def _show_stacks(self, row: Row) -> None:
        try:
            stacks = stack_dump_client.stacks(row.pid, row.host)
        except stack_dump_client.NoAnswer as error:
            self._say(f"rank {row.rank}: {error}")
            return
        self._options.overlay = [
            f"Stacks of rank {row.rank} (pid {row.pid}); any key goes back",
            *stacks.splitlines(),
        ]

    def _record(self) -> None:
        folder = os.path.abspath(f"horoclone-records-{self._job.id}")
        written, errors = stack_dump_client.flight_records(
            {row.rank: (row.pid, row.host) for row in self.overview.rows}, folder
        )
        text = f"{len(written)} flight records: horoclone debug {folder}" if written else "no flight record"
        self._say(text + (f"; {errors[0]}" if errors else ""))


def _split(typed: str) -> Iterator[str]:
    """Keys of one read; those of an arrow as the letter that does the same."""
    while typed:
        sequence = next((one for one in _KEYS if typed.startswith(one)), None)
        if sequence is not None:
            yield _KEYS[sequence]
            typed = typed[len(sequence) :]
        elif typed[0] == "\x1b":  # a key that means nothing here
            return
        else:
            yield typed[0]
            typed = typed[1:]


@contextmanager
def _keys() -> Iterator[int | None]:
    """The descriptor from which single keys come; None where standard input is no terminal."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):
        yield None
        return
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """So that the terminal is as it was when somebody ends us."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


__all__ = ["Overview", "Top", "show"]
