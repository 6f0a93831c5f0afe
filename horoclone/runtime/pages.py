"""Puts this rank's measurements where others can read them: into the launcher's book, or into a folder of the user.

Where neither can be, they stay in this process, and nothing is said: the job is not disturbed. Thread: that of init().
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from horoclone import errors
from horoclone.live import book, folder, page
from horoclone.live.processes import own_mark
from horoclone.runtime.native_module import bytes_of

if TYPE_CHECKING:
    from horoclone._core import Runtime
    from horoclone.bootstrap.exchange import Job


class _Place(NamedTuple):
    """Where the page of this process lies, for all its lives. path: of its own file, "" in a book."""

    descriptor: int
    offset: int
    path: str
    pid: int


_place: _Place | None = None
_PROGRAM_CHARACTERS = 64


def share(runtime: Runtime, job: Job, environ: Mapping[str, str]) -> None:
    """From now on the page of this runtime, which is not connected yet, can be read by others. Never raises."""
    global _place
    if _place is None or _place.pid != os.getpid():
        _place = _in_book(environ) or _in_folder(job, environ)
    if _place is not None:
        try:
            runtime.share_page(_place.descriptor, _place.offset, bytes_of(program()))
        except (errors.HorovodInternalError, ValueError):
            _place = None


def program() -> str:
    """What runs in this process, as pages call it: the script's name and arguments."""
    words = [os.path.basename(sys.argv[0]) or "python", *sys.argv[1:]] if sys.argv else ["python"]
    return " ".join(words)[:_PROGRAM_CHARACTERS]


def _in_book(environ: Mapping[str, str]) -> _Place | None:
    """The launcher's, whose descriptor this process has inherited; another process of the rank may not have it."""
    descriptor, _, offset = environ.get("HOROCLONE_PAGE", "").partition(":")
    try:
        number, at = int(descriptor), int(offset)
        if os.readlink(f"/proc/self/fd/{number}") != f"/memfd:{book.NAME} (deleted)":
            return None
        os.set_inheritable(number, False)  # nothing that this process starts has a use for it
        return _Place(number, at, "", os.getpid())
    except (OSError, ValueError):
        return None


def _in_folder(job: Job, environ: Mapping[str, str]) -> _Place | None:
    origin = page.Origin(job.rank, job.size, 0, socket.gethostname(), program(), own_mark())
    created = folder.create(environ, folder.job_id(job.name), page.initial(origin))
    if created is None:
        return None
    descriptor, path = created
    place = _Place(descriptor, 0, path, os.getpid())
    atexit.register(_remove, place)
    return place


def _remove(place: _Place) -> None:
    if place.pid == os.getpid():  # not a forked child
        folder.remove(place.path)
