"""The error texts of checkpoints. Imports nothing of ours."""

from __future__ import annotations

import errno

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


class CheckpointError(RuntimeError):
    """Raised when a save or a load has failed. No rank is lost by it, so elastic.run does not catch it."""


class WorldOver(CheckpointError):
    """The generation in which a save began has ended before the save."""


class NothingSaved(CheckpointError, LookupError):
    """Raised when there is no complete save in the directory, or none with the number that was asked for."""


def failure_text(rank: int, doing: str, error: BaseException) -> str:
    """One sentence on what a rank could not do, and one on what to do next."""
    text = f"rank {rank} could not {doing}: {type(error).__name__}: {error}"
    if not isinstance(error, OSError):
        return text + "."
    if error.errno in _NO_ROOM:
        return (
            text + ". Free room there, raise the quota or limit of file sizes, or keep fewer saves (keep=)."
        )
    if error.errno in _NOT_ALLOWED:
        return text + ". Choose a directory that every rank may write to."
    return text + ". Look whether the file system is mounted and answers on that machine."
