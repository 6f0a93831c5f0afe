"""The register: the one place where it is decided which server holds which partition, by compare-and-set.

It is a torch TCPStore: torchrun's, or that of `python -m horoclone.ps --register PORT`. Everybody on the network may
write there, so every value is signed with the secret. What an unauthenticated peer has written counts as forgotten, and
is written over by those who know better. Thread: any; each operation ends within its time, and leaves
behind the thread on which the store hangs.

It remembers nothing when it is started again. The servers that live tell it what they know: first the primaries, then,
once it is not new any more, backups whose primary has not come. A server that is started meanwhile begins with empty
tables only when every server has said that it has none of the rows; where nobody has told how many servers there are,
not before the register is not new any more.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from datetime import timedelta
from typing import Any

from horoclone import errors
from horoclone.bootstrap import launchers
from horoclone.bootstrap.detect import torchs_by_us
from horoclone.runtime import current, logs

log = logs.logger("horoclone.ps")

OPERATION_S = 5.0  # for one operation: it is a small message to a server that does nothing else
PAUSE_S = 0.05  # between two looks at a value that somebody else must write; the store has no way to wait for a change
SAY_S = 10.0  # between two words about what stays so for a while
NEW_S = 8.0  # longer than a server that lives takes to find a register that has been away: OPERATION_S, and a pause
FOREIGN_S = 3.0  # for an unauthenticated peer's value to be written over, where it may also be that the secrets differ
STATE = "horoclone-ps-register"  # "new" or "open"; of the register, which has no secret to sign with
NEEDS_SECRET = (
    "servers and workers prove to each other that they know a common secret, and there is none. Put the same random "
    "text (at least 16 bytes) into a file on every host, readable by you only, and pass --secret-file to servers and "
    "secret_file= to workers"
)


class Unreachable(errors.Timeout):
    """The register does not answer."""


def secret_of(file: str | None, environ: Mapping[str, str]) -> bytes:
    """Of the file; else of the environment, or of the job that hvd.init() has joined. Unsupported when there is none.

    A file, since horoclonerun gives each job a secret of its own, and servers and workers may be two jobs.
    """
    if file is not None:
        return launchers.shared_secret({"HOROCLONE_SECRET_FILE": file})
    secret = launchers.shared_secret(environ) or current.job_secret()
    if not secret:
        raise errors.Unsupported(f"parameter server: {NEEDS_SECRET}.")
    return secret


def address_of(store: str | None, environ: Mapping[str, str]) -> tuple[str, int]:
    """(host, port) from "HOST:PORT", or torch's MASTER_ADDR and MASTER_PORT. ValueError for anything else."""
    if store is None and {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys() and not torchs_by_us(environ):
        store = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    if store is None:
        raise ValueError(
            "parameter server: where is the register? Pass store='HOST:PORT' (on the command line: --store), or start "
            "under torchrun. `python -m horoclone.ps --register PORT` runs one."
        )
    host, _, port = store.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"parameter server: the register's address {store!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def serve_store(port: int, new_s: float = NEW_S) -> Any:
    """A store in this process, for as long as the object lives. new_s: 0 where servers cannot be older than it is."""
    from torch.distributed import TCPStore

    store = TCPStore("0.0.0.0", port, None, True, timedelta(seconds=OPERATION_S), wait_for_workers=False)
    store.set(STATE, "new" if new_s else "open")
    if new_s:
        threading.Thread(target=_open, args=(store, new_s), name="hc-ps-open", daemon=True).start()
    return store


def _open(store: Any, new_s: float) -> None:
    """After new_s the register is not new any more. As nobody begins before that, it is tried until it is written."""
    time.sleep(new_s)
    while True:
        try:
            return store.set(STATE, "open")
        except Exception as error:
            log.warning("the register cannot be written: %s", error)
            time.sleep(1.0)


class _Thread:
    """Runs one call after the other. A process that ends does not wait for it, as it would for an executor's."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._work, name="hc-ps-register", daemon=True).start()

    def run(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call, arguments))
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (todo := self._calls.get()) is not None:
            future, call, arguments = todo
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)


def _entry(store: Any, key: str) -> bytes:
    """What is written there; empty where nothing is."""
    return bytes(store.get(key)) if store.check([key]) else b""


class Register:
    """The values of one parameter server. Every method raises Unreachable when the store does not answer in time."""

    def __init__(self, name: str, address: tuple[str, int], secret: bytes) -> None:
        self.name, self.address, self.secret = name, address, secret
        from torch.distributed import (
            TCPStore,  # before any time is counted: it may take longer than an operation
        )

        self._kind = TCPStore
        self._prefix = f"horoclone-ps/{name}/"
        self._store: Any = None
        self._lock = threading.Lock()
        self._thread: _Thread | None = None
        self._is_ours = False  # whether a value was read that was signed with our secret
        self._said = 0.0  # when it was last told that an unauthenticated peer has written

    def get(self, key: str) -> Any:
        """The value, or None where there is none, or one that an unauthenticated peer wrote. HorovodInternalError where
        all that was ever read is signed with another secret: then this process may be the unauthenticated peer."""
        key = self._prefix + key
        until = time.monotonic() + FOREIGN_S
        while True:
            entry = self._do(lambda store: _entry(store, key))
            if not entry:
                return None
            if self._is_signed(key, entry):
                self._is_ours = True
                return json.loads(entry[64:])
            if self._is_ours:
                if time.monotonic() > self._said + SAY_S:
                    log.warning(
                        "an unauthenticated peer has written %r in the register: it counts as forgotten", key
                    )
                    self._said = time.monotonic()
                return None
            if time.monotonic() > until:
                raise errors.HorovodInternalError(
                    f"parameter server {self.name!r}: the register's value {key!r} was not signed with this secret. "
                    "An unauthenticated peer has written there, or servers and workers were given different secrets."
                )
            time.sleep(PAUSE_S)

    def is_new(self) -> bool:
        """Whether it was started so recently that a primary that lives may not have told it yet."""

        def read(store: Any) -> bool:
            return bool(store.check([STATE]) and bytes(store.get(STATE)) == b"new")

        return bool(self._do(read))

    def set(self, key: str, value: Any) -> None:
        """Writes, whatever is there."""
        key = self._prefix + key
        entry = self._written(key, value)
        self._do(lambda store: store.set(key, entry))

    def compare_set(self, key: str, old: Any, new: Any) -> bool:
        """Writes `new` if the value is `old` (None: there is none, or one that an unauthenticated peer wrote); whether
        `new` is there now. It must be a value that nobody else would write."""

        def change(store: Any) -> bytes:
            expected = self._written(key, old) if old is not None else _entry(store, key)
            if old is None and self._is_signed(key, expected):
                return expected
            return bytes(store.compare_set(key, expected, entry))  # bytes: what others write need not be text

        key = self._prefix + key
        entry = self._written(key, new)
        return bool(self._do(change) == entry)

    def wait(self, key: str, until: Callable[[Any], bool], deadline: float, what: str) -> Any:
        """The value as soon as until(value); Timeout, saying `what` has not come, at the deadline (time.monotonic)."""
        while True:
            value = self.get(key)
            if until(value):
                return value
            if time.monotonic() > deadline:
                raise errors.Timeout(f"parameter server {self.name!r}: {what}")
            time.sleep(PAUSE_S)

    def _written(self, key: str, value: Any) -> bytes:
        text = json.dumps(value, sort_keys=True)
        return f"{self._signature(key, text)}{text}".encode()

    def _signature(self, key: str, text: str) -> str:
        return hmac.new(self.secret, f"ps\0{key}\0{text}".encode(), hashlib.sha256).hexdigest()

    def _is_signed(self, key: str, entry: bytes) -> bool:
        signature, text = entry[:64], entry[64:].decode(errors="replace")
        return hmac.compare_digest(signature, self._signature(key, text).encode())

    def _do(self, operation: Callable[[Any], Any]) -> Any:
        """Runs it on a thread that may be left behind, because the store's own calls wait without limit.

        Once more over a new connection where the old one is broken: the register may have been started again meanwhile.
        Each operation may be done twice.
        """
        with self._lock:
            was_connected = self._store is not None
        try:
            return self._try(operation)
        except Unreachable as error:
            if not was_connected or isinstance(error.__cause__, NotInTime):
                raise
            return self._try(operation)

    def _try(self, operation: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self._thread is None:
                self._thread = _Thread()
            thread = self._thread
        future = thread.run(self._call, operation)
        cause: Exception
        try:
            return future.result(OPERATION_S)
        except NotInTime as error:
            why, cause = f"no answer within {OPERATION_S:g} s", error
        except (RuntimeError, OSError) as error:  # torch's DistStoreError among them
            if isinstance(error, errors.HorovodInternalError):
                raise
            why, cause = str(error).splitlines()[0], error
        with self._lock:
            if self._thread is thread:
                self._thread, self._store = None, None
                thread.end()
        host, port = self.address
        raise Unreachable(
            f"parameter server {self.name!r}: the register at {host}:{port} does not answer: {why}"
        ) from cause

    def _call(self, operation: Callable[[Any], Any]) -> Any:
        store = self._store
        if store is None:
            limit = timedelta(seconds=OPERATION_S)
            store = self._kind(*self.address, None, False, limit, wait_for_workers=False)
            self._store = store
        return operation(store)


def open_register(
    name: str,
    store: str | None,
    secret_file: str | None,
    environ: Mapping[str, str] = os.environ,
    secret: bytes | None = None,
) -> Register:
    """The register of the parameter server `name`. ValueError, Unsupported: see address_of and secret_of.

    secret: itself, where the caller was given it in another way than by a file.
    """
    if not name or "/" in name or len(name) > 64:
        raise ValueError(
            f"parameter server: the name {name!r} must have 1 to 64 characters, none of them '/'"
        )
    if secret is not None and len(secret) < 16:
        raise errors.Unsupported(
            f"parameter server {name!r}: the secret has {len(secret)} bytes; {NEEDS_SECRET}."
        )
    return Register(name, address_of(store, environ), secret or secret_of(secret_file, environ))
