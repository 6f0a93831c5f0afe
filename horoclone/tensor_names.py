"""What the tensors of an operation are called on this rank, for errors that have its name and their places alone: ranks
match operations by these, since what tensors are called may differ between them.

The error of a compiled program reaches the user without a way through our code. Its operations are remembered here when
the program is built, and the text is completed where an exception is given its class back, and when one ends the
process. Thread: any.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from horoclone.errors import with_names

KEPT = 1024  # operations, the newest
SHOWN = 3  # names, where the text says nothing of a place

_QUOTED = re.compile(r"'([^'\n]+)'")
_FRAMES = re.compile(r"\n\nAt:\n(?:  .*\(\d+\): .*\n?)+\Z")
_known: dict[str, tuple[str, ...]] = {}  # empty: two programs have other tensors under one name
_lock = threading.Lock()


def remember(operation: str, names: Iterable[str]) -> None:
    """The operation of a program that is being built, and what its tensors are called."""
    found = tuple(names)
    if not any(found):
        return
    with _lock:
        before = _known.pop(operation, found)
        _known[operation] = found if before == found else ()
        if len(_known) > KEPT:
            del _known[next(iter(_known))]


def completed(text: str) -> str:
    """The text of an error with the names of the tensors of operations that it quotes."""
    if re.search(r" tensor \d+ \(", text):
        return text
    for operation in dict.fromkeys(_QUOTED.findall(text)):
        names = _names_of(operation)
        if not names:
            continue
        shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        quoted = f"'{operation}'"
        if (named := with_names(text, names)) != text:
            text = named
        elif f"{quoted} ({shown})" not in text:
            text = text.replace(quoted, f"{quoted} ({shown})", 1)
    return text


def _names_of(operation: str) -> tuple[str, ...]:
    """TensorFlow puts the names of functions in front, where it inlines them."""
    while operation and operation not in _known:
        operation = operation.partition("/")[2]
    return _known.get(operation, ())


def complete(error: BaseException) -> None:
    """Adds the names to the text of an exception, and takes out the frames that pybind11 has put there, which its
    traceback has as well."""
    _change(error, lambda text: completed(_FRAMES.sub("", text)))


@contextmanager
def called(names: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Around an operation that is run at once: its errors say what its tensors are called."""
    try:
        yield
    except Exception as error:
        _change(error, lambda text: with_names(text, names()))
        raise


def _change(error: BaseException, change: Callable[[str], str]) -> None:
    """Best effort: the class may be the user's, and what goes wrong here must not take the error's place."""
    with suppress(Exception):
        message = getattr(error, "_message", None)  # TensorFlow's errors
        if isinstance(message, str):
            if (text := change(message)) != message:
                error._message = text  # type: ignore[attr-defined]
        elif (
            error.args and isinstance(error.args[0], str) and (text := change(error.args[0])) != error.args[0]
        ):
            error.args = (text, *error.args[1:])
            if type(error).__module__ == "jax.errors":  # which have it elsewhere, too
                error.__init__(text)  # type: ignore[misc]
