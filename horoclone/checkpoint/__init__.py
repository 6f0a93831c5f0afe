"""Checkpoints that all ranks write while training goes on: `hvd.checkpoint.save`, `load` (docs/checkpoints.md).

No framework is imported here. Thread: save() and wait() from one thread, load() from any.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from horoclone.checkpoint.agreement import World
from horoclone.checkpoint.failures import CheckpointError, NothingSaved
from horoclone.checkpoint.files import saves
from horoclone.checkpoint.loading import Pieces, load
from horoclone.checkpoint.saving import Save
from horoclone.owned import Owned
from horoclone.runtime.current import say
from horoclone.runtime.native_module import core

__all__ = ["CheckpointError", "NothingSaved", "Owned", "Pieces", "load", "save", "saves", "wait"]

_under_way: Save | None = None
_watches_exit = False


def save(
    path: str | os.PathLike[str], state: Any, *, async_: bool = True, keep: int = 3, timeout_s: float = 600.0
) -> None:
    """Saves a state as a new directory below `path`, of which the `keep` newest stay. All ranks call it together.

    state: dicts, lists, tuples, numbers, strings, bools, None, and arrays of NumPy and of the frameworks whose binding
    is imported, nested as you like. It is the same on every rank, and each array is written by one of them; of numbers
    and strings rank 0's are kept. What only this rank has is wrapped in Owned. path: on storage that all ranks share.

    It returns when this rank's part is copied; a thread writes it. async_=False: when the save is complete. A save
    that is still under way is waited for first, at most until `timeout_s` seconds after its own call.

    CheckpointError, on every rank, when this save (async_=False) or the one before has failed: a full disk, a directory
    that cannot be written, states that differ, a rank that has not come in time. TypeError for a value that cannot be
    saved. HorovodInternalError when a rank was lost; the save before stays what load() finds.
    """
    global _under_way, _watches_exit
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1 save is kept")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: seconds, more than 0")
    wait()
    this = Save(Path(os.path.abspath(path)), state, keep, timeout_s, World())
    if not _watches_exit:
        _watches_exit = True
        atexit.register(_at_exit)
    _under_way = this
    this.start()
    if this.cannot is not None:
        cannot = this.cannot
        this.wait()
        _under_way = None
        raise cannot
    if not async_:
        wait()


def wait() -> Path | None:
    """Waits for the save that is under way and returns its directory, or None where there is none. Raises what it
    failed with.

    Call it before hvd.shutdown(). The end of the process waits as well, and prints what went wrong: its exit code is 1.
    """
    global _under_way
    last, _under_way = _under_way, None
    if last is None:
        return None
    last.wait()
    if last.error is None:
        return last.place
    if last.ended_with_its_generation():
        say(f"a checkpoint was given up with the generation that it began in: {last.error}")
        return None
    raise last.error


def _at_exit() -> None:
    try:
        wait()
    except BaseException as error:
        say(f"the last checkpoint has failed: {error}")
        core().fail_at_exit()
