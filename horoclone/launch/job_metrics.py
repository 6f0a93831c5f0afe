"""The job metrics segment (live/job_segment.py) on the launcher's side: made, passed on, with a note of what happens.

remote.py has a segment, too, of the ranks of its host, and sends their metrics to the launcher. Where there is no
memory for a block, or no descriptor for the segment, the job runs without: no method raises for that. Thread: the job's
loop.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import struct
import time
import zlib
from collections.abc import Iterator, Sequence

from horoclone.launch import report
from horoclone.launch.hosts import Placement
from horoclone.launch.usage import counted
from horoclone.live import late_ranks, rank_metrics
from horoclone.live.job_segment import Event, Writer
from horoclone.live.overview import longest_goodput
from horoclone.live.processes import ProcessIdentity, own_identity, own_namespace, start_of
from horoclone.live.rank_metrics import RankMetrics

LOOK_EVERY_S = 1.0
_REPEAT_S = 5.0  # between two sendings of an unchanged block: the launcher learns that its host lives
_COPIED = struct.Struct("=q")
_PACKED_FASTEST = 1  # zlib: 8 KiB, mostly zeros, become some hundred bytes
_HEAD = 256  # bytes of a block in which rank_metrics.states() looks

_segments = itertools.count()  # of this process


class JobMetrics:
    """The metrics of one job's ranks, by the job's number of each."""

    def __init__(self, command: Sequence[str]) -> None:
        own, number = own_identity(), next(_segments)
        about = {
            "id": f"{own.pid}-{number + 1}" if number else str(own.pid),
            "command": shlex.join(command)[:1000],
            "started": time.time(),
            "pid": own.pid,
            "process_start": own.started,
            "namespace": own.namespace,
        }
        try:
            self._segment: Writer | None = Writer(about)
        except OSError:
            self._segment = None
        self._at: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._stalled: set[int] = set()
        self._ended: set[int] = set()
        self._generation = 0
        self._next_look_s = 0.0
        self._is_ending = False
        self._sent: dict[int, tuple[bytes, float]] = {}

    def add(self, key: int, placement: Placement) -> None:
        """A rank that is about to be started."""
        if self._segment is None:
            return
        host = placement.host.rpartition("@")[2]
        process = ProcessIdentity(0, 0, 0)
        initial = rank_metrics.initial(
            rank_metrics.Origin(placement.rank, placement.size, placement.local_rank, host, "", process)
        )
        self._ranks[key] = placement.rank
        try:
            at = self._take_over()
            if at is None:
                at = self._segment.add_block(initial)
            else:
                self._segment.write(at, initial.ljust(rank_metrics.BLOCK_BYTES, b"\0"))
            self._at[key] = at
        except OSError:
            pass

    def _take_over(self) -> int | None:
        """The place of a worker that has ended before the newest generation: nobody asks for it any more."""
        assert self._segment is not None
        for key in sorted(self._ended & self._at.keys()):
            if rank_metrics.states(self._segment.read(self._at[key], _HEAD))[1] < self._generation:
                self._ended.discard(key)
                return self._at.pop(key)
        return None

    def passed(self, key: int) -> tuple[int, int] | None:
        """(descriptor, offset) for the process of a rank, which inherits the first. None: it has no block."""
        return (
            None
            if self._segment is None or key not in self._at
            else (self._segment.descriptor, self._at[key])
        )

    def started(self, key: int, pid: int, is_here: bool) -> None:
        """Its process runs, but its core has not begun to write."""
        if self._segment is not None and key in self._at and is_here:
            process = ProcessIdentity(pid, start_of(pid), own_namespace())
            self._segment.write(*rank_metrics.identity_at(self._at[key], process))

    def ended(self, key: int, code: int, by_us: bool, is_consequence: bool = False) -> None:
        """code: as subprocess has it. by_us: the launcher has ended it. is_consequence: its error was about another."""
        if self._segment is not None and key in self._at:
            self._ended.add(key)
            at, _ = rank_metrics.notes(0, 0, None)
            self._segment.write(
                self._at[key] + at + rank_metrics.TIMES_BYTES,
                rank_metrics.notes(0, 0, code, by_us or is_consequence)[1][rank_metrics.TIMES_BYTES :],
            )
        if code != 0 and not by_us:
            self.happened("loss", f"rank {self._ranks.get(key, key)} {report.end_of_process(code)}", key)

    def formed(self, generation: int, ranks: int) -> None:
        """A generation of an elastic job."""
        self._generation = generation
        self.happened("member", f"generation {generation} was formed: {counted(ranks, 'rank')}")

    def happened(self, kind: str, text: str, *keys: int) -> None:
        if self._segment is not None:
            ranks = tuple(self._ranks.get(key, key) for key in keys)
            self._segment.add_event(Event(time.time(), kind, text, ranks))

    def look(self, now: float, is_ending: bool) -> None:
        """Once a second: notes who stalls, and who goes on. now: of the monotonic clock."""
        if is_ending and not self._is_ending:
            self._is_ending = True
            self.happened("end", "the job ends")
        if self._segment is None or now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_EVERY_S
        for key, at in self._at.items():
            stalled = key not in self._ended and rank_metrics.states(self._segment.read(at, _HEAD))[0]
            if stalled == (key in self._stalled):
                continue
            if stalled:
                self._stalled.add(key)
                self.happened("stall", rank_metrics.stall_text(self._read(at)), key)
            else:
                self._stalled.discard(key)
                if key not in self._ended:
                    self.happened("resumed", f"rank {self._ranks[key]} goes on", key)

    def _read(self, at: int) -> RankMetrics:
        assert self._segment is not None
        return rank_metrics.read(rank_metrics.copy_from_file(self._segment.descriptor, at))

    def _readable(self) -> Iterator[RankMetrics]:
        """Of all ranks but those whose block is of another version, or was overwritten."""
        for at in self._at.values():
            with contextlib.suppress(ValueError):
                yield self._read(at)

    def goodput(self) -> str:
        """A sentence for the end of an elastic job, "" of others."""
        if self._segment is None:
            return ""
        found = longest_goodput(self._readable())
        if found is None or found.whole_seconds < 1:
            return ""
        parts = {
            "work done again": found.redone_seconds,
            "recoveries": found.recovering_seconds,
            "newcomers and leavers": found.joining_seconds,
            "commits": found.saving_seconds,
            "stalls": found.stalled_seconds,
        }
        lost = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in parts.items() if seconds >= 0.005)
        return f"goodput {found.share:.1%} of {found.whole_seconds:.0f} s" + (f": {lost}" if lost else "")

    def why(self) -> list[str]:
        """Two lines about each rank that was late in the whole of the job; empty where nobody has measured it."""
        if self._segment is None:
            return []
        found = late_ranks.of_ranks(list(self._readable()), recent=False)
        return [
            line
            for one in found
            for line in (f"rank {one.rank} was late: {one}", f"rank {one.rank}: {one.advice}")
        ]

    # ---- between hosts

    def news(self) -> Iterator[tuple[int, bytes]]:
        """(rank, what the launcher's take() takes) of each block that has changed, and now and then of the others."""
        now = time.monotonic()
        if self._segment is None or now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_EVERY_S
        for key, at in self._at.items():
            copy = rank_metrics.copy_from_file(self._segment.descriptor, at)
            before, sent_s = self._sent.get(key, (b"", 0.0))
            if copy != before or now - sent_s >= _REPEAT_S:
                self._sent[key] = (copy, now)
                yield key, _COPIED.pack(time.time_ns()) + zlib.compress(copy, _PACKED_FASTEST)

    def take(self, key: int, payload: bytes) -> None:
        """The metrics of a rank on another host, as news() there has packed it. What is none is dropped."""
        if self._segment is None or key not in self._at:
            return
        try:
            (copied_ns,) = _COPIED.unpack_from(payload)
            copy = zlib.decompressobj().decompress(payload[_COPIED.size :], rank_metrics.BLOCK_BYTES)
        except (struct.error, zlib.error):
            return
        if len(copy) == rank_metrics.BLOCK_BYTES and copy.startswith(rank_metrics.MAGIC):
            rank_metrics.replace_in_file(self._segment.descriptor, self._at[key], copy)
            at, times = rank_metrics.notes(time.time_ns(), copied_ns, None)
            self._segment.write(self._at[key] + at, times[: rank_metrics.TIMES_BYTES])

    def close(self) -> None:
        """The job is over; readers see that."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()
