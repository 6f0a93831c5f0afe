"""One PMIx client that lives for one exchange: run as a program by pmix.py, with nothing but the standard library.

A process of its own, as Open MPI 5 skips PMIx_Init in MPI_Init where PMIx is up already, and then fails ("local rank:
Not found"), or crashes in MPI_Finalize where PMIx was up and finalised. Here the rank itself stays untouched, a wrong
guess about the library cannot crash it, and a call that hangs can be killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from typing import Any

VERSIONS = range(3, 7)  # major versions whose pmix_value_t and pmix_info_t are laid out as below
GLOBAL = 3  # pmix_scope_t: for every process of the job
BOOL, STRING, INT, UINT32 = 1, 3, 6, 14  # pmix_data_type_t
WILDCARD = 2**32 - 2  # pmix_rank_t: the job as a whole
TIMEOUT, NOT_FOUND = -24, -46  # pmix_status_t: not there yet
CHUNK = 2000  # characters in one value; the library compresses longer ones into another type
MAX_PARTS = 20
OPEN_S = 20  # after which a server that does not let us in ends this process (SIGALRM)
SLICE_S = 5  # longest single PMIx_Get
PAUSE_S = 0.05
PR_SET_PDEATHSIG = 1


class Proc(ctypes.Structure):
    """pmix_proc_t."""

    _fields_ = [("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class Value(ctypes.Structure):
    """pmix_value_t. Its union starts at byte 8; the largest member has three words."""

    _fields_ = [("type", ctypes.c_uint16), ("data", ctypes.c_uint64 * 3)]


class Info(ctypes.Structure):
    """pmix_info_t."""

    _fields_ = [("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", Value)]


class Unusable(Exception):
    """PMIx cannot be used here; nothing has been published."""


class Late(Exception):
    """The value was not there before the deadline."""


class Library:
    """libpmix.so.2. Unusable when it cannot be loaded or is of a version that nobody has looked at."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            self._library.PMIx_Get_version.restype = ctypes.c_char_p
            self._library.PMIx_Error_string.restype = ctypes.c_char_p
            self.version = self._library.PMIx_Get_version().decode(errors="replace").split(" (")[0]
        except (OSError, AttributeError) as error:
            raise Unusable(f"{path} cannot be loaded: {error}") from error
        found = re.search(r"PMIx (\d+)\.", self.version)
        if found is None or int(found[1]) not in VERSIONS:
            raise Unusable(f"{path} is {self.version!r}; known are versions {VERSIONS[0]} to {VERSIONS[-1]}")

    def call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*arguments))

    def text(self, status: int) -> str:
        return f"{self._library.PMIx_Error_string(status).decode(errors='replace')} ({status})"


class Client:
    """This rank's connection to the launcher's PMIx server, between open() and close()."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._me = Proc()

    def open(self, nspace: str, rank: int, size: int) -> None:
        """Connects, and finds out whether the structures are what we take them for. Unusable if anything is off."""
        # Larger than a pmix_proc_t of any version: a wrong layout shall be seen, not felt.
        room = ctypes.create_string_buffer(4096)
        self._check("PMIx_Init", self._library.call("PMIx_Init", room, None, ctypes.c_size_t(0)))
        self._me = Proc.from_buffer(room)
        try:
            if (self._me.nspace.decode(errors="replace"), self._me.rank) != (nspace, rank):
                raise Unusable(
                    f"PMIx says that this is rank {self._me.rank} of {self._me.nspace!r}, not {rank} of {nspace!r}"
                )
            job = self._get(WILDCARD, "pmix.job.size", SLICE_S)
            if (job.type, job.data[0] & 0xFFFFFFFF) != (UINT32, size):
                raise Unusable(f"PMIx says size {job.data[0]} (type {job.type}), not {size}")
            word = os.urandom(20).hex()
            self._put("horoclone-self-test", word)
            if self._string(rank, "horoclone-self-test", SLICE_S) != word:
                raise Unusable("PMIx_Get returned something else than PMIx_Put was given")
        except (Unusable, Late) as error:
            self.close()
            raise Unusable(str(error)) from error

    def close(self) -> None:
        """The launcher would take an end without this for a crash of the rank."""
        self._library.call("PMIx_Finalize", None, ctypes.c_size_t(0))

    def publish(self, key: str, text: str) -> None:
        parts = [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]
        for number, part in enumerate(parts):
            self._put(f"{key}-{number}", part)
        self._put(f"{key}-n", str(len(parts)))
        self._check("PMIx_Commit", self._library.call("PMIx_Commit"))

    def fence(self) -> None:
        """Waits for every rank's fence, without a limit of its own; what was published before is then at hand.

        PMIx_Get alone is not enough: where MPI was up before, other hosts have rank 0's older keys and ask no more.
        """
        collect = Info(b"pmix.collect", 0, Value(BOOL, (1, 0, 0)))
        arguments = None, ctypes.c_size_t(0), ctypes.byref(collect), ctypes.c_size_t(1)
        self._check("PMIx_Fence", self._library.call("PMIx_Fence", *arguments))

    def fetch(self, rank: int, key: str, deadline: float) -> str:
        """What that rank has published, or will have before the deadline (time.monotonic()); else Late."""
        count = int(self._wait(rank, f"{key}-n", deadline))
        if not 0 < count <= MAX_PARTS:
            raise Unusable(f"rank {rank} has published {count} parts")
        return "".join(self._wait(rank, f"{key}-{number}", deadline) for number in range(count))

    def _wait(self, rank: int, key: str, deadline: float) -> str:
        while True:
            try:
                return self._string(rank, key, deadline - time.monotonic())
            except Late:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(PAUSE_S)  # it may have been refused at once: the rank has published other keys

    def _put(self, key: str, text: str) -> None:
        buffer = ctypes.create_string_buffer(text.encode("ascii"))
        value = Value(STRING, (ctypes.addressof(buffer), 0, 0))
        arguments = ctypes.c_uint8(GLOBAL), key.encode(), ctypes.byref(value)
        self._check("PMIx_Put", self._library.call("PMIx_Put", *arguments))

    def _string(self, rank: int, key: str, limit_s: float) -> str:
        value = self._get(rank, key, limit_s)
        if value.type != STRING:
            raise Unusable(f"PMIx_Get returned type {value.type} for {key!r}, not a string")
        return ctypes.string_at(value.data[0]).decode("ascii", errors="replace")

    def _get(self, rank: int, key: str, limit_s: float) -> Value:
        # What it returns stays allocated: freeing is spelled differently by each version, and we end soon.
        result = ctypes.POINTER(Value)()
        seconds = max(1, min(SLICE_S, round(limit_s)))  # whole seconds; 0 would be for ever
        limit = Info(b"pmix.timeout", 0, Value(INT, (seconds, 0, 0)))
        name = Proc(self._me.nspace, rank)
        arguments = ctypes.byref(name), key.encode(), ctypes.byref(limit), ctypes.c_size_t(1)
        status = self._library.call("PMIx_Get", *arguments, ctypes.byref(result))
        if status in (TIMEOUT, NOT_FOUND):
            raise Late(f"rank {rank} has not published {key!r}" if rank != WILDCARD else f"no {key!r}")
        self._check(f"PMIx_Get of {key!r}", status)
        return result.contents

    def _check(self, what: str, status: int) -> None:
        if status != 0:
            raise Unusable(f"{what}: {self._library.text(status)}")


def exchange(library: Library, key: str, rank: int, size: int, limit_s: float) -> str:
    """Rank 0 publishes the line on its standard input; every rank returns it."""
    deadline = time.monotonic() + limit_s
    text = sys.stdin.readline().strip() if rank == 0 else ""
    client = Client(library)
    signal.alarm(OPEN_S)
    client.open(os.environ["PMIX_NAMESPACE"], rank, size)
    signal.alarm(0)
    try:
        if rank == 0:
            client.publish(key, text)
        client.fence()
        return text if rank == 0 else client.fetch(0, key, deadline)
    finally:
        client.close()


def main(arguments: list[str]) -> int:
    """LIBRARY PARENT [KEY RANK SIZE SECONDS]; answers with one line: ok, unusable or late, and what belongs to it."""
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints is not the answer
    path, parent, *rest = arguments
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return 1
    try:
        library = Library(path)
        if rest:
            line = f"ok {exchange(library, rest[0], int(rest[1]), int(rest[2]), float(rest[3]))}"
        else:
            line = f"ok {library.version}"
    except Unusable as error:
        line = f"unusable {error}"
    except Late as error:
        line = f"late {error}"
    os.write(answer, line.replace("\n", " ").encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
