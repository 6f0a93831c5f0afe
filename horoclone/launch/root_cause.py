"""Root causes: which ranks the text of an error names, in the forms in which the runtime names them. Pure functions.

The words come from csrc/agreement/mismatch.cc (who announced what), csrc/engine/watch (who is late), Mesh::describe
("rank 3 (node-b, pid 812)") and runtime/exit_hooks.py ("rank 3 raised ValueError: ...").
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TRACEBACK = "Traceback (most recent call last):"
GROUP_TRACEBACK = f"+ Exception Group {TRACEBACK}"

_EXCEPTION = re.compile(r"^((?:\w+\.)*[A-Za-z_]\w*)(?::\s|$)")
_ANOTHER = re.compile(  # how Python, its warnings and the usual loggers begin a text of their own
    r"Traceback \(most recent |During handling of |The above exception |Exception (?:ignored|in thread) "
    r"|Error in (?:atexit|sys)\.|.*:\d+: \w*Warning: |\W?(?:DEBUG|INFO|WARNING)\b|\W?(?:ERROR|CRITICAL):[\w.]+:"
    r"|\W?\d{4}-\d\d-\d\d[ T]|(?:\[rank\d+\]:)?\W?[IWEF]\d{4} \d\d:"
)
_IN_GROUP = re.compile(r"(?: {2})+\| ")  # before what belongs to an ExceptionGroup
_GROUP = re.compile(r" \(\d+ sub-exceptions?\)$")
_QUOTED = re.compile(r"'[^'\n]*'")  # names of tensors are the user's words
_STALLED = re.compile(r"\(\d+ s\): missing ranks? ([\d,-]+)(?:; ready ranks? ([\d,-]+))?")
_NAMED = re.compile(
    r"\brank (\d+) (?:\([^()\n]*, pid \d+\)|announced |raised |failed before |was killed by |was interrupted "
    r"|ended with exit code |has died or left)"
)
_IN_JOB = re.compile(r"\brank (\d+) of the process group is rank (\d+) of the job")  # torch/c10d/lost.py
_EVEN = re.compile(r"\brank \d+ announced .* and rank \d+ announced ")  # as many ranks the one as the other
# As it is, or in the text of a framework's error; a user's may have these words, too.
_LOST_PEER = re.compile(
    r"\bhoroclone\.errors\.(?:PeerLost|Aborted)(?::|\Z)|(?:\A|[\s.])(?:PeerLost|Aborted): .*"
    rf"(?:{_NAMED.pattern}|stalled longer than HOROVOD_|has (?:been )?shut down)"
)
_FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (.+)')
_LIBRARY = re.compile(  # whose frames are not the user's
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|\A<frozen |\A"
    + re.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    + "/"
)
CIRCLE = re.compile(r"\branks? [\d,-]+ stands? in ")
_LISTED = 6  # lines of a list that are told
_NEXT_SENTENCE = re.compile(r"[.?!] (?=[A-Z(])")


def goes_on(text: Iterable[str], line: str) -> bool:
    """Whether a line still belongs to an error whose first line ends in a colon, as torch's `Error(s) in loading
    state_dict for Net:` and TensorFlow's `Graph execution error:` do. text: what stands between the two. An indented
    text ends before a line that is not; any ends where a warning, a logger or another traceback begins."""
    if not line.strip() or line[0].isspace():
        return True
    indented = next((one[0].isspace() for one in text if one.strip()), False)
    return not indented and _ANOTHER.match(line) is None


def _of_group(lines: Sequence[str]) -> Sequence[str]:
    """Of an ExceptionGroup at the end the first error in it that is no group itself; else the lines as they are."""
    headers = [i for i, line in enumerate(lines) if line.startswith((f"  {GROUP_TRACEBACK}", TRACEBACK))]
    if not headers or lines[headers[-1]].startswith(TRACEBACK):
        return lines
    plain = [_IN_GROUP.sub("", line, count=1) for line in lines[headers[-1] :]]
    errors = [i for i, line in enumerate(plain) if _EXCEPTION.match(line) and not _GROUP.search(line)]
    first = errors[0] if errors else 0
    end = next((i for i in range(first, len(plain)) if plain[i].lstrip().startswith("+-")), len(plain))
    return plain[first:end]


def _error_at(lines: Sequence[str]) -> int | None:
    """Where the exception stands: the first line below the last traceback's frames, whatever its text adds to it."""
    header = next((i for i in reversed(range(len(lines))) if lines[i].rstrip().endswith(TRACEBACK)), -1)
    found = [i for i, line in enumerate(lines) if _EXCEPTION.match(line)]
    return next((i for i in found if i > header >= 0), found[-1] if found else None)


def exception_line(lines: Sequence[str]) -> str | None:
    """`ValueError: bad batch 17` of a traceback. Where the text goes on after a colon, what it says is in its last line
    that is not indented, or in the outermost ones of a list, as torch's and those of a stall."""
    lines = _of_group(lines)
    at = _error_at(lines)
    if at is None:
        return None
    line = lines[at].strip()
    if not line.endswith(":"):
        return line
    rest = [one for one in lines[at + 1 :] if one.strip()]
    depth = [len(one) - len(one.lstrip()) for one in rest]
    said = [one.strip() for one, at in zip(rest, depth, strict=True) if at == min(depth)]
    if depth and min(depth) == 0:
        said = said[-1:]
    return " ".join([line, "; ".join(said[:_LISTED])]).strip()


def exception_name(line: str | None) -> str:
    """`Mismatch` of `horoclone.errors.Mismatch: ...`; empty when there is no exception."""
    match = _EXCEPTION.match(line or "")
    return match.group(1).rpartition(".")[2] if match else ""


def is_lost_peer(line: str) -> bool:
    """Whether an exception's line says that the rank only suffered from another's end."""
    return _LOST_PEER.search(_QUOTED.sub("''", line)) is not None


class Suffered(NamedTuple):
    """The traceback of a rank that is not the cause, in a few words: what it did, who is the cause, and where in the
    user's own code it stood."""

    did: str
    cause: str
    places: str


def suffered(rank: int, traceback: Sequence[str]) -> Suffered | None:
    """rank: as errors name it; -1: unknown. None: the error does not say that others are the cause, or that ranks wait
    for each other; or no frame is the user's."""
    above = traceback[: _error_at(traceback)]
    frames = [(at, found) for at, line in enumerate(above) if (found := _FRAME.match(line))]
    own = [(at, found) for at, found in frames if not _LIBRARY.search(found[1])]
    said = exception_line(traceback) or ""
    plain = _QUOTED.sub(lambda quoted: "x" * len(quoted[0]), said)
    begins = _NAMED.search(plain) or CIRCLE.search(plain)
    if rank < 0 or not own or begins is None or _EVEN.search(plain) or rank in root_cause_ranks(said):
        return None
    ends = _NEXT_SENTENCE.search(plain, begins.start())  # advice follows, for the rank that the error names
    in_job = _IN_JOB.search(plain, ends.end()) if ends else None
    places, before = [], ""
    for path, line, function in (found.groups() for _, found in own):
        places.append(f"{'' if path == before else path}:{line} in {function}")
        before = path
    source = next(iter(above[own[-1][0] + 1 :]), "").strip()
    return Suffered(
        said[: begins.start()],
        said[begins.start() : ends.start() + 1 if ends else None] + (f" ({in_job[0]})" if in_job else ""),
        ", ".join(places) + (f": {source}" if source and not _FRAME.match(f"  {source}") else ""),
    )


def text_of_exception(lines: Sequence[str]) -> str:
    """The last exception of a traceback, with the further lines of its text."""
    lines = _of_group(lines)
    at = _error_at(lines)
    return "" if at is None else "\n".join(lines[at:])


def root_cause_ranks(text: str) -> list[int]:
    """The ranks that an error's text is about: who differs, is late, or was lost. Empty: nobody is named, or ranks wait
    for each other, or none of those that differ is the odd one."""
    plain = _QUOTED.sub("''", text)
    stalls = _STALLED.findall(plain)
    if stalls:
        late = {rank for missing, _ in stalls for rank in _ranks(missing)}
        ready = {rank for _, present in stalls for rank in _ranks(present)}
        return sorted(late - ready)
    found = None if _EVEN.search(plain) else _NAMED.search(plain)
    in_job: dict[str, str] = dict(_IN_JOB.findall(plain))
    return [int(in_job.get(found.group(1), found.group(1)))] if found else []


def _ranks(text: str) -> list[int]:
    """`0,2-4` -> [0, 2, 3, 4]"""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks
