"""Where the time of one rank went between its collectives, as it publishes that behind its metrics block. Pure.

runtime/phase_sampler.py measures and writes it once a second, where HOROCLONE_WHY asks for it; late_ranks.py says from
the figures of all ranks why one of them is late.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Mapping

BYTES = 4096
# What the training thread does: where most of its time should be, and where a late rank's excess is.
PHASES = ("data", "forward", "backward", "optimizer", "compute", "checkpoint", "own code")
WAITING = "communication"
# What takes time from any phase, in seconds.
LOSSES = ("gc", "faults", "throttled", "delayed", "stopped")
# More seconds, and counts.
OTHERS = (
    "elapsed", "ran", "waited", "transfer", "steps", "link", "faults_major", "sent_bytes", "retransmits",
    "stopped_waiting",
)  # fmt: skip
FIGURES = (*PHASES, *LOSSES, *OTHERS)
_HEAD = struct.Struct("=II")  # CRC-32 and length of the JSON that follows: one being written fits neither


@dataclasses.dataclass(frozen=True, slots=True)
class Phases:
    """What one rank has measured since its training began (`total`), and in the last half minute (`recent`).

    Both have FIGURES: seconds of the thread that called init() in each of PHASES, from its stack, looked at 16 times a
    second. waited, transfer: in collectives, in all, and of that while data moved; elapsed: all of it. gc: in garbage
    collections. faults: off its processor for major page faults. throttled: of its cgroup, by the CPU quota. ran: on a
    processor, outside of collectives; delayed: ready to run there, while others had its cores. stopped: the whole
    process stood still, and stopped_waiting: of that in a collective. link: with sent data unacknowledged, of the
    busiest connection. lines: phase -> the line of the program that was seen in it most often.

    now, now_seconds, now_line: what it did when this was written, and for how long it had been doing it. time: Unix
    seconds, by its own clock.
    """

    time: float
    total: Mapping[str, float]
    recent: Mapping[str, float]
    lines: Mapping[str, str]
    now: str
    now_seconds: float
    now_line: str


def packed(phases: Phases) -> bytes:
    """At most 4096 bytes, for unpacked(). Long texts are cut."""
    lines = {phase: _cut(line) for phase, line in phases.lines.items()}
    content = dataclasses.asdict(dataclasses.replace(phases, lines=lines, now_line=_cut(phases.now_line)))
    for name in ("total", "recent"):
        content[name] = [round(content[name].get(figure, 0.0), 4) for figure in FIGURES]
    text = json.dumps(content, ensure_ascii=False).encode()
    return _HEAD.pack(zlib.crc32(text), len(text)) + text


def _cut(line: str) -> str:
    """At most 100 bytes; names of files need not be UTF-8."""
    return line.encode("utf-8", "backslashreplace")[:100].decode(errors="ignore")


def unpacked(content: bytes) -> Phases | None:
    """None: there is nothing yet, or it was just being written."""
    if len(content) < _HEAD.size:
        return None
    checksum, length = _HEAD.unpack_from(content)
    text = content[_HEAD.size : _HEAD.size + length]
    if not length or len(text) != length or zlib.crc32(text) != checksum:
        return None
    found = json.loads(text)
    for name in ("total", "recent"):
        found[name] = dict(zip(FIGURES, found[name], strict=True))
    return Phases(**found)
