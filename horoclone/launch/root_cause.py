"""Root causes: which ranks the text of an error names, in the forms in which the runtime names them. Pure functions.

The words come from csrc/agreement/mismatch.cc (who announced what), csrc/engine/watch (who is late), Mesh::describe
("rank 3 (node-b, pid 812)") and runtime/exit_hooks.py ("rank 3 raised ValueError: ...").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_EXCEPTION = re.compile(r"^((?:\w+\.)*[A-Za-z_]\w*)(?::\s|$)")
_QUOTED = re.compile(r"'[^'\n]*'")  # names of tensors are the user's words
_STALLED = re.compile(r"\(\d+ s\): missing ranks? ([\d,-]+)(?:; ready ranks? ([\d,-]+))?")
_NAMED = re.compile(
    r"\brank (\d+) (?:\([^()\n]*, pid \d+\)|announced |raised |failed before |was killed by |was interrupted "
    r"|ended with exit code |has died or left)"
)


def exception_line(lines: Sequence[str]) -> str | None:
    """`ValueError: bad batch 17` of a traceback. Where the text goes on after a colon, as TensorFlow's `Graph execution
    error:` does, what it says is in its last line that is not indented."""
    at = next((i for i in range(len(lines) - 1, -1, -1) if _EXCEPTION.match(lines[i])), None)
    if at is None:
        return None
    line = lines[at].strip()
    if not line.endswith(":"):
        return line
    rest = [one.strip() for one in lines[at + 1 :] if one[:1].strip()]
    return f"{line} {rest[-1]}" if rest else line


def exception_name(line: str | None) -> str:
    """`Mismatch` of `horoclone.errors.Mismatch: ...`; empty when there is no exception."""
    match = _EXCEPTION.match(line or "")
    return match.group(1).rpartition(".")[2] if match else ""


def text_of_exception(lines: Sequence[str]) -> str:
    """The last exception of a traceback, with the further lines of its text."""
    starts = [index for index, line in enumerate(lines) if _EXCEPTION.match(line)]
    return "\n".join(lines[starts[-1] :]) if starts else ""


def root_cause_ranks(text: str) -> list[int]:
    """The ranks that an error's text is about: who differs, is late, or was lost. Empty: nobody is named, or ranks wait
    for each other."""
    plain = _QUOTED.sub("''", text)
    stalls = _STALLED.findall(plain)
    if stalls:
        late = {rank for missing, _ in stalls for rank in _ranks(missing)}
        ready = {rank for _, present in stalls for rank in _ranks(present)}
        return sorted(late - ready)
    found = _NAMED.search(plain)
    return [int(found.group(1))] if found else []


def _ranks(text: str) -> list[int]:
    """`0,2-4` -> [0, 2, 3, 4]"""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks
