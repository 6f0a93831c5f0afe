"""The lines that `horoclone top` shows, out of an overview. Pure: size and choice come in, a text of rich comes out.

Columns have fixed widths: rich's own tables measure every cell, which takes 20 times as long.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from horoclone.live.job import Event
from horoclone.live.overview import Overview, Row

NARROWEST = 20  # columns; a terminal that says less says nothing
_EVENTS = 5
_STYLES = {
    "lost": "bold red",
    "stalled": "bold yellow",
    "starting": "dim",
    "waiting": "cyan",
    "running": "green",
    "ended": "dim",
}
ORDERS: dict[str, Callable[[Row], float]] = {
    "rank": lambda row: row.rank,
    "late": lambda row: -row.late_s,
    "communication": lambda row: -(row.communication or 0.0),
}


class Column(NamedTuple):
    """width: in cells; 0: what is left over. from_width: of a terminal, from which on it is shown."""

    title: str
    width: int
    text: Callable[[Row], str]
    right: bool = True
    from_width: int = 0


@dataclasses.dataclass(slots=True)
class ViewOptions:
    """What the user has chosen. chosen: a rank; None: the one that holds the others up, if any. order: a key of ORDERS.
    overlay: lines in place of the table."""

    chosen: int | None = None
    order: str = "rank"
    message: str = ""
    overlay: Sequence[str] | None = None


def bytes_text(value: float | None) -> str:
    """1234567.0 -> `1.23M`: decimal, three digits."""
    if value is None:
        return "-"
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.0f}{unit}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}P"


def seconds_text(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f}us"
    if value < 0.9995:
        return f"{value * 1e3:.3g}ms"
    return f"{value:.3g}s" if value < 999.5 else f"{value / 60:.0f}min"


def share_text(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f}%"


def rate_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _about_now(row: Row) -> str:
    return row.note or (f"late: {row.why}" if row.why else row.operation) or "-"


COLUMNS = (
    Column("RANK", 5, lambda row: str(row.rank)),
    Column("HOST", 10, lambda row: row.host, right=False),
    Column("PID", 8, lambda row: str(row.pid) if row.pid else "-", from_width=110),
    Column("STATE", 8, lambda row: row.state, right=False),
    Column("STEP", 7, lambda row: str(row.step)),
    Column("STEP/S", 6, lambda row: rate_text(row.steps_per_s)),
    Column("STEP TIME", 9, lambda row: seconds_text(row.step_s), from_width=110),
    Column("COMM", 5, lambda row: share_text(row.communication)),
    Column("OVERLAP", 7, lambda row: share_text(row.overlap), from_width=80),
    Column("B/S", 6, lambda row: bytes_text(row.bytes_per_s)),
    Column("BYTES", 7, lambda row: bytes_text(row.bytes), from_width=110),
    Column("LATE", 6, lambda row: seconds_text(row.late_s) if row.late_s else "-"),
    Column("LAST OPERATION", 0, lambda row: _about_now(row), right=False),
)


def columns_for(width: int) -> list[tuple[Column, int]]:
    """Those that fit, with their widths. The host gets more where there is room, the last column what is left."""
    found: list[tuple[Column, int]] = []
    left = width
    for column in COLUMNS:
        wanted = 24 if column.title == "HOST" and width >= 160 else column.width
        if column.from_width > width or left < max(wanted, 1):
            continue
        wanted = wanted or left
        found.append((column, wanted))
        left -= wanted + 1
    return found


def rows_text(rows: Sequence[Row], width: int, chosen: int | None = None) -> Text:
    """Title line and a line for each row. chosen: the rank whose line is marked."""
    columns = list(enumerate(columns_for(width)))
    state = next((at for at, (column, _) in columns if column.title == "STATE"), None)
    text = Text(no_wrap=True, overflow="crop", end="")
    text.append(" ".join(_cell(column, column.title, wide) for _, (column, wide) in columns), "bold reverse")
    for row in rows:
        text.append("\n")
        mark = " reverse" if row.rank == chosen else ""
        cells = [
            (" " if at else "") + _cell(column, column.text(row), wide) for at, (column, wide) in columns
        ]
        if row.state == "lost" or row.is_culprit or state is None:
            is_red = row.state == "lost" or row.is_culprit
            text.append("".join(cells), (_STYLES["lost"] * is_red + mark).strip())
            continue
        # few pieces: each costs rich as much as all letters
        text.append("".join(cells[:state]), mark.strip())
        text.append(cells[state], (_STYLES[row.state] + mark).strip())
        text.append("".join(cells[state + 1 :]), mark.strip())
    return text


def _cell(column: Column, content: str, width: int) -> str:
    content = content.replace("\n", " ")
    if column.right and cell_len(content) < width:
        return " " * (width - cell_len(content)) + content
    if cell_len(content) > width:
        return set_cell_size(content, width - 1) + ("~" if width > 1 else "")
    return set_cell_size(content, width)


def headline(overview: Overview, title: str, width: int) -> Text:
    """Two lines: the job, and its figures."""
    counts: dict[str, int] = {}
    for row in overview.rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    first = Text(f"horoclone {title}", "bold", no_wrap=True)
    first.truncate(width, overflow="ellipsis")
    second = Text(f"{len(overview.rows)} ranks: ", no_wrap=True)
    for at, (state, style) in enumerate((s, _STYLES[s]) for s in _STYLES if s in counts):
        second.append(", " if at else "").append(f"{counts[state]} {state}", style)
    slowest = "held up by" if any(row.is_culprit for row in overview.rows) else "waited for most"
    parts = [
        f"step {overview.step}",
        f"{seconds_text(overview.step_s)} a step",
        f"comm {share_text(overview.communication)}",
        f"{bytes_text(overview.bytes_per_s)}B/s" if overview.bytes_per_s is not None else "",
        f"goodput {share_text(overview.goodput.share)}" if overview.goodput else "",
        f"{slowest}: rank {overview.slowest}" if overview.slowest is not None else "",
    ]
    second.append("; " + ", ".join(part for part in parts if part))
    second.truncate(width, overflow="ellipsis")
    return _joined([first, second])


def _joined(parts: Sequence[Text]) -> Text:
    """Below each other. Nothing is wrapped: looking for places to do so would take longer than all else."""
    return Text("\n", no_wrap=True, overflow="crop", end="").join(parts)


def _about(row: Row, width: int) -> Text:
    """What does not fit into the line of the chosen rank."""
    words = [
        f"rank {row.rank} on {row.host}: {row.state}",
        row.note,
        f"late: {row.why}: {row.advice}" if row.why else "",
        f"last {row.operation}" if row.operation else "",
    ]
    text = Text(", ".join(word for word in words if word).replace("\n", " "), "italic", no_wrap=True)
    text.truncate(width, overflow="ellipsis")
    return text


def events_text(events: Sequence[Event], width: int, most: int) -> Text:
    """The newest `most` of them, each in one line; a longer one is cut."""
    lines = []
    for event in events[len(events) - most :] if most else []:
        style = {"loss": "red", "stall": "yellow"}.get(event.kind, "")
        said = f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}"
        line = Text(said.replace("\n", " "), style, no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return _joined(lines)


def ordered(rows: Sequence[Row], order: str) -> list[Row]:
    return sorted(rows, key=lambda row: (ORDERS[order](row), row.rank))


def once(overview: Overview, title: str, width: int) -> Text:
    """All there is, without regard to any height: for a pipe or a file."""
    parts = [headline(overview, title, width), Text(), rows_text(ordered(overview.rows, "rank"), width)]
    for row in overview.rows:
        if row.why:  # the whole of it, which the table cuts
            parts.append(
                Text(f"rank {row.rank} is late: {row.why}\nrank {row.rank}: {row.advice}", no_wrap=True)
            )
    if overview.events:
        parts += [Text(), events_text(overview.events, width, len(overview.events))]
    return _joined(parts)


def chosen_place(rows: Sequence[Row], options: ViewOptions) -> int:
    """Which of the rows the keys are about."""
    wanted = (row.is_culprit if options.chosen is None else row.rank == options.chosen for row in rows)
    return next((at for at, is_wanted in enumerate(wanted) if is_wanted), 0)


def screenful(overview: Overview, title: str, width: int, height: int, options: ViewOptions) -> Text:
    """What fits into a terminal: the lines around the chosen rank, the newest events, the keys."""
    rows = ordered(overview.rows, options.order)
    at = chosen_place(rows, options)
    whose = f" of rank {rows[at].rank}" if rows else ""
    keys = options.message or f"q end  arrows rank  o order  s stacks{whose}  r flight record"
    last = Text(keys, "reverse", no_wrap=True)
    last.truncate(width, overflow="ellipsis")
    head = headline(overview, title, width)
    if options.overlay is not None:
        lines = [line[:width] for line in options.overlay]
        shown = Text("\n".join(lines[: max(1, height - 3)]), no_wrap=True, overflow="crop", end="")
        return _joined([head, shown, last])
    events = min(_EVENTS, len(overview.events), max(0, height - 7))
    room = max(1, height - 5 - events)  # two lines of head, the titles, the chosen rank, the keys
    start = min(max(0, at - room // 2), max(0, len(rows) - room))
    parts = [head, rows_text(rows[start : start + room], width, rows[at].rank if rows else None)]
    if rows:
        parts.append(_about(rows[at], width))
    if events:
        parts.append(events_text(overview.events, width, events))
    return _joined([*parts, last])
