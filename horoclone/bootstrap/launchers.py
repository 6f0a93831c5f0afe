"""What each launcher offers for the first contact: one blob from rank 0 to all ranks, and the job secret.

It goes through PMI-1, MPI or torch's store. Nothing here stays open; after the first contact the ranks use the
rendezvous server (rendezvous.py).
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import hmac
import os
import re
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from horoclone import errors
from horoclone.bootstrap import wire
from horoclone.bootstrap.client import LEFT_OVER
from horoclone.settings import flag

MAX_BLOB_BYTES = 16384
PMI_CHUNK = 512  # hex digits in one value; Hydra allows 1024, others less
DERIVED_PORTS = 8
STORE_POLL_S, STORE_POLL_MAX_S = 0.01, 0.25  # of torch's store: all ranks ask one agent
SAY_AFTER_S = 10.0  # who is missing there


# --- the job secret


def shared_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that the user or our launcher gave to every process; empty when there is none.

    Unsupported when it is too short, unreadable, or in a file that others may read.
    """
    descriptor = environ.get("HOROCLONE_SECRET_FD", "")
    if descriptor:
        return _secret_of_descriptor(descriptor)
    text = environ.get("HOROCLONE_SECRET", "")
    if text:
        return _checked(os.fsencode(text.strip()), "HOROCLONE_SECRET")
    path = environ.get("HOROCLONE_SECRET_FILE", "")
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(4096)
    except OSError as error:
        raise errors.Unsupported(f"HOROCLONE_SECRET_FILE={path}: {error.strerror}") from error
    # The kubelet lets a pod that is not root read its volumes through a group (fsGroup): root has given them to it.
    allowed = 0o040 if status.st_uid == 0 != os.geteuid() else 0
    if status.st_mode & 0o077 & ~allowed:
        raise errors.Unsupported(f"HOROCLONE_SECRET_FILE={path} can be read by others; run: chmod 600 {path}")
    return _checked(content.strip(), f"HOROCLONE_SECRET_FILE={path}")


def _secret_of_descriptor(text: str) -> bytes:
    try:
        secret = _checked(os.pread(int(text), 4096, 0), f"HOROCLONE_SECRET_FD={text}")
        os.set_inheritable(int(text), False)  # nothing that this process starts has a use for it
        return secret
    except (OSError, ValueError, OverflowError) as error:
        raise errors.Unsupported(
            f"HOROCLONE_SECRET_FD={text}: the job secret cannot be read ({error}). The launcher passes it in an open "
            "descriptor; something between the launcher and this process (sudo, a container, a shell wrapper that "
            "closes descriptors) did not pass it on. Set HOROCLONE_SECRET_FILE there instead and unset this one."
        ) from error


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < 16:
        raise errors.Unsupported(
            f"{source}: {len(secret)} bytes are too short for a secret; use at least 16."
        )
    return secret


def derived_ports(secret: bytes, job: str) -> list[int]:
    """Ports below the ephemeral range that only those who know the secret can predict; the same in every process."""
    digest = hmac.new(secret, b"horoclone ports\0" + os.fsencode(job), hashlib.sha256).digest()
    return [
        20000 + value % 12000 for value in struct.unpack(f">{DERIVED_PORTS}H", digest[: 2 * DERIVED_PORTS])
    ]


# --- Slurm


def first_slurm_node(nodelist: str) -> str:
    """`gpu[003-004,9],login1` -> `gpu003`."""
    match = re.match(r"^([^\[,]*)(?:\[([0-9]+)[^\]]*\])?([^\[,]*)", nodelist)
    name = "".join(part or "" for part in match.groups()) if match else ""
    if not name:
        raise errors.Unsupported(f"SLURM_STEP_NODELIST={nodelist!r} names no node.")
    return name


def node_of_slurms_first_task(environ: Mapping[str, str]) -> str:
    """The step's first node, unless a file says by hand where each task is (srun -m arbitrary)."""
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        try:
            with open(environ.get("SLURM_HOSTFILE", "")) as file:
                lines = [text for line in file if (text := line.partition("#")[0].strip())]
            return first_slurm_node(lines[0].partition("*")[0])
        except (OSError, IndexError):
            pass  # the file is where srun was, and perhaps not here
    return first_slurm_node(environ.get("SLURM_STEP_NODELIST", ""))


# --- PMI-1, spoken over the descriptor that Hydra gave us


class Pmi:
    """Hydra's key-value store. It does not initialise PMI, so that MPI_Init may come before or after.

    Hydra kills the job when a process that has used PMI ends without finalising it, and MPI_Init fails once it is
    finalised. So it is finalised when the interpreter ends, unless an MPI library does that.
    """

    _will_finalise = False

    def __init__(self, environ: Mapping[str, str], deadline: float) -> None:
        self._deadline = deadline
        try:
            self._socket = socket.socket(fileno=os.dup(int(environ["PMI_FD"])))
        except (KeyError, OSError, ValueError) as error:
            raise errors.Unsupported(
                f"PMI_FD={environ.get('PMI_FD')!r} cannot be used: {error}. {LEFT_OVER}"
            ) from error
        self._unread = b""
        if not Pmi._will_finalise:
            Pmi._will_finalise = True
            atexit.register(_finalise_pmi, int(environ["PMI_FD"]), os.getpid())
        self.name = self._ask("cmd=get_my_kvsname", "kvsname")

    def broadcast(self, rank: int, key: str, blob: bytes) -> bytes:
        """Rank 0's blob, on every rank. Collective over all processes of the launcher."""
        if rank == 0:
            text = blob.hex()
            parts = [text[at : at + PMI_CHUNK] for at in range(0, len(text), PMI_CHUNK)]
            self._put(f"{key}-n", str(len(parts)))
            for number, part in enumerate(parts):
                self._put(f"{key}-{number}", part)
        self._ask("cmd=barrier_in", "tag")
        if rank == 0:
            return blob
        count = int(self._get(f"{key}-n"))
        if not 0 < count * PMI_CHUNK <= 2 * MAX_BLOB_BYTES + PMI_CHUNK:
            raise errors.HorovodInternalError(f"the launcher's store has {count} parts for {key!r}")
        return bytes.fromhex("".join(self._get(f"{key}-{number}") for number in range(count)))

    def close(self) -> None:
        """Lets go of the duplicate; the launcher's descriptor stays open for MPI."""
        self._socket.close()

    def _put(self, key: str, value: str) -> None:
        self._ask(f"cmd=put kvsname={self.name} key={key} value={value}", "rc")

    def _get(self, key: str) -> str:
        return self._ask(f"cmd=get kvsname={self.name} key={key}", "value")

    def _ask(self, command: str, wanted: str) -> str:
        self._socket.sendall(command.encode() + b"\n")
        while b"\n" not in self._unread:
            self._wait(command)
            part = self._socket.recv(4096)
            if not part:
                raise errors.HorovodInternalError(f"Hydra closed PMI_FD after {command.split()[0]!r}")
            self._unread += part
            if len(self._unread) > 65536:
                raise errors.Unsupported("what answers on PMI_FD does not speak PMI-1")
        line, _, self._unread = self._unread.partition(b"\n")
        fields = dict(part.split("=", 1) for part in line.decode(errors="replace").split() if "=" in part)
        if fields.get("rc", "0") != "0" or wanted not in fields:
            if wanted == "tag" and fields.get("cmd") == "barrier_out":
                return ""
            raise errors.Unsupported(
                f"Hydra answered {line.decode(errors='replace')[:200]!r} to {command[:80]!r}"
            )
        return fields[wanted]

    def _wait(self, command: str) -> None:
        # poll, not settimeout: the descriptor's non-blocking flag is shared with the MPI library.
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        # A barrier waits for the slowest rank; everything else is answered by the launcher's proxy on this host.
        limit_s = self._deadline - time.monotonic()
        if not command.startswith("cmd=barrier_in"):
            limit_s = min(limit_s, 10.0)
        if not poller.poll(max(0.0, limit_s) * 1000):
            raise errors.Timeout(
                f"{command.split()[0]!r} on PMI_FD was not answered in {limit_s:.0f} s; have all ranks called init()?"
            )


def _finalise_pmi(descriptor: int, pid: int) -> None:
    if os.getpid() != pid or mpi_was_initialised():
        return
    try:
        os.write(descriptor, b"cmd=finalize\n")
        # its acknowledgement; Hydra must have read it before we are gone
        select.select([descriptor], [], [], 1.0)
    except (OSError, ValueError):
        pass


def hydra_job(environ: Mapping[str, str]) -> str:
    """The proxy at the other end of PMI_FD, as the kernel knows it: the same for all ranks of one run on this host.

    Empty when it cannot be told. Sends nothing: see Pmi for what a first word on PMI_FD entails.
    """
    try:
        with socket.socket(fileno=os.dup(int(environ["PMI_FD"]))) as one:
            if one.family != socket.AF_UNIX:
                return ""
            pid = struct.unpack(
                "3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )[0]
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            started = file.read().rpartition(")")[2].split()[19]  # in clock ticks since boot
    except (KeyError, OSError, ValueError, IndexError):
        return ""
    return f"hydra:{pid}:{started}" if pid > 0 else ""


# --- MPI, through mpi4py


def initialised_mpi() -> Any | None:
    """The module mpi4py.MPI if this process has initialised MPI (and not finalised it), else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module


def library_of(mpi: Any) -> str:
    """`Open MPI v5.0.11`; the text goes on with who has packaged it."""
    first: str = mpi.Get_library_version().split("\n", 1)[0]
    return first.split(",", 1)[0].strip(" \0")


def mpi_was_initialised() -> bool:
    """Whether any code of this process has initialised MPI, also without mpi4py."""
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        return bool(module.Is_initialized())
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            paths = {line.split(maxsplit=5)[5].strip() for line in file if "/libmpi" in line}
        for path in paths:
            function = getattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD), "MPI_Initialized", None)
            flag = ctypes.c_int(0)
            if function is not None and function(ctypes.byref(flag)) == 0 and flag.value:
                return True
    except (OSError, IndexError):
        pass
    return False


def load_mpi(reason: str) -> Any:
    """Imports mpi4py.MPI (which initialises MPI). Unsupported, with the fix, when it is missing or broken."""
    try:
        import mpi4py

        if flag(os.environ, "MPI_THREADS_DISABLE"):
            mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise errors.Unsupported(
            f"{reason}, so the ranks find each other through MPI, and mpi4py cannot be loaded here ({error}). "
            "Install it (pip install mpi4py), or put one secret into a file on every host and set "
            "HOROCLONE_SECRET_FILE, or start the job with horoclonerun."
        ) from error
    return MPI


def mpi_broadcast(comm: Any, blob: bytes, deadline: float) -> bytes:
    """Rank 0's blob (at most 16 KiB) on every rank of a duplicate of comm; no pickle. Timeout at the deadline."""
    duplicate = comm.Dup()
    buffer = bytearray(4 + MAX_BLOB_BYTES)
    if duplicate.Get_rank() == 0:
        if len(blob) > MAX_BLOB_BYTES:
            raise ValueError(f"{len(blob)} bytes are too many for the first contact")
        struct.pack_into(f"<I{len(blob)}s", buffer, 0, len(blob), blob)
    request = duplicate.Ibcast(buffer, root=0)
    pause_s = 0.0001
    while not request.Test():
        if time.monotonic() >= deadline:
            raise errors.Timeout(
                "MPI_Ibcast did not end before the deadline; have all ranks called hvd.init()?"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
    duplicate.Free()
    (length,) = struct.unpack_from("<I", buffer)
    if length > MAX_BLOB_BYTES:
        raise errors.HorovodInternalError(f"MPI delivered a blob of {length} bytes")
    return bytes(buffer[4 : 4 + length])


# --- torch's store, under torchrun


def agents_store(environ: Mapping[str, str], deadline: float) -> Any:
    """Our part of the key-value store of torchrun's agent. It is public: nothing in it may be trusted."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore

    limit = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:  # torch's DistStoreError among them
        raise errors.Timeout(f"torchrun's store at {wire.format_address(host, port)}: {error}") from error
    return PrefixStore("horoclone/hvd", store)


def told_by_rank_0(
    store: Any, rank: int, size: int, blob: bytes, deadline: float, look: Callable[[], None] = lambda: None
) -> bytes:
    """Rank 0's blob, through a store of torch's that keeps what processes of earlier lives have written.

    Nothing numbers the lives of a job of several agents: TORCHELASTIC_RESTART_COUNT leaves out those that began
    because of another agent. So each rank asks with a random word, and rank 0 goes on when all have heard its own one.
    """
    own = secrets.token_hex(16)
    say_at = time.monotonic() + SAY_AFTER_S if rank <= 1 else deadline
    poll_s = STORE_POLL_S

    def wait(missing: str) -> None:
        nonlocal say_at, poll_s
        look()
        if say_at <= time.monotonic() < deadline:
            say_at = deadline
            text = (
                f"still waiting for the {size} ranks of the job after {SAY_AFTER_S:g} s; missing: {missing}"
            )
            print(f"horoclone [rank {rank}]: {text}", file=sys.stderr, flush=True)
        if time.monotonic() >= deadline:
            raise errors.Timeout(f"rank {rank} of {size} waited in torch's store; missing: {missing}")
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, STORE_POLL_MAX_S)

    try:
        if rank != 0:
            store.set(f"asks/{rank}", own)
            while not store.check([f"answers/{own}"]):
                wait("rank 0")
            text = bytes(store.get(f"answers/{own}"))
            if len(text) > 2 * MAX_BLOB_BYTES:
                raise errors.HorovodInternalError("torch's store delivered more than was put there")
            word, _, answer = text.decode("ascii").partition("/")
            store.set(f"heard/{word}/{rank}", b"1")
            return bytes.fromhex(answer)
        answered: dict[int, str] = {}
        missing = list(range(1, size))
        while missing:
            for one in [one for one in missing if store.check([f"asks/{one}"])]:
                word = bytes(store.get(f"asks/{one}")).decode("ascii")
                if answered.get(one) != word:
                    answered[one] = word
                    store.set(f"answers/{word}", f"{own}/{blob.hex()}")
            missing = [one for one in missing if not store.check([f"heard/{own}/{one}"])]
            if missing:
                wait(f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}")
        return blob
    except RuntimeError as error:
        if isinstance(error, errors.HorovodInternalError):
            raise
        raise errors.Timeout(f"torch's store: {error}") from error
