"""How the job's secret comes to a worker: as an argument of its actor, and from there into memory without a name.

It is in no environment: init() reads it from the descriptor that HOROCLONE_SECRET_FD names, which no child inherits.
"""

from __future__ import annotations

import os
import secrets

SECRET_BYTES = 32


def draw() -> bytes:
    """A new one."""
    return secrets.token_hex(SECRET_BYTES).encode()


def keep(secret: bytes) -> None:
    """In this process: init() finds it from now on. It replaces the one of an earlier job."""
    descriptor = os.memfd_create("horoclone-secret", os.MFD_CLOEXEC)
    os.write(descriptor, secret)
    before = os.environ.get("HOROCLONE_SECRET_FD", "")
    os.environ["HOROCLONE_SECRET_FD"] = str(descriptor)
    if before.isdigit():
        try:
            os.close(int(before))
        except OSError:
            pass


def share_secret() -> None:
    """Gives the workers of a Ray Train job a common secret; every worker calls it before hvd.init() where there are
    several nodes.

    Rank 0 draws it and Ray Train (v2) carries it to the others. On one node, and in the workers of a RayExecutor,
    init() needs no such call. RuntimeError outside of a worker of Ray Train.
    """
    try:
        from ray.train.collective import broadcast_from_rank_zero
    except ImportError as error:
        raise RuntimeError(
            f"share_secret() needs Ray Train v2: pip install 'ray[train]' ({error})"
        ) from error
    from ray.train import get_context

    own = draw().decode() if get_context().get_world_rank() == 0 else None
    keep(str(broadcast_from_rank_zero(own)).encode())
