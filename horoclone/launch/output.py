"""The ranks' output on our own stdout and stderr: whole lines, a prefix per rank, progress bars that stay usable.

Bytes go through unchanged, except that the screen gets U+FFFD for what is not UTF-8. Thread: the job's loop.
"""

from __future__ import annotations

import collections
import itertools
import os
import re
import select
import time
from collections.abc import Callable
from typing import BinaryIO, Literal

from horoclone.launch.root_cause import CIRCLE, TRACEBACK, goes_on, suffered

STDOUT, STDERR = 1, 2
_STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}

_TAIL_LINES = 400  # kept for the failure report
_TRACEBACK = TRACEBACK.encode()
_IN_SIGHT_LINES = 60  # a report does not repeat what stands so far above it
_TRACEBACKS = 1000  # remembered, so that others' like them are shown as one line
_TRACEBACK_LINES = 2000  # of one that is held back until its last line has come
_HELD_S = 0.5  # what has not become a traceback by then is shown
NOBODY_READS = "nobody reads the output any more"
_LONGEST_LINE = 256 << 10  # bytes; a longer one is shown in pieces
_PARTIAL_AFTER_S = 0.2  # a prompt without a newline shows up on a terminal after this
_PROGRESS_EVERY_S = 10.0  # how often a progress bar becomes a line where output is not a terminal
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_CLEAR_LINE = b"\r\x1b[K"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_OF_RANK = re.compile(  # numbers in which ranks differ that fail alike
    rb"(\b(?:rank\D?|pid |cuda:))\d+|\b0x[0-9a-f]+", re.IGNORECASE
)
_TORCHS_PREFIX = re.compile(rb"\A\[rank\d+\]: ")  # of tracebacks, after init_process_group()


class Style:
    """How a line is introduced."""

    def __init__(self, horovod: bool = False, timestamps: bool = False, colour: bool = False) -> None:
        self._horovod, self._timestamps, self._colour = horovod, timestamps, colour

    def prefix(self, rank: int, stream: int) -> bytes:
        if self._horovod:
            stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
            return f"{stamp}[{rank}]<{_STREAM_NAMES[stream]}>:".encode()
        stamp = ""
        if self._timestamps:
            now = time.time()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d} "
        if self._colour:
            return f"{stamp}\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{rank}]\x1b[0m ".encode()
        return f"{stamp}[{rank}] ".encode()


def wants_colour(descriptor: int) -> bool:
    """Whether the terminal shows colours and the user has not set NO_COLOR."""
    return is_terminal(descriptor) and not os.environ.get("NO_COLOR")


def is_terminal(descriptor: int) -> bool:
    return os.isatty(descriptor) and os.environ.get("TERM", "dumb") != "dumb"


def _printable(line: bytes) -> bytes:
    try:
        line.decode()
        return line
    except UnicodeDecodeError:
        return line.decode(errors="replace").encode()


def shown(line: bytes) -> bytes:
    """What a terminal would leave of a line with carriage returns: the last update."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part), b"").rstrip()


class Repeats:
    """Which tracebacks have been shown, and of which rank: all ranks often fail in one way, or since one has, and one
    of the texts is enough to read."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._first: dict[tuple[bytes, ...], tuple[int, int]] = {}  # of which rank, and where it ends
        # ranks of whose last traceback one line was left, and the rest is shown nowhere
        self.brief: set[int] = set()

    def shortened(self, rank: int, named: int, traceback: list[bytes], end: int) -> tuple[list[bytes], int]:
        """The traceback, which would end at this line of the screen, or one line where it says that another rank is the
        cause, or where another's like it has been shown; and at which line the whole text ends. named: the rank's
        number in errors."""
        found = (
            suffered(named, [line.decode(errors="replace") for line in traceback]) if self.wanted else None
        )
        key = (
            tuple(_OF_RANK.sub(rb"\1", line) for line in traceback)
            if found is None
            else (found.cause.encode(),)
        )
        first, place = self._first.get(key, (rank, end))
        self.brief.discard(rank)
        if found is not None:
            if not CIRCLE.search(found.cause):  # which says itself where each of them stands
                self.brief.add(rank)
            cause = found.cause if first == rank else f"as rank {first} says"
            end += 1 - len(traceback)
            traceback = [f"{found.did}{cause}  ({found.places})".encode()]
        elif first != rank:
            said = next((line for line in reversed(traceback) if line[:1].strip()), traceback[-1])
            return [said + b"  (the traceback is rank %d's)" % first], place
        if first == rank and self.wanted and len(self._first) < _TRACEBACKS:
            self._first[key] = rank, end
        return traceback, end


class Screen:
    """Our stdout and stderr. On a terminal one line at the bottom may be `live`: redrawn, not kept."""

    def __init__(self, style: Style, only: set[int] | None = None, shows_all: bool = False) -> None:
        self._style, self._only = style, only
        self.repeats = Repeats(wanted=only is None and not shows_all)
        self._terminal = {STDOUT: is_terminal(STDOUT), STDERR: is_terminal(STDERR)}
        self._live: tuple[int, int, bytes] | None = None  # rank, stream, text
        self._written = 0  # lines
        self._last_of: dict[int, int] = {}  # rank -> that number at its last line on stderr
        self._traceback_of: dict[int, int] = {}  # and at the end of its last traceback there
        self.broken = ""  # why nothing can be written any more
        # of a rank; the ranks of an elastic job's generation are other ones than its slots
        self.number_in_errors: Callable[[int], int] = lambda rank: rank
        self.may_drop: Callable[[], bool] = lambda: False  # output that cannot be written at once may be lost

    def is_live(self, stream: int) -> bool:
        return self._terminal[stream]

    def show(self, rank: int, stream: int, lines: list[bytes], live: bytes | None = None) -> None:
        """Prints whole lines; `live` replaces the live line when it is given (b"" ends it)."""
        if self._only is not None and rank not in self._only:
            return
        erase = self._live is not None and (lines or live is not None)
        if erase and self._live is not None:
            self._write(self._live[1], _CLEAR_LINE)
        if lines:
            self._written += len(lines)
            if stream == STDERR:
                self._last_of[rank] = self._written
            prefix = self._style.prefix(rank, stream)
            self._write(stream, b"".join(prefix + _printable(line) + b"\n" for line in lines))
        if live is not None and self._terminal[stream]:
            if live:
                self._live = (rank, stream, live)
            elif self._live is not None and self._live[:2] == (rank, stream):
                self._live = None
        if self._live is not None and (erase or live):
            self._draw(*self._live)

    def traceback(self, rank: int, stream: int, lines: list[bytes], ahead: int, whole: bool) -> list[bytes]:
        """What to show of a traceback, or of its beginning, `ahead` lines below the last one that has been shown."""
        end = self._written + ahead + len(lines)
        if whole:
            lines, end = self.repeats.shortened(rank, self.number_in_errors(rank), lines, end)
        if stream == STDERR:
            self._traceback_of[rank] = end
        return lines

    def in_sight(self) -> set[int]:
        """The ranks whose traceback, or whose last line on stderr where there was none, has just been printed."""
        ends = {rank: self._traceback_of.get(rank, last) for rank, last in self._last_of.items()}
        return {rank for rank, end in ends.items() if self._written - end <= _IN_SIGHT_LINES}

    def whole_in_sight(self) -> set[int]:
        """Those of them of whose traceback nothing was left out."""
        return self.in_sight() - self.repeats.brief

    def close(self) -> None:
        """Leaves the cursor on a line of its own."""
        if self._live is not None:
            self._write(self._live[1], b"\n")
            self._live = None

    def _draw(self, rank: int, stream: int, text: bytes) -> None:
        try:
            columns = os.get_terminal_size(stream).columns
        except OSError:
            columns = 80
        plain = _ESCAPE.sub("", text.decode(errors="replace"))
        columns = columns or 80  # a terminal that does not know its width says 0
        room = max(10, columns - 1 - len(_ESCAPE.sub("", self._style.prefix(rank, stream).decode())))
        body = text if len(plain) <= room else plain[:room].encode()
        self._write(stream, self._style.prefix(rank, stream) + _printable(body))

    def _write(self, stream: int, data: bytes) -> None:
        """In pieces that a ready pipe takes without blocking, so that a stuck reader cannot hold up an ending job."""
        if self.broken:
            return
        ready = select.poll()
        ready.register(stream, select.POLLOUT)
        view = memoryview(data)
        while view:
            if not ready.poll(200):
                if self.may_drop():
                    return
                continue
            try:
                view = view[os.write(stream, view[:4096]) :]
            except BlockingIOError:  # somebody made our stdout non-blocking; poll again
                time.sleep(0.005)
            except OSError as error:
                gone = isinstance(error, BrokenPipeError)
                self.broken = NOBODY_READS if gone else f"the output cannot be written: {error.strerror}"
                return


class RankStream:
    """Cuts one stream of one rank into lines for the screen, its file and the tail."""

    def __init__(self, rank: int, stream: int, screen: Screen, file: BinaryIO | None) -> None:
        self._rank, self._stream, self._screen, self._file = rank, stream, screen, file
        self._partial = b""
        self._partial_since = 0.0
        self._live = False
        self._progress_shown_s = 0.0
        self._held: list[bytes] | None = None  # the beginning of a traceback
        self._text_at = 0  # where in it the text of an error goes on whose line ends in a colon; 0: nowhere
        self._held_since = 0.0
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)
        self.hide_interrupts = False  # the user pressed Ctrl-C: tracebacks that only say so are noise
        self.file_error: str | None = None

    def feed(self, data: bytes) -> None:
        self._keep(data)
        *complete, self._partial = (self._partial + data).split(b"\n")
        whole = [self._kept(shown(raw.removesuffix(b"\r"))) for raw in complete]
        lines: list[bytes] = []
        for line in whole:
            lines += self._visible(line, len(lines))
        too_long = len(self._partial) > _LONGEST_LINE
        if too_long:
            lines.append(shown(self._partial))
            self._partial = b""
        live: bytes | None = b"" if (complete or too_long) and self._live else None
        if b"\r" in self._partial:
            self._partial = (
                b"\r" + self._partial.rpartition(b"\r")[2]
                if not self._partial.endswith(b"\r")
                else (b"\r" + shown(self._partial) + b"\r")
            )
            live = shown(self._partial)
            if not self._screen.is_live(self._stream):
                lines += self._progress(live)
        self._partial_since = time.monotonic() if self._partial else 0.0
        self._live = bool(live)
        self._screen.show(self._rank, self._stream, lines, live)

    def _kept(self, line: bytes) -> bytes:
        """The line for the screen; the report's has no prefix of torch's, nor has the screen where ours is short."""
        plain = _TORCHS_PREFIX.sub(b"", line) if self._stream == STDERR else line
        self.tail.append(plain)
        return plain if self._screen.repeats.wanted else line

    def _keep(self, data: bytes) -> None:
        if self._file is None or self.file_error:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self.file_error = f"{self._file.name}: {error.strerror}"

    def _progress(self, update: bytes) -> list[bytes]:
        """A progress bar in a file of logs: now and then one line."""
        now = time.monotonic()
        if not self._progress_shown_s:
            self._progress_shown_s = now
        if now - self._progress_shown_s < _PROGRESS_EVERY_S or not update:
            return []
        self._progress_shown_s = now
        return [update]

    def _visible(self, line: bytes, ahead: int) -> list[bytes]:
        """The line, `ahead` lines below what has been shown, unless it belongs to a traceback that another rank has
        shown already, or that ends in KeyboardInterrupt after Ctrl-C: a traceback is held back until its last line says
        what it is."""
        if self._held is None:
            if line != _TRACEBACK:
                return [line]
            self._held, self._held_since, self._text_at = [line], time.monotonic(), 0
            return []
        if self._text_at:
            text = (one.decode(errors="replace") for one in itertools.islice(self._held, self._text_at, None))
            if not goes_on(text, line.decode(errors="replace")):
                before = self._released(ahead)
                return before + self._visible(line, ahead + len(before))
        self._held.append(line)
        if (
            self._text_at
            or line[:1] in (b" ", b"\t", b"")
            or line.startswith((b"Traceback ", b"During handling ", b"The above "))
        ):
            return self._released(ahead) if len(self._held) > _TRACEBACK_LINES else []
        if line.endswith(b":"):
            self._text_at, self._held_since = len(self._held), time.monotonic()
            return []
        if self.hide_interrupts and line.startswith(b"KeyboardInterrupt"):
            self._held = None
            return []
        return self._released(ahead, whole=True)

    def _released(self, ahead: int, whole: bool = False) -> list[bytes]:
        held, self._held = self._held or [], None
        whole = whole or bool(self._text_at)
        return self._screen.traceback(self._rank, self._stream, held, ahead, whole) if held else []

    def show_partial(self, now: float) -> float | None:
        """Shows text that waits for its newline (a prompt) on a terminal, and the beginning of a traceback that does
        not go on. Returns when to ask again."""
        if self._held is not None:
            if now < self._held_since + _HELD_S:
                return self._held_since + _HELD_S
            self._screen.show(self._rank, self._stream, self._released(0))
        if not self._partial or self._live or not self._screen.is_live(self._stream):
            return None
        due = self._partial_since + _PARTIAL_AFTER_S
        if now < due:
            return due
        self._live = True
        self._screen.show(self._rank, self._stream, [], shown(self._partial))
        return None

    def finish(self) -> None:
        """The stream has ended: the last line is printed although it has no newline."""
        last = [self._kept(shown(self._partial))] if shown(self._partial).strip() else []
        self._partial = b""
        lines = [kept for line in last for kept in self._visible(line, 0)]
        lines += self._released(len(lines))
        self._screen.show(self._rank, self._stream, lines, b"" if self._live else None)
        self._live = False
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                pass
            self._file = None


def rank_folder(folder: str, rank: int, size: int) -> str:
    """D/rank.N as horovodrun names it: padded with zeros to the width of the highest rank."""
    return os.path.join(folder, f"rank.{str(rank).zfill(len(str(max(size - 1, 1))))}")


def open_files(
    folder: str | None, rank: int, size: int, again: bool = False
) -> tuple[BinaryIO | None, BinaryIO | None]:
    """D/rank.N/stdout and stderr, emptied, or again: continued. OSError when that cannot be."""
    if folder is None:
        return None, None
    own = rank_folder(folder, rank, size)
    os.makedirs(own, exist_ok=True)
    mode: Literal["ab", "wb"] = "ab" if again else "wb"
    return (
        open(os.path.join(own, "stdout"), mode, buffering=0),
        open(os.path.join(own, "stderr"), mode, buffering=0),
    )
