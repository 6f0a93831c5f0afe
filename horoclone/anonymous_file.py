"""A file without a name: in memory, or, where a sandbox forbids memfd_create(), unlinked in the temporary directory."""

from __future__ import annotations

import errno
import os
import tempfile


def anonymous_file(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """A descriptor to write and read. name: what /proc shows. OSError where no descriptor or no file can be had."""
    try:
        return os.memfd_create(name, flags)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
            raise
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
