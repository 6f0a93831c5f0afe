"""One PMIx client that lives for one exchange: run as a program by pmix.py, with nothing but the standard library.

A process of its own, as Open MPI 5 skips PMIx_Init in MPI_Init where PMIx is up already, and then fails ("local rank:
Not found"), or crashes in MPI_Finalize where PMIx was up and finalised. Here the rank itself stays untouched, a wrong
guess about the library cannot crash it, and a call that hangs can be killed.

Rank 0's value goes through the launcher's store (PMIx_Publish, PMIx_Lookup), which needs no rank but the one that asks.
PMIx_Fence of OpenPMIx 5.0 let the others pass without rank 0 in about 1 of 200 jobs that exchanged twice on a busy
machine, as if the client that had finalised before were lost; rank 0 then waited for ever, or had PARTIAL_SUCCESS.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from typing import Any

VERSIONS = range(3, 7)  # major versions whose structures are laid out as below
STRING, INT, UINT32, PERSISTENCE, DATA_RANGE = 3, 6, 14, 30, 33  # pmix_data_type_t
TO_OUR_JOB = 3  # pmix_data_range_t: PMIX_RANGE_NAMESPACE
WHILE_THE_JOB_RUNS = 3  # pmix_persistence_t: PMIX_PERSIST_APP
WILDCARD = 2**32 - 2  # pmix_rank_t: the job as a whole
NOT_FOUND = -46  # pmix_status_t
CHUNK = 2000  # characters in one value
MAX_PARTS = 20
OPEN_S = 20  # after which a server that does not let us in, or store anything, ends this process (SIGALRM)
GET_S = 5
PAUSES_S = 0.02, 0.5  # between two looks for rank 0's value: the first pause, and the longest
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


class Data(ctypes.Structure):
    """pmix_pdata_t."""

    _fields_ = [("proc", Proc), ("key", ctypes.c_char * 512), ("value", Value)]


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
            job = self._of_job("pmix.job.size")
            if (job.type, job.data[0] & 0xFFFFFFFF) != (UINT32, size):
                raise Unusable(f"PMIx says size {job.data[0]} (type {job.type}), not {size}")
        except Unusable:
            self.close()
            raise

    def close(self) -> None:
        """The launcher would take an end without this for a crash of the rank."""
        self._library.call("PMIx_Finalize", None, ctypes.c_size_t(0))

    def publish(self, key: str, text: str) -> None:
        """Stores the text, instead of an older one, with the launcher: for our job, as long as it runs."""
        parts = [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)]
        entries = {f"{key}-{number}": part for number, part in enumerate(parts)}
        entries[f"{key}-n"] = str(len(parts))
        words = [ctypes.create_string_buffer(one.encode("ascii")) for one in entries.values()]
        infos = (Info * (2 + len(words)))(
            Info(b"pmix.range", 0, Value(DATA_RANGE, (TO_OUR_JOB, 0, 0))),
            Info(b"pmix.persist", 0, Value(PERSISTENCE, (WHILE_THE_JOB_RUNS, 0, 0))),
            *(
                Info(name.encode("ascii"), 0, Value(STRING, (ctypes.addressof(word), 0, 0)))
                for name, word in zip(entries, words, strict=True)
            ),
        )
        # PRRTE 3 would keep both, and give out the older one.
        names = (ctypes.c_char_p * (len(entries) + 1))(*(name.encode("ascii") for name in entries), None)
        status = self._library.call("PMIx_Unpublish", names, infos, ctypes.c_size_t(1))
        if status != NOT_FOUND:
            self._check("PMIx_Unpublish", status)
        self._check("PMIx_Publish", self._library.call("PMIx_Publish", infos, ctypes.c_size_t(len(infos))))

    def fetch(self, rank: int, key: str) -> str | None:
        """What that rank has published under the key; None when it has not."""
        said = self._published(rank, f"{key}-n")
        if said is None:
            return None
        if not said.isdecimal() or not 0 < int(said) <= MAX_PARTS:
            raise Unusable(f"rank {rank} has published {said!r} parts")
        parts = [self._published(rank, f"{key}-{number}") for number in range(int(said))]
        if None in parts:
            raise Unusable(f"rank {rank} has published parts of {key!r} only")
        return "".join(part for part in parts if part is not None)

    def life(self, rank: int) -> int:
        """How many exchanges that rank has finished since the launcher started it, whichever programs made them."""
        said = self._published(rank, f"horoclone-lives-{rank}-0") or "0"
        if not said.isdecimal():
            raise Unusable(f"PMIx_Lookup returned {said!r} for the number of exchanges of rank {rank}")
        return int(said)

    def finish_life(self, rank: int, life: int) -> None:
        """One more, of this rank. Meanwhile life() may see none: it looks at one part only, and takes that for 0."""
        self.publish(f"horoclone-lives-{rank}", str(life + 1))

    def _published(self, rank: int, key: str) -> str | None:
        room = ctypes.create_string_buffer(4096)  # as in open()
        data = Data.from_buffer(room)
        data.key = key.encode("ascii")
        where = Info(b"pmix.range", 0, Value(DATA_RANGE, (TO_OUR_JOB, 0, 0)))
        arguments = room, ctypes.c_size_t(1), ctypes.byref(where), ctypes.c_size_t(1)
        status = self._library.call("PMIx_Lookup", *arguments)
        if status == NOT_FOUND:
            return None
        self._check(f"PMIx_Lookup of {key!r}", status)
        owner = data.proc.nspace, data.proc.rank
        if (*owner, data.value.type) != (self._me.nspace, rank, STRING):
            raise Unusable(f"PMIx_Lookup of {key!r} returned type {data.value.type} of rank {owner[1]}")
        return ctypes.string_at(data.value.data[0]).decode("ascii", errors="replace")

    def _of_job(self, key: str) -> Value:
        # What it returns stays allocated: freeing is spelled differently by each version, and we end soon.
        result = ctypes.POINTER(Value)()
        limit = Info(b"pmix.timeout", 0, Value(INT, (GET_S, 0, 0)))
        name = Proc(self._me.nspace, WILDCARD)
        arguments = ctypes.byref(name), key.encode(), ctypes.byref(limit), ctypes.c_size_t(1)
        self._check(f"PMIx_Get of {key!r}", self._library.call("PMIx_Get", *arguments, ctypes.byref(result)))
        return result.contents

    def _check(self, what: str, status: int) -> None:
        if status != 0:
            raise Unusable(f"{what}: {self._library.text(status)}")


def exchange(library: Library, rank: int, size: int, limit_s: float) -> str:
    """Rank 0 publishes the line on its standard input; every rank returns it.

    Values are numbered, through all programs that the launcher runs one after the other, so that what an earlier one
    has left is not taken for what rank 0 is about to publish. Between two exchanges all ranks have gathered.
    Unusable on rank 0: no rank has received anything. Another rank where it is unusable is missed at the rendezvous.
    """
    deadline = time.monotonic() + limit_s
    text = sys.stdin.readline().strip() if rank == 0 else ""
    client = Client(library)
    signal.alarm(OPEN_S)
    client.open(os.environ["PMIX_NAMESPACE"], rank, size)
    try:
        life = client.life(rank)
        if rank != 0:
            signal.alarm(0)
            return _await(client, rank, life, deadline)
        # All that could fail comes before the value, on which the others rely at once.
        client.publish("horoclone-test", text)
        if client.fetch(0, "horoclone-test") != text:
            raise Unusable("PMIx_Lookup returned something else than PMIx_Publish was given")
        client.finish_life(0, life)
        signal.alarm(0)
        client.publish(f"horoclone-{life}", text)
        return text
    finally:
        client.close()


def _await(client: Client, rank: int, life: int, deadline: float) -> str:
    pause_s, longest_s = PAUSES_S
    while True:
        # A rank that gave up before rank 0 came lags behind: the newest is right.
        life = max(life, client.life(0) - 1)
        text = client.fetch(0, f"horoclone-{life}")
        if text is not None:
            client.finish_life(rank, life)
            return text
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise Late("rank 0 has not published its address")
        time.sleep(min(pause_s, left_s))
        pause_s = min(1.5 * pause_s, longest_s)


def main(arguments: list[str]) -> int:
    """LIBRARY PARENT [RANK SIZE SECONDS]; answers with one line: ok, unusable or late, and what belongs to it."""
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints is not the answer
    path, parent, *rest = arguments
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return 1
    try:
        library = Library(path)
        if rest:
            line = f"ok {exchange(library, int(rest[0]), int(rest[1]), float(rest[2]))}"
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
