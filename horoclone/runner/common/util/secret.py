"""Under Horovod's name: keys, and digests that prove their possession (HMAC-SHA-256)."""

from __future__ import annotations

import hashlib
import hmac
import secrets

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"
DIGEST_LENGTH = 32  # bytes


def make_secret_key() -> bytes:
    """32 random bytes."""
    return secrets.token_bytes(32)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """DIGEST_LENGTH bytes that only an owner of the key can make for this message."""
    return hmac.new(key, message, hashlib.sha256).digest()


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether an owner of the key has made the digest for this message; takes the same time either way."""
    return hmac.compare_digest(compute_digest(key, message), digest)
