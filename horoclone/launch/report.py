"""The failure report: which rank failed first, and everything that is known about it. Pure functions over facts."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import NamedTuple

from horoclone.launch.usage import ranks_text

STDERR_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_CONSEQUENCES = ("PeerLost", "Aborted")
_EXCEPTION = re.compile(r"^((?:\w+\.)*[A-Za-z_]\w*)(?::\s|$)")
_OPEN_TENSORS = re.compile(r"open tensors|in flight|pending tensors", re.IGNORECASE)

_HINTS = {
    signal.SIGSEGV: "a crash in native code; PYTHONFAULTHANDLER=1 prints where",
    signal.SIGBUS: "native code crashed, often on a full /dev/shm; PYTHONFAULTHANDLER=1 prints where",
    signal.SIGABRT: "native code gave up (an assertion or an uncaught C++ exception); its last lines say why",
    signal.SIGILL: "native code was built for another processor",
    signal.SIGFPE: "an integer division by zero in native code",
    signal.SIGTERM: "somebody other than the launcher sent SIGTERM (a scheduler, a container runtime, kill)",
}


class RankEnd(NamedTuple):
    """What the launcher knows about one rank when the job is over."""

    rank: int
    host: str
    pid: int
    code: int  # -N: signal N
    ended_s: float
    by_us: bool  # it ended after we had signalled it, of the signal that we sent
    report: str | None  # traceback that its excepthook sent
    report_is_consequence: bool
    stderr: Sequence[str]
    memory_kills: int = 0
    note: str = ""


def end_of_process(code: int) -> str:
    """code as subprocess has it: -N for signal N."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code(code: int) -> int:
    """What a shell would report: 128 + N for signal N."""
    return 128 - code if code < 0 else code


def traceback_in(stderr: Sequence[str]) -> list[str]:
    """The last traceback among the lines, with the chain that led to it; empty when there is none."""
    starts = [index for index, line in enumerate(stderr) if line.strip() == _TRACEBACK]
    if not starts:
        return []
    first = len(starts) - 1
    while first > 0 and _is_chained(stderr[starts[first - 1] : starts[first]]):
        first -= 1
    end = starts[-1] + 1
    while end < len(stderr) and (stderr[end][:1] in (" ", "\t") or not stderr[end]):
        end += 1
    return list(stderr[starts[first] : end + 1])


def _is_chained(lines: Sequence[str]) -> bool:
    return any(
        line.startswith(("During handling of the above", "The above exception was the direct"))
        for line in lines
    )


def exception_line(lines: Sequence[str]) -> str | None:
    """`ValueError: bad batch 17` of a traceback."""
    return next((line.strip() for line in reversed(lines) if _EXCEPTION.match(line)), None)


def is_consequence(end: RankEnd) -> bool:
    """Whether this rank only suffered from another's end."""
    if end.by_us or (end.report is not None and end.report_is_consequence):
        return True
    if end.code < 0:
        return False
    lines = end.report.splitlines() if end.report else traceback_in(end.stderr)
    match = _EXCEPTION.match(exception_line(lines) or "")
    return match is not None and match.group(1).rpartition(".")[2] in _CONSEQUENCES


def culprit(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that began it: one that did not suffer from another, by signal before by exit code, the earliest."""
    failed = [end for end in ends if end.code != 0]
    if not failed:
        return None
    return min(failed, key=lambda end: (end.by_us, is_consequence(end), end.code >= 0, end.ended_s))


def headline(end: RankEnd) -> str:
    how = end_of_process(end.code)
    where = f"{end.host}, pid {end.pid}" if end.pid else end.host
    lines = end.report.splitlines() if end.report else traceback_in(end.stderr)
    error = exception_line(lines) if end.code >= 0 else None
    return f"rank {end.rank} ({where}) {how}" + (f": {error}" if error else "")


def hint(end: RankEnd) -> str | None:
    if end.code == -signal.SIGKILL:
        if end.memory_kills > 0:
            return f"out of memory: the kernel killed {end.memory_kills} process(es) of this cgroup while the job ran"
        return (
            "kill -9, or out of memory in another cgroup or on the whole host (dmesg tells; the counter of the "
            "launcher's cgroup did not rise)"
        )
    return (
        _HINTS.get(signal.Signals(-end.code))
        if end.code < 0 and -end.code in signal.valid_signals()
        else None
    )


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [f"  {title}", *(f"    | {line}" for line in lines)] if lines else []


def _evidence(end: RankEnd) -> list[str]:
    """The traceback once, and what stands on stderr around it."""
    in_stderr = traceback_in(end.stderr)
    trace = end.report.rstrip("\n").splitlines() if end.report else in_stderr
    rest = list(end.stderr)
    if in_stderr:
        at = next(i for i in range(len(rest)) if rest[i : i + len(in_stderr)] == in_stderr)
        del rest[at : at + len(in_stderr)]
    rest = [line for line in rest if line.strip()][-STDERR_LINES:]
    tensors = [line for line in rest if _OPEN_TENSORS.search(line)]
    rest = [line for line in rest if line not in tensors]
    return [
        *_block("last lines of its stderr:", rest),
        *_block("its traceback:", trace),
        *_block("its open tensors:", tensors),
    ]


def _seen_by_others(end: RankEnd, ends: Sequence[RankEnd]) -> list[str]:
    """A rank that died by a signal says nothing itself; what another was doing with it names operation and tensor."""
    for other in ends:
        if other.rank != end.rank and other.code > 0 and is_consequence(other):
            lines = other.report.splitlines() if other.report else traceback_in(other.stderr)
            error = exception_line(lines)
            if error:
                return [f"  as rank {other.rank} saw it: {error}"]
    return []


def _others(end: RankEnd, ends: Sequence[RankEnd]) -> list[str]:
    hurt = [other.rank for other in ends if other.rank != end.rank and other.code != 0]
    lines = []
    if hurt:
        lines.append(f"  {ranks_text(hurt)} {'was' if len(hurt) == 1 else 'were'} stopped because of this.")
    early = [other.rank for other in ends if other.code == 0 and not other.by_us]
    if early and is_consequence(end):
        lines.append(
            f"  {ranks_text(early)} ended with exit code 0 while others still had work: "
            "every rank must take part in every collective until the end."
        )
    return lines


def failure_report(ends: Sequence[RankEnd], logs: str | None) -> tuple[str, int]:
    """Text and exit code for a job of which at least one rank failed: the root cause first and last."""
    end = culprit(ends)
    assert end is not None
    lines = [headline(end)]
    if end.note:
        lines.append(f"  {end.note}")
    advice = hint(end)
    if advice:
        lines.append(f"  hint: {advice}")
    lines += _evidence(end)
    lines += _seen_by_others(end, ends) if end.code < 0 else []
    lines += _others(end, ends)
    if logs:
        lines.append(f"  logs of every rank: {logs}")
    lines.append(f"root cause: {headline(end)}; exit code {exit_code(end.code)}")
    return "\n".join(lines), exit_code(end.code)
