"""Keyed digests of what travels between processes of a job and is unpickled at its end, or decides about the job.

A connection's handshake proves who is at its ends, and nothing protects what comes after it: whoever is on the way
could put bytes of their own in its place. Only who knows the job's secret can make a digest. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any

TAG_BYTES = 16


def tag_of(secret: bytes, context: str, parts: Iterable[Any]) -> bytes:
    """Of bytes or buffers. context: for what they are, so that they count for nothing else, and for no other time."""
    key = hashlib.sha256(b"horoclone digests\0" + secret).digest()
    made = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
    for part in (context.encode(), *parts):
        view = memoryview(part).cast("B")
        made.update(view.nbytes.to_bytes(8, "little"))
        made.update(view)  # a large one without the GIL
    return made.digest()


def is_right(tag: Any, secret: bytes, context: str, parts: Iterable[Any]) -> bool:
    """Whether that is the digest of these parts."""
    return hmac.compare_digest(bytes(tag), tag_of(secret, context, parts))


def broken(what: str) -> str:
    """The text of the error: nothing of it was unpickled."""
    return (
        f"{what} was changed on its way: its digest is not one that a rank of this job makes, so it was not unpickled. "
        "Somebody on the network between the hosts is in the stream, or a network device damages it; see SECURITY.md"
    )
