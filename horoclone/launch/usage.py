"""The error that a user of the launcher can cause, and the wording that all its messages share."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Iterator


class LaunchError(Exception):
    """A mistake in what was asked or a host that cannot serve it: printed as text, never as a traceback."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class NotYet(LaunchError):
    """Asked for something this version does not do; the text says what to do instead."""


_program = "horoclonerun"


@contextlib.contextmanager
def speaking_as(program: str) -> Iterator[None]:
    """Until it is left, messages of every thread begin with this name: that of the command which was typed."""
    global _program
    before, _program = _program, program
    try:
        yield
    finally:
        _program = before


def say(text: str, program: str = "") -> None:
    """One message of the launcher itself, on stderr; never raises when stderr is gone. program: who else speaks."""
    line = f"{program or _program}: {text}\n".encode(errors="replace")
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line)
    except OSError:
        pass


def is_out_of_descriptors(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def out_of_processes(what: str) -> LaunchError:
    """The error where the kernel gives us no further process. what: could not be started."""
    limits = "the limit on processes (ulimit -u, or the container's pids limit)"
    return LaunchError(f"cannot run {what}: Resource temporarily unavailable; is {limits} reached?", 126)


def out_of_descriptors(ranks: int) -> LaunchError:
    """The error of a launcher of that many ranks on this host; each has two pipes, a process descriptor and what starts
    it.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return LaunchError(
        f"too few file descriptors for {ranks} ranks: the limit is {limit}. Raise it: ulimit -n {64 + 8 * ranks}",
        1,
    )


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks, 3 processes."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def ranks_text(ranks: list[int]) -> str:
    """[3, 7, 8, 9] -> 'ranks 3,7-9'; [3] -> 'rank 3'."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    while start < len(ordered):
        end = start
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        parts.append(str(ordered[start]) if end == start else f"{ordered[start]}-{ordered[end]}")
        start = end + 1
    return ("rank " if len(ordered) == 1 else "ranks ") + ",".join(parts)


def parse_ranks(text: str) -> set[int]:
    """'0,3,5-7' -> {0, 3, 5, 6, 7}. LaunchError on anything else."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise LaunchError(f"--ranks {text!r}: expected numbers and ranges such as 0,3,5-7") from None
        if low < 0 or high < low:
            raise LaunchError(f"--ranks {text!r}: {part.strip()!r} is not a range of ranks")
        ranks.update(range(low, high + 1))
    return ranks
