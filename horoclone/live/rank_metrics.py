"""The metrics of one rank: a block of shared memory that anyone may read; the core writes its first 4 KiB. Pure.

The layout is csrc/engine/rank_metrics/layout.h's; a test compares the two. All numbers are native:
blocks of other hosts are copies, and hosts of one job have the same byte order.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from horoclone.live import phases
from horoclone.live.phases import Phases
from horoclone.live.processes import ProcessIdentity

BYTES = 4096  # of what the core writes
BLOCK_BYTES = BYTES + phases.BYTES  # with what phase_sampler.py writes behind it, where it is asked for
MAGIC = b"HCPAGE03"
# The kinds of operations in the order of the core's Op.
KINDS = (
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "join", "barrier", "reduce", "gather",
    "scatter", "send", "recv",
)  # fmt: skip
BUCKETS = 24
STATES = ("starting", "running", "waiting", "stalled", "ended", "lost")

WAITING_AFTER_S = 0.1  # of a thread's waiting make its rank "waiting"
SILENT_AFTER_S = 10.0  # with operations under way the core gives a sign of life every second

_TRIES = 200  # to read the block while nobody writes it; an update takes some tens of nanoseconds
_WORD = _SEQUENCE = struct.Struct("=Q")
_SEQUENCE_AT = len(MAGIC)
_IDENTITY = struct.Struct("=4i5q2I64s64s")
_IDENTITY_AT = 16
_PROCESS = struct.Struct("=i2q")
_PROCESS_AT = 28
_STEPS = struct.Struct("=9Q")
_STEPS_AT = 208
_COMMUNICATION_AT = 256
_WAITS = struct.Struct("=6Q")
_WAITS_AT = 280
_LAST = struct.Struct("=2Q2I64s")
_LAST_AT = 328
_STALL = struct.Struct("=128sI15i")
_STALL_AT = 416
_LATE = struct.Struct("=iIQ")
_LATE_AT, _LATE_COUNT = 608, 8
_ELASTIC = struct.Struct("=Q5I")
_ELASTIC_AT = 736
_STALLED = struct.Struct("=I")  # by the core, behind what recovery.py writes
_STALLED_AT = _ELASTIC_AT + _ELASTIC.size
_OPERATION = struct.Struct(f"={4 + BUCKETS}Q")
_OPERATIONS_AT = 768
_RECENT = struct.Struct("=2Q2I")
_RECENT_AT = 3456
_CALL = struct.Struct("=3Q")
_CALLS_AT = _RECENT_AT + _RECENT.size
_NOTES = struct.Struct("=2q2i")  # at the end, see notes()
_NOTES_AT = BYTES - _NOTES.size
TIMES_BYTES = 16  # of the notes, the rest of which is about the process's end
_STARTING, _RUNNING, _ENDED = 0, 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What one rank has done of one kind of operation. Only grows, from one init() to the next.

    count: that have ended, well or not. bytes: of this rank's tensors, or of the result where the core owns it.
    queued_seconds: summed over the operations, from the submission until the data begins to move; agreement and the
    wait for other ranks are in it. running_seconds: from then until done. histogram: of both together; bucket 0 counts
    what took less than 1 us, bucket i from 2**(i-1) us to less than 2**i us, the last everything from 2**22 us on.
    Operations on a GPU are done when they are enqueued there.
    """

    count: int
    bytes: int
    queued_seconds: float
    running_seconds: float
    histogram: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LastOperation:
    """The operation that ended last. name: "" of an unnamed one; a longer one is cut to 64 bytes. age_seconds: since
    then."""

    kind: str
    name: str
    bytes: int
    age_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Late:
    """A rank that others waited for: how often it was the last one to come, and for how long in all."""

    rank: int
    times: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Goodput:
    """How the time of an elastic job went by, as one rank has seen it since its training began, in seconds.

    whole_seconds: all of it. redone_seconds: between the last commit and a failure, so that work was lost.
    recovering_seconds: from failures until training went on, joining_seconds: the same where others joined or left.
    saving_seconds: in commits. stalled_seconds: waiting for longer than HOROVOD_STALL_CHECK_TIME_SECONDS.
    """

    whole_seconds: float
    redone_seconds: float
    recovering_seconds: float
    joining_seconds: float
    saving_seconds: float
    stalled_seconds: float

    @property
    def share(self) -> float:
        """Of the whole time: what training had that counts, 0 to 1."""
        lost = dataclasses.astuple(self)[1:]
        return max(0.0, 1 - sum(lost) / self.whole_seconds) if self.whole_seconds > 0 else 1.0


def elastic_at(at: int, began_ns: int, lost_ms: Sequence[int]) -> tuple[int, bytes]:
    """(where, what) a rank of an elastic job writes into its block, which begins at `at`. began_ns: Unix nanoseconds;
    lost_ms: redone, recovering, joining, saving, and stalled before this life."""
    return at + _ELASTIC_AT, _ELASTIC.pack(began_ns, *(min(one, 2**32 - 1) for one in lost_ms))


@dataclasses.dataclass(frozen=True, slots=True)
class RankMetrics:
    """What one rank says about itself, at the moment `now`. Times are Unix seconds; what is summed begins at init().

    heartbeat: its last sign of life: at the end of operations, and every second while some are under way; the core of
    a rank that has nothing to do sleeps, and gives none.
    state: "starting" before init() has connected the ranks, "ended" after shutdown() or an exit with code 0, "lost"
    when the process went away without either, "stalled" when is_stalled, "waiting" when one of the user's threads has
    waited in the runtime for more than 0.1 s, else "running".
    exit_code: as subprocess has it (-9: SIGKILL), where a launcher of ours saw the process end; else None.
    is_consequence: it ended since another rank had: with an error that says so, or ended by the launcher.
    step: how many steps have begun, 0 where nothing repeats; step_seconds: of the last whole one;
    step_seconds_smoothed: a mean that follows each new step by a fifth of the difference. The core counts steps: from
    one submission of an optimizer's first bucket to the next, or, without such an optimizer, of the named operation
    that repeats most often, from its second one on.
    waited_for_peers_seconds, waited_for_transfer_seconds: of the user's threads that waited for an operation, before
    and after its data began to move. communication_seconds: for which any operation was under way; of these
    overlapped_seconds: while no thread of the user waited. step_communication_seconds, step_waited_seconds: the same
    (and both waits together) for the last whole step. communication_share and overlap are what a view shows of them.
    stalled_on: what waits, such as "allreduce 'x'", or that nothing is heard; stalled_for: ranks that are late, where
    this rank knows. late: the eight that were waited for longest, in the world's process set; rank 0 knows all.
    goodput: None where the job is not elastic, or has not begun to train. is_stopped: by a signal or a debugger;
    is_silent: busy, and not heard of for 10 s. phases: where its time went, None where HOROCLONE_WHY does not ask for
    it; phases_age_seconds: since they were written.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    pid: int
    program: str
    generation: int
    started: float
    heartbeat: float
    now: float
    state: str
    exit_code: int | None
    step: int
    step_seconds: float
    step_seconds_smoothed: float
    step_communication_seconds: float
    step_waited_seconds: float
    operations: Mapping[str, Operation]
    waited_for_peers_seconds: float
    waited_for_transfer_seconds: float
    communication_seconds: float
    overlapped_seconds: float
    last_operation: LastOperation | None
    is_stalled: bool
    stalled_on: str
    stalled_for: tuple[int, ...]
    late: tuple[Late, ...]
    goodput: Goodput | None = None
    is_stopped: bool = False
    is_silent: bool = False
    phases: Phases | None = None
    phases_age_seconds: float = 0.0
    is_consequence: bool = False

    @property
    def communication_share(self) -> float:
        """Of the last whole step: the part of its time, 0 to 1, in which operations were under way."""
        return min(1.0, self.step_communication_seconds / self.step_seconds) if self.step_seconds else 0.0

    @property
    def overlap(self) -> float:
        """Of the last whole step: the part of its communication, 0 to 1, for which no thread of the user waited."""
        if not self.step_communication_seconds:
            return 0.0
        return max(0.0, 1.0 - self.step_waited_seconds / self.step_communication_seconds)

    @property
    def bytes(self) -> int:
        """Of all operations."""
        return sum(one.bytes for one in self.operations.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What the reader knows of the process that writes a block. lives False makes a block that was not ended "lost";
    is_stopped (by a signal) makes it "stalled"."""

    lives: bool = True
    is_stopped: bool = False


def read(memory: Any, seen: Seen = Seen()) -> RankMetrics:
    """The metrics in `memory`: an mmap, bytes, or whatever has a buffer of 4096 bytes or, with phases, 8192.

    It is read until a copy was made while nobody wrote; of a writer that died in the middle of an update, the copy is
    what it left. ValueError when that is no metrics block, or one of another version.
    """
    return decode(consistent_copy(memory), time.time(), seen)


def consistent_copy(memory: Any) -> bytes:
    """Its bytes, of which the core's are of one moment. ValueError as in read()."""
    view = memoryview(memory)
    if view.nbytes < BYTES or bytes(view[:_SEQUENCE_AT]) != MAGIC:
        raise ValueError(
            f"not a metrics block of this version: {view.nbytes} bytes that begin with "
            f"{bytes(view[:_SEQUENCE_AT])!r}, not {BYTES} with {MAGIC!r}"
        )
    copy = b""
    for _ in range(_TRIES):
        before = _SEQUENCE.unpack_from(view, _SEQUENCE_AT)[0]
        calls = bytes(view[_RECENT_AT : _RECENT_AT + _WORD.size])
        copy = bytes(view[:BYTES])
        inside = _SEQUENCE.unpack_from(copy, _SEQUENCE_AT)[0]  # odd where a block from elsewhere is put here
        after = _SEQUENCE.unpack_from(view, _SEQUENCE_AT)[0]
        if before == inside == after and before % 2 == 0:
            break
    return _with_calls(copy, calls) + bytes(view[BYTES:BLOCK_BYTES])


def copy_from_file(descriptor: int, at: int) -> bytes:
    """The same for the block that begins at `at` of a file. OSError; fewer bytes than a block where the file ends."""
    copy = b""
    for _ in range(_TRIES):
        before = os.pread(descriptor, _IDENTITY_AT, at)
        calls = os.pread(descriptor, _WORD.size, at + _RECENT_AT)
        copy = os.pread(descriptor, BYTES, at)
        after = os.pread(descriptor, _IDENTITY_AT, at)
        if before == after and (len(copy) < BYTES or copy[_SEQUENCE_AT] % 2 == 0):
            break
    return (
        copy
        if len(copy) < BYTES
        else _with_calls(copy, calls) + os.pread(descriptor, phases.BYTES, at + BYTES)
    )


def _with_calls(copy: bytes, calls: bytes) -> bytes:
    """With the count of recent calls that was read before the copy was made: a call that was noted meanwhile may be in
    it by half."""
    return copy[:_RECENT_AT] + calls + copy[_RECENT_AT + len(calls) :]


def replace_in_file(descriptor: int, at: int, copy: bytes) -> None:
    """Writes a block that came from elsewhere to where readers look; its notes are notes()'s. OSError."""
    sequence = _SEQUENCE.unpack_from(copy, _SEQUENCE_AT)[0]
    os.pwrite(descriptor, MAGIC + _SEQUENCE.pack(sequence | 1), at)
    if sequence % 2:  # its writer died, and may have added some of the recent calls to the numbers already
        copy = _with_calls(copy, bytes(_WORD.size))
    os.pwrite(descriptor, copy[_IDENTITY_AT:_NOTES_AT], at + _IDENTITY_AT)
    os.pwrite(descriptor, _SEQUENCE.pack(sequence + sequence % 2), at + _SEQUENCE_AT)
    os.pwrite(descriptor, copy[BYTES:BLOCK_BYTES], at + BYTES)


def identity_of(copy: bytes) -> ProcessIdentity:
    """The process that writes the block, or wrote it."""
    _, _, _, pid, started, namespace, *_ = _IDENTITY.unpack_from(copy, _IDENTITY_AT)
    return ProcessIdentity(pid, started, namespace)


def is_of_another_host(copy: bytes) -> bool:
    """Whether it was passed on: then its pid means nothing here."""
    return bool(_NOTES.unpack_from(copy, _NOTES_AT)[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What whoever starts a process knows of it before its core writes: see initial()."""

    rank: int
    size: int
    local_rank: int
    host: str
    program: str
    process: ProcessIdentity


def initial(origin: Origin) -> bytes:
    """The first bytes of a block that nobody has written yet: its state is "starting"."""
    now_ns = time.time_ns()
    numbers = (origin.rank, origin.size, origin.local_rank, *origin.process)
    texts = tuple(text.encode("utf-8", "backslashreplace")[:64] for text in (origin.host, origin.program))
    identity = _IDENTITY.pack(*numbers, 0, now_ns, now_ns, _STARTING, 0, *texts)
    return MAGIC + bytes(_IDENTITY_AT - len(MAGIC)) + identity


def notes(
    received_ns: int, copied_ns: int, exit_code: int | None, is_consequence: bool = False
) -> tuple[int, bytes]:
    """(where, what) whoever passes a block on, or sees its process end, writes into it. Unix nanoseconds by his clock
    and by that of the block's own host, 0 on that host; exit_code: as subprocess has it, None while the process
    runs; is_consequence: as in RankMetrics."""
    is_gone = 0 if exit_code is None else 1 + is_consequence
    return _NOTES_AT, _NOTES.pack(received_ns, copied_ns, is_gone, exit_code or 0)


def identity_at(at: int, process: ProcessIdentity) -> tuple[int, bytes]:
    """(where, what) whoever has started a rank's process writes into its block, which begins at `at`, before the core
    does."""
    return at + _PROCESS_AT, _PROCESS.pack(*process)


def stall_text(one: RankMetrics) -> str:
    """One sentence about a rank that is stalled."""
    for_whom = ", ".join(str(rank) for rank in one.stalled_for)
    return f"rank {one.rank} waits: {one.stalled_on}" + (f", for rank {for_whom}" if for_whom else "")


def states(memory: Any) -> tuple[bool, int]:
    """(the core says that it is stalled, generation), without a look at the rest."""
    view = memoryview(memory)
    *_, generation, _, _, _, stalled, _, _ = _IDENTITY.unpack_from(view, _IDENTITY_AT)
    return bool(stalled), generation


def _with_recent(copy: bytes) -> bytes:
    """With the recent calls, if there are any, in the numbers: what the core's Page::add_recent does."""
    calls, each, kind, begin_steps = _RECENT.unpack_from(copy, _RECENT_AT)
    if not calls or _SEQUENCE.unpack_from(copy, _SEQUENCE_AT)[0] % 2:
        return copy
    added = bytearray(copy)

    def add(at: int, value: int) -> None:
        _WORD.pack_into(added, at, _WORD.unpack_from(added, at)[0] + value)

    of_kind = _OPERATIONS_AT + kind * _OPERATION.size
    submitted = done = 0
    for number in range(calls):
        submitted, started, done = _CALL.unpack_from(copy, _CALLS_AT + number * _CALL.size)
        ended = max(submitted, done)
        started = min(max(started, submitted), ended)
        bucket = min(((ended - submitted) // 1000).bit_length(), BUCKETS - 1)
        queued_ns, running_ns = started - submitted, ended - started
        for at, value in (
            (of_kind, 1), (of_kind + 8, each), (of_kind + 16, queued_ns), (of_kind + 24, running_ns),
            (of_kind + 32 + 8 * bucket, 1), (_COMMUNICATION_AT, ended - submitted), (_WAITS_AT, queued_ns),
            (_WAITS_AT + 8, running_ns),
        ):  # fmt: skip
            add(at, value)
    struct.pack_into("=2QI", added, _LAST_AT, done, each, kind)
    if begin_steps:
        add(_STEPS_AT, calls)
        _WORD.pack_into(added, _STEPS_AT + 8, submitted)
    return bytes(added)


def decode(copy: bytes, now: float, seen: Seen = Seen()) -> RankMetrics:
    """The metrics in a copied block. now: Unix seconds, when it was copied here."""
    measured = phases.unpacked(copy[BYTES:])
    copy = _with_recent(copy)
    (rank, size, local_rank, pid, _, _, generation, started_ns, heartbeat_ns, *rest) = _IDENTITY.unpack_from(
        copy, _IDENTITY_AT
    )
    said, stalled, host, program = rest
    step, _, step_ns, smoothed_ns, step_moves, step_waits, moves, moves_since, _ = _STEPS.unpack_from(
        copy, _STEPS_AT
    )
    *waits, waiters, waiting_since = _WAITS.unpack_from(copy, _WAITS_AT)
    for_peers, for_transfer = waits[0] + waits[2], waits[1] + waits[3]
    received_ns, copied_ns, is_gone, exit_code = _NOTES.unpack_from(copy, _NOTES_AT)
    ahead_ns = received_ns - copied_ns if copied_ns else 0  # our clock before that of a block's own host
    started, heartbeat = (started_ns + ahead_ns) / 1e9, (heartbeat_ns + ahead_ns) / 1e9
    # Ages are as of the copy, which for another host is older.
    copied = received_ns / 1e9 if copied_ns else now
    elapsed_ns = max(0, int((copied - started) * 1e9))
    is_busy = bool(moves_since) and said == _RUNNING
    if is_busy:
        moves += max(0, elapsed_ns - moves_since)
    lives = seen.lives and not is_gone
    is_silent = False
    stalled_on, stalled_for = _stall(copy) if stalled else ("", ())
    if lives and seen.is_stopped:
        stalled_on, stalled_for = "the process is stopped (SIGSTOP, or a debugger)", ()
    elif is_silent := (lives and is_busy and now - heartbeat > SILENT_AFTER_S):
        silent = f"no sign of life for {now - heartbeat:.0f} s: it is stopped, or its host is"
        stalled_on, stalled_for = silent, ()
    state = _state(said, bool(stalled_on), lives, exit_code if is_gone else None)
    if state == "running" and waiters and elapsed_ns - waiting_since > WAITING_AFTER_S * 1e9:
        state = "waiting"
    return RankMetrics(
        rank=rank,
        size=size,
        local_rank=local_rank,
        host=_text(host),
        pid=pid,
        program=_text(program),
        generation=generation,
        started=started,
        heartbeat=heartbeat,
        now=now,
        state=state,
        exit_code=exit_code if is_gone else None,
        is_consequence=is_gone == 2,
        step=step,
        step_seconds=step_ns / 1e9,
        step_seconds_smoothed=smoothed_ns / 1e9,
        step_communication_seconds=step_moves / 1e9,
        step_waited_seconds=step_waits / 1e9,
        operations=_operations(copy),
        waited_for_peers_seconds=for_peers / 1e9,
        waited_for_transfer_seconds=for_transfer / 1e9,
        communication_seconds=moves / 1e9,
        overlapped_seconds=max(0, moves - for_peers - for_transfer) / 1e9,
        last_operation=_last(copy, elapsed_ns),
        is_stalled=state == "stalled",
        stalled_on=stalled_on if state == "stalled" else "",
        stalled_for=stalled_for if state == "stalled" else (),
        late=_late(copy),
        goodput=_goodput(copy, heartbeat if said == _ENDED or not lives else copied, ahead_ns),
        is_stopped=lives and seen.is_stopped,
        is_silent=is_silent,
        phases=measured and printable_phases(measured),
        phases_age_seconds=max(0.0, now - measured.time - ahead_ns / 1e9) if measured else 0.0,
    )


def _stall(copy: bytes) -> tuple[str, tuple[int, ...]]:
    """(what waits, for which ranks) as the core says it."""
    awaited, known, *ranks = _STALL.unpack_from(copy, _STALL_AT)
    return _text(awaited) or "an operation", tuple(ranks[:known])


def _late(copy: bytes) -> tuple[Late, ...]:
    found = _LATE.iter_unpack(copy[_LATE_AT : _LATE_AT + _LATE_COUNT * _LATE.size])
    return tuple(Late(rank, times, ns / 1e9) for rank, times, ns in found if times)


def _goodput(copy: bytes, until: float, ahead_ns: int) -> Goodput | None:
    began_ns, *lost_ms, before_ms = _ELASTIC.unpack_from(copy, _ELASTIC_AT)
    if not began_ns:
        return None
    (stalled_ms,) = _STALLED.unpack_from(copy, _STALLED_AT)
    whole = max(0.0, until - (began_ns + ahead_ns) / 1e9)
    return Goodput(whole, *(one / 1000 for one in (*lost_ms, before_ms + stalled_ms)))


def _state(said: int, stalled: bool, lives: bool, exit_code: int | None) -> str:
    if not lives and exit_code is not None:  # also of one that ended in order before it failed
        return "lost" if exit_code else "ended"
    if said == _ENDED:
        return "ended"
    if not lives:
        return "lost"
    if stalled:
        return "stalled"
    return "running" if said == _RUNNING else "starting"


def _operations(copy: bytes) -> dict[str, Operation]:
    found = {}
    for at, kind in enumerate(KINDS):
        count, moved, queued_ns, running_ns, *histogram = _OPERATION.unpack_from(
            copy, _OPERATIONS_AT + at * _OPERATION.size
        )
        if count:
            found[kind] = Operation(count, moved, queued_ns / 1e9, running_ns / 1e9, tuple(histogram))
    return found


def _last(copy: bytes, elapsed_ns: int) -> LastOperation | None:
    done_ns, moved, kind, name_bytes, name = _LAST.unpack_from(copy, _LAST_AT)
    if not done_ns:
        return None
    return LastOperation(KINDS[kind], printable(name[:name_bytes]), moved, max(0, elapsed_ns - done_ns) / 1e9)


def printable_phases(measured: Phases) -> Phases:
    """With the names of files and functions as printable() has them."""
    lines = {
        phase: printable(line.encode("utf-8", "backslashreplace")) for phase, line in measured.lines.items()
    }
    return dataclasses.replace(
        measured, lines=lines, now_line=printable(measured.now_line.encode("utf-8", "backslashreplace"))
    )


def _text(raw: bytes) -> str:
    return printable(raw.split(b"\0", 1)[0])


def printable(raw: bytes) -> str:
    """As text, control characters as \\x1b: names are the program's choice, and a terminal would obey them."""
    text = raw.decode(errors="replace")
    return "".join(c if ord(c) >= 32 and not 127 <= ord(c) < 160 else f"\\x{ord(c):02x}" for c in text)
