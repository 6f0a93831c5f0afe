"""The failure report: which rank failed first, and everything that is known about it. Pure functions."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from horoclone.launch.root_cause import (
    CIRCLE,
    GROUP_TRACEBACK,
    TRACEBACK,
    exception_line,
    exception_name,
    goes_on,
    is_lost_peer,
    root_cause_ranks,
    text_of_exception,
)
from horoclone.launch.usage import counted, ranks_text

STDERR_LINES = 20
HOROVODS_FAILURE = (
    "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
    "The first process to do so was:\nProcess name: {}\nExit code: {}"
)
_HARMLESS = ("Exception ignored ", "Error in atexit.")  # the line above a traceback that ended nothing
_TOO_EARLY = (
    "ended with exit code 0 while others still had work: every rank must take part in every collective until the end, "
    "and hvd.join() evens out numbers of steps"
)
_SAID = re.compile(  # by what ends before there could be a traceback
    r"(?:Syntax|Indentation|Tab)Error: |.*: (?:error: |No module named |can't open file |can't find '__main__' )"
)
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
    in_errors: int | None = None  # as errors name it; None: by its rank

    @property
    def number(self) -> int:
        """In the texts of errors."""
        return self.rank if self.in_errors is None else self.in_errors


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


_CHAINS = ("During handling of the above", "The above exception was the direct")


def traceback_in(stderr: Sequence[str]) -> list[str]:
    """The last traceback among the lines that can have ended the process, with the chain that led to it; empty when
    there is none. A thread's is one only where there is no other."""
    headers = [index for index, line in enumerate(stderr) if line.strip() in (TRACEBACK, GROUP_TRACEBACK)]
    above = {index: stderr[index - 1] if index else "" for index in headers}
    starts = [index for index in headers if not above[index].startswith(_HARMLESS)]
    starts = [index for index in starts if not above[index].startswith("Exception in thread ")] or starts
    if not starts:
        return []
    first = len(starts) - 1
    while first > 0 and any(line.startswith(_CHAINS) for line in stderr[starts[first - 1] : starts[first]]):
        first -= 1
    end = starts[-1] + 1
    while end < len(stderr) and (stderr[end][:1] in (" ", "\t") or not stderr[end]):
        end += 1
    end += 1
    if stderr[end - 1 : end] and stderr[end - 1].endswith(":"):  # the text goes on, in lines of its own
        text = end
        while end < len(stderr) and goes_on(stderr[text:end], stderr[end]):
            end += 1
    return list(stderr[starts[first] : end])


def _traceback(end: RankEnd) -> list[str]:
    """What the rank's excepthook sent, else what stands on its stderr."""
    return end.report.rstrip("\n").splitlines() if end.report else traceback_in(end.stderr)


def _error(end: RankEnd) -> str:
    """The line of the exception that ended the rank, or what Python or a parser of options said before one; empty where
    there is none."""
    if end.code < 0:
        return ""
    last = next((line for line in reversed(end.stderr) if line.strip()), "")
    return exception_line(_traceback(end)) or (last.strip() if end.code and _SAID.match(last) else "")


def _origin(end: RankEnd) -> str:
    """The line of the exception from which the one was raised that ended the rank; empty where there is none."""
    lines = _traceback(end)
    first = next((at for at, line in enumerate(lines) if line.startswith(_CHAINS)), 0)
    return exception_line(lines[:first]) or "" if end.code > 0 else ""


def root_causes(end: RankEnd) -> list[int]:
    """The ranks that the text of this rank's exception names as its root cause, itself included."""
    text = text_of_exception(_traceback(end)) if end.code > 0 else ""
    return root_cause_ranks(text) or root_cause_ranks(_origin(end))


def is_consequence(end: RankEnd) -> bool:
    """Whether this rank only suffered from another's end, also where its error was raised from that."""
    if end.by_us or (end.report is not None and end.report_is_consequence):
        return True
    lines = [_error(end), *(line for line in _traceback(end) if line[:1].strip())]
    return end.code >= 0 and any(map(is_lost_peer, lines))


def culprit(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank that began it: one that did not suffer from another, by signal before by exit code, the earliest; where
    its error names one other rank that has failed as well, that one."""
    failed = [end for end in ends if end.code != 0]
    if not failed:
        return None
    first = min(failed, key=lambda end: (end.by_us, is_consequence(end), end.code >= 0, end.ended_s))
    named = root_causes(first)
    for other in failed:
        if named == [other.number] and not other.by_us and root_causes(other) != [first.number]:
            return other
    return first


def _alike(end: RankEnd, ends: Sequence[RankEnd]) -> list[RankEnd]:
    """The ranks that failed in the same way: one exit code or signal, one error with one origin."""
    if end.by_us:
        return [end]
    return [one for one in ends if not one.by_us and one.code == end.code and _same(one) == _same(end)]


def _same(end: RankEnd) -> tuple[str, str]:
    """Its error and that error's origin; of ranks that wait for each other without what each of them did."""
    error = _error(end)
    circle = CIRCLE.search(error)
    return error[circle.start() :] if circle else error, _origin(end)


def _place(end: RankEnd) -> str:
    return f"rank {end.rank} ({end.host}, pid {end.pid})" if end.pid else f"rank {end.rank} ({end.host})"


def _who(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size > 1:
        return "both ranks" if size == 2 else f"all {size} ranks"
    return ranks_text(list(ranks))


def headline(end: RankEnd, alike: Sequence[RankEnd] = (), size: int = 0) -> str:
    """alike: all ranks that failed like this one, of a job of `size`. The error stands in the last line alone."""
    if len(alike) < 2:
        return f"{_place(end)} {end_of_process(end.code)}"
    who = _who([one.rank for one in alike], size)
    return f"{who} {end_of_process(end.code).replace('was ', 'were ', 1)}"


def hint(end: RankEnd) -> str | None:
    if "Unknown backend type horoclone" in _error(end):
        return 'torch knows the backend after "import horoclone.torch"'
    if end.code > 0 and not (end.by_us or end.note or _error(end)):
        return "no traceback: the program chose this code itself (sys.exit, os._exit)"
    if end.code == -signal.SIGKILL:
        if end.memory_kills > 0:
            processes = counted(end.memory_kills, "process")
            return f"out of memory: the kernel killed {processes} of this cgroup while the job ran"
        return "somebody sent it (kill -9), or memory ran out, though not in the launcher's cgroup; dmesg tells which"
    return (
        _HINTS.get(signal.Signals(-end.code))
        if end.code < 0 and -end.code in signal.valid_signals()
        else None
    )


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [f"  {title}", *(f"    | {line}" for line in lines)] if lines else []


def _last_words(end: RankEnd) -> list[str]:
    """The end of its stderr without the traceback."""
    in_stderr = traceback_in(end.stderr)
    rest = list(end.stderr)
    if in_stderr:
        at = next(i for i in range(len(rest)) if rest[i : i + len(in_stderr)] == in_stderr)
        del rest[at : at + len(in_stderr)]
    return [line for line in rest if line.strip()][-STDERR_LINES:]


def _evidence(end: RankEnd, whose: str, verdict: str) -> list[str]:
    """The traceback without an error that the verdict has, and what stands on stderr around it. whose: `its`, or of
    which of several ranks."""
    rest, traceback = _last_words(end), _traceback(end)
    if traceback and traceback[-1].strip() == _error(end) and _error(end) in verdict:
        traceback.pop()
    rest = [line for line in rest if line not in traceback]
    tensors = [line for line in rest if _OPEN_TENSORS.search(line)]
    rest = [line for line in rest if line not in tensors]
    return [
        *_block(f"last lines of {whose} stderr:", rest),
        *_block(f"{whose} traceback:", traceback),
        *_block(f"{whose} open tensors:", tensors),
    ]


def _seen_by_others(end: RankEnd, ends: Sequence[RankEnd], in_sight: Set[int]) -> list[str]:
    """A rank that died by a signal says nothing itself; what another was doing with it names operation and tensor."""
    for other in ends:
        if other.rank != end.rank and other.code > 0 and is_consequence(other) and _error(other):
            return [] if other.rank in in_sight else [f"  as rank {other.rank} saw it: {_error(other)}"]
    return []


def _others(
    end: RankEnd, alike: Sequence[RankEnd], named: Sequence[int], ends: Sequence[RankEnd]
) -> list[str]:
    """What became of the ranks that are not in `alike`: stopped because of it, or failed in a way of their own."""
    shown = {one.rank for one in alike}
    rest = [one for one in ends if one.code != 0 and one.rank not in shown]
    hurt = [
        one
        for one in rest
        if is_consequence(one) or (end.rank != one.rank and root_causes(one) == [end.number])
    ]
    stopped = [one.rank for one in hurt if one.rank not in named]
    lines = []
    if stopped:
        lines.append(
            f"  {ranks_text(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped because of this."
        )
    own = [one for one in rest if one not in hurt]
    while own:
        same = _alike(own[0], own)
        own = [one for one in own if one not in same]
        ranks = ranks_text([one.rank for one in same])
        how, error = end_of_process(same[0].code), _error(same[0])
        lines.append(f"  {ranks} failed, too: {how}" + (f": {error}" if error else ""))
    early = [other.rank for other in ends if _left_in_order(other)]
    if early and is_consequence(end) and not named:
        lines.append(f"  {ranks_text(early)} {_TOO_EARLY}.")
    return lines


def _left_in_order(end: RankEnd) -> bool:
    return end.code == 0 and not end.by_us


def failure_report(
    ends: Sequence[RankEnd],
    logs: str | None,
    size: int = 0,
    in_sight: Set[int] = frozenset(),
    whole: Set[int] | None = None,
) -> tuple[str, int]:
    """Text and exit code for a job of which at least one rank failed: the root cause first and last. size: how many
    ranks it had, where `ends` has all of them. in_sight: whose traceback, or else end of stderr, stands right above,
    and is not repeated. whole: those of whose traceback nothing was left out; None: all of them."""
    end = culprit(ends)
    assert end is not None
    alike = _alike(end, ends)
    first = headline(end, alike, size)
    named = [
        other for other in ends if other.number in root_causes(end) and (other is not end or len(alike) > 1)
    ]
    lines = [first]
    if end.note:
        lines.append(f"  {end.note}")
    advice = hint(end)
    if advice:
        lines.append(f"  hint: {advice}")
    if len(named) > 1:
        lines += [f"  the error is about {_place(other)}." for other in named]
    verdict = _verdict(end, named, alike, size)
    printed = not end.report or bool(traceback_in(end.stderr))  # a hook may have sent it elsewhere
    if not (printed and (in_sight if whole is None else whole) & {one.rank for one in alike}):
        lines += _evidence(end, "its" if len(alike) == 1 else f"rank {end.rank}'s", verdict)
    for other in named:
        if other is not end and other.rank not in in_sight:
            lines += _block(f"last lines of rank {other.rank}'s stderr:", _last_words(other))
    lines += _seen_by_others(end, ends, in_sight) if end.code < 0 else []
    lines += _others(end, alike, [other.rank for other in named], ends)
    if logs:
        lines.append(f"  logs of every rank: {logs}")
    lines.append(f"root cause: {verdict}" + (f" (exit code {exit_code(end.code)})" if end.code < 0 else ""))
    return "\n".join(lines), exit_code(end.code)


def elastic_failure(
    failed: Sequence[RankEnd],
    logs: str | None,
    slot_of: Callable[[RankEnd], int],
    reason: str,
    in_sight: Set[int] = frozenset(),
    whole: Set[int] | None = None,
) -> tuple[str, int]:
    """Of an elastic job that ended with these workers, behind Horovod's words. reason: why it ended, or empty."""
    text, code = failure_report(failed, logs, 0, in_sight, whole)
    first = culprit(failed)
    assert first is not None
    horovods = HOROVODS_FAILURE.format(f"{first.host}[{slot_of(first)}]", first.code)
    return "\n".join([*filter(None, [reason]), horovods, text]), code


def _verdict(end: RankEnd, named: Sequence[RankEnd], alike: Sequence[RankEnd], size: int) -> str:
    """Who failed with what, or the root cause by the words of the error that others have raised."""
    error, ranks = _error(end), [one.rank for one in alike]
    if origin := _origin(end):
        error += f" (from {origin})"
    if named:
        who = _place(named[0]) if len(named) == 1 else ranks_text([one.rank for one in named])
        if is_consequence(end) and all(map(_left_in_order, named)):
            return f"{who} {_TOO_EARLY}"
        return f"{who}, as {_who(ranks, size)} report{'s' if len(ranks) == 1 else ''}: {error}"
    if error and len(alike) > 1 and (_traceback(end) or exception_name(error).endswith("Error")):
        return f"{_who(ranks, size)} raised {error}"
    return headline(end, alike, size) + (f": {error}" if error else "")
