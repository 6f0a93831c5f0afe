"""Which members of a process group are dead, and which have not called: for errors, and for waits in torch's store.

A store does not notice that the rank which was to write has died. The open process groups know, so they are asked.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError

from horoclone.errors import HorovodInternalError, PeerLost
from horoclone.ops import BARRIER
from horoclone.torch.operations import requests

if TYPE_CHECKING:
    from horoclone._core import Runtime

Look = Callable[[], None]  # raises PeerLost when it is of no use to wait any longer

LOOK_EVERY_S = 1.0  # torch's store says on stderr each time that it has waited


def failure_of(runtime: Runtime) -> HorovodInternalError | None:
    """Why the runtime has failed; None when it has not."""
    if "failed: " not in runtime.describe():
        return None
    try:
        runtime.wait(requests.submit(runtime, BARRIER))
    except HorovodInternalError as error:
        return error
    return None


def look_for(members: Sequence[int], open_groups: Iterable[Any]) -> Look:
    """members: ranks of the job. Finds those that one of these groups (HorocloneGroup) has lost."""
    groups = list(open_groups)

    def look() -> None:
        for group in groups:
            if group._runtime is None or not set(members) & set(group._members):
                continue
            error = failure_of(group._runtime)
            lost = error.rank if isinstance(error, PeerLost) else -1
            if 0 <= lost < len(group._members) and group._members[lost] in members:
                rank = group._members[lost]
                raise PeerLost(
                    f"rank {rank} of the job is needed here and is lost: {error}", members.index(rank)
                )

    return look


def wait_for_key(store: Any, key: str, deadline: float, look: Look) -> bool:
    """Whether the key came before the deadline (time.monotonic()). PeerLost from look(), or when the store ends."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            if left_s <= 0:
                return bool(store.check([key]))  # some stores wait for at least a second
            store.wait([key], timedelta(seconds=min(LOOK_EVERY_S, max(0.001, left_s))))
            return True
        except DistNetworkError as error:
            look()
            raise store_ended(error) from error
        except RuntimeError:  # DistStoreError for a time-out
            look()


def store_ended(error: Exception) -> PeerLost:
    return PeerLost(f"torch's store has ended, and with it rank 0 or the launcher: {error}", 0)


def who_is_late(runtime: Runtime, rank: int, size: int) -> str:
    """Which ranks have not called what this rank waits for, as text; empty when this rank cannot know. Never waits."""
    text = runtime.describe()
    if "not agreed yet" not in text:
        return "every rank has called it" if ", in batch " in text else ""
    if size == 2:
        return f"rank {1 - rank} has not called it"
    # Only rank 0 keeps the list; the first is the oldest
    missing = re.search(r" misses ranks((?: \d+)+)", text)
    if missing is None:
        return ""
    late = missing[1].split()
    return f"rank{'s' * (len(late) > 1)} {', '.join(late)} ha{'ve' if len(late) > 1 else 's'} not called it"


def in_words_of_the_job(error: BaseException, members: Sequence[int]) -> BaseException:
    """The runtime counts ranks within the group: adds the numbers in the job of who was lost or announced something
    else, where they are others (launch/root_cause.py reads them)."""
    announced = re.findall(r"\brank (\d+) announced ", re.sub(r"'[^'\n]*'", "", str(error)))
    named = [error.rank] if isinstance(error, PeerLost) else sorted({int(rank) for rank in announced})
    others = [rank for rank in named if 0 <= rank < len(members) and members[rank] != rank]
    if others:
        words = (f"rank {rank} of the process group is rank {members[rank]} of the job" for rank in others)
        error.args = (f"{error} ({', '.join(words)})", *error.args[1:])
    return error
