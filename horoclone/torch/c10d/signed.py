"""Signed values through torch's store, to which everybody on the network may write.

Every value carries a signature made with the job's secret, and all members confirm what they have read before any of
them goes on: if an unauthenticated peer has written, all members raise, and none waits for one that has given up.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import hmac
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from horoclone.bootstrap.exchange import WITHOUT_SECRET
from horoclone.errors import HorovodInternalError, Timeout, Unsupported
from horoclone.torch.c10d.lost import Look, store_ended, wait_for_key

WHO = "torch.distributed's backend 'horoclone'"
SIGNATURE_BYTES = 32
UNSIGNED = b"-" * SIGNATURE_BYTES
REFUSED = b"refused"
SAY_AFTER_S = 10.0  # who is missing


class SignedStore:
    """A store as one member of a group uses it. Errors: PeerLost from look(), Timeout, and as in exchange().

    A signature holds for its key alone. One that was copied from another group or an older run passes, and leads to a
    peer that then has to prove that it knows the secret: it cannot do more harm than to make connecting fail.
    """

    def __init__(self, store: Any, rank: int, size: int, secret: bytes, deadline: float, look: Look) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._secret, self._deadline, self._look = secret, deadline, look
        self._written: list[str] = []
        self._started = time.monotonic()
        self._has_said = False

    def exchange(
        self, key: str, mine: bytes, is_safe: Callable[[Sequence[bytes]], bool] = lambda values: False
    ) -> list[bytes]:
        """Everybody's value by rank, the same on every rank. is_safe: of these values nothing is believed that the
        kernel would not vouch for, so that they need no signatures.

        Unsupported when there is no secret, HorovodInternalError when somebody has read what is not from this job.
        """
        entries = self._gather(key, mine)
        values = [entry[SIGNATURE_BYTES:] for entry in entries]
        safe = is_safe(values)
        try:
            if not safe:
                self._check(key, entries)
        except HorovodInternalError:
            self._put(f"{key}-read", REFUSED)
            raise
        digest = hashlib.sha256(b"".join(hashlib.sha256(value).digest() for value in values)).digest()
        answers = self._gather(f"{key}-read", digest)
        for rank, answer in enumerate(answers):
            if answer[SIGNATURE_BYTES:] == REFUSED:
                raise HorovodInternalError(
                    f"{WHO}: rank {rank} of the process group has read values in torch's store that are not from this "
                    "job; its own error has more"
                )
            if answer[SIGNATURE_BYTES:] != digest:
                raise HorovodInternalError(
                    f"{WHO}: rank {rank} of the process group has read other values in torch's store than this rank: "
                    "some are not from this job"
                )
        if not safe:
            self._check(f"{key}-read", answers)
        return values

    def forget(self) -> None:
        """Takes our values out again, when everybody has read them: the next process group may meet the same store."""
        for key in self._written:
            try:
                self._store.delete_key(key)
            except (RuntimeError, NotImplementedError):
                pass  # a store that cannot, or that has ended: the group needs it no more

    def _put(self, key: str, value: bytes) -> None:
        key = f"{key}/{self._rank}"
        self._written.append(key)
        try:
            self._store.set(key, self._signature(key, value) + value)
        except RuntimeError as error:
            self._look()
            raise store_ended(error) from error

    def _gather(self, key: str, mine: bytes) -> list[bytes]:
        self._put(key, mine)
        return [self._get(f"{key}/{rank}", rank) for rank in range(self._size)]

    def _get(self, key: str, rank: int) -> bytes:
        subject = key.rpartition("/")[0]

        def look() -> None:
            self._look()
            if not self._has_said and time.monotonic() - self._started >= SAY_AFTER_S:
                self._say_who_is_missing(subject)

        if not wait_for_key(self._store, key, self._deadline, look):
            waited_s = time.monotonic() - self._started
            raise Timeout(
                f"{WHO}: rank {self._rank} of the process group waited {waited_s:.0f} s for all {self._size} ranks; "
                f"{self._missing(subject, rank)}. Look at their logs: have they ended, or not called "
                "init_process_group() or new_group()? HOROCLONE_START_TIMEOUT and timeout= are the limits"
            )
        try:
            return bytes(self._store.get(key))
        except RuntimeError as error:
            self._look()
            raise store_ended(error) from error

    def _say_who_is_missing(self, subject: str) -> None:
        """Once, on stderr, by the first of those who wait."""
        self._has_said = True
        if any(self._store.check([f"{subject}/{rank}"]) for rank in range(self._rank)):
            return
        left_s = max(0.0, self._deadline - time.monotonic())
        print(
            f"horoclone: rank {self._rank} of a process group has waited {SAY_AFTER_S:g} s for all {self._size} ranks; "
            f"{self._missing(subject, -1)}; this ends in {left_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def _missing(self, subject: str, known: int) -> str:
        """Who has written nothing. known: one of them, should the store be unable to tell."""
        try:
            gone = [rank for rank in range(self._size) if not self._store.check([f"{subject}/{rank}"])]
        except RuntimeError:
            gone = []
        gone = gone or [rank for rank in [known] if rank >= 0]
        return f"not there: rank{'s' * (len(gone) != 1)} {', '.join(map(str, gone))}"

    def _signature(self, key: str, value: bytes) -> bytes:
        if not self._secret:
            return UNSIGNED
        return hmac.new(self._secret, b"c10d\0" + key.encode() + b"\0" + value, "sha256").digest()

    def _check(self, key: str, entries: Sequence[bytes]) -> None:
        for rank, entry in enumerate(entries):
            signature, value = entry[:SIGNATURE_BYTES], entry[SIGNATURE_BYTES:]
            if not self._secret or signature == UNSIGNED:
                whose = f"that of rank {rank}" if self._secret else "all"
                raise Unsupported(
                    f"{WHO}: values in torch's store are not signed ({whose}): either {WITHOUT_SECRET}, and call "
                    "hvd.init() before init_process_group(); or they are not from this job."
                )
            if not hmac.compare_digest(signature, self._signature(f"{key}/{rank}", value)):
                raise HorovodInternalError(
                    f"{WHO}: the value of rank {rank} in torch's store is not from this job: it was not signed with "
                    "the job's secret. An unauthenticated peer wrote there, or HOROCLONE_SECRET_FILE differs between "
                    "hosts."
                )
