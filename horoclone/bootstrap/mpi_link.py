"""MPI as a second backend for data between nodes: which ranks can use it, and a communicator of these for the core.

Every rank publishes what it has together with its endpoint, and all draw the same conclusion from that. mpi4py makes
the communicator and knows the handles; the core calls the MPI library itself. Thread: the one that calls init.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from horoclone import errors, selection
from horoclone.bootstrap import launchers
from horoclone.settings import flag, setting

MAX_OFFER_BYTES = 4096
# What users set to choose a fabric; the rest of an MPI's variables differ from start to start.
FABRIC_VARIABLES = (
    "OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER", "I_MPI_FABRICS",
)  # fmt: skip
Link = tuple[str, int, int, bool]  # library, communicator, MPI_BYTE, not to be compared with TCP: hc_mpi

# by job, for the next init: they are never freed, as a peer may be gone by then
_communicators: dict[str, Any] = {}


@dataclass(frozen=True)
class Offer:
    """What one rank has. rank: its own in MPI.COMM_WORLD, -1 = none, and `why` says what is missing."""

    node: str
    forced: bool = False
    starts: bool = False  # it can initialise MPI, and will when all can
    rank: int = -1
    world_size: int = 0
    library: str = ""
    has_communicator: bool = False
    why: str = "MPI is not initialised there"
    place: str = ""  # the host, its links, and what chooses among them
    known: dict[str, str] = field(default_factory=dict)  # of selection.known_ways; rank 0's counts

    def around(self, endpoint: bytes) -> bytes:
        """The endpoint with this offer behind it."""
        return struct.pack("<I", len(endpoint)) + endpoint + json.dumps(asdict(self)).encode()


def offer(environ: Mapping[str, str], job: str, known: Mapping[str, str] | None = None) -> Offer:
    """This rank's, with the ways that it remembers.

    It takes the MPI that is initialised, if any, unless HOROCLONE_CPU_OPERATIONS or HOROCLONE_FABRIC names another
    way.
    """
    word = setting(environ, "CPU_OPERATIONS", "auto")
    forced = word == "mpi"
    node = _node(environ)
    if word not in ("mpi", "auto"):
        return Offer(node, why=f"HOROCLONE_CPU_OPERATIONS is {word} there")
    if not forced and (fabric := setting(environ, "FABRIC", "")):
        return Offer(node, why=f"HOROCLONE_FABRIC is {fabric} there")
    mpi = launchers.initialised_mpi()
    if mpi is None and forced and importlib.util.find_spec("mpi4py") is None:
        return Offer(node, forced, why="mpi4py is not installed there (pip install mpi4py)")
    if mpi is None:
        return Offer(node, forced, starts=forced)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        return Offer(
            node,
            forced,
            why="MPI was initialised without MPI_THREAD_MULTIPLE, and the engine has its own thread",
        )
    if mpi.Comm.Get_parent() != mpi.COMM_NULL:
        return Offer(node, forced, why="it was spawned by another MPI job")
    world = mpi.COMM_WORLD
    numbers = (world.Get_rank(), world.Get_size(), launchers.library_of(mpi), job in _communicators)
    return Offer(node, forced, False, *numbers, "", _place(environ), dict(known or {}))


def must_start(offers: Sequence[Offer]) -> bool:
    """Whether all ranks are to call start(): MPI is demanded and needed, and nobody lacks it."""
    several = len({one.node for one in offers}) > 1
    return (
        several and any(one.starts for one in offers) and all(one.starts or one.rank >= 0 for one in offers)
    )


def start(deadline: float) -> None:
    """Initialises MPI where it is not. Collective; Timeout at the deadline, HorovodInternalError with MPI's reason.

    Not by importing mpi4py.MPI, which would hold the GIL until every process has called MPI_Init: the thread of
    rank 0 that serves the others' rendezvous needs it. mpi4py finalises MPI when the interpreter ends.
    """
    if launchers.initialised_mpi() is not None:
        return
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise errors.Unsupported(
            f"HOROCLONE_CPU_OPERATIONS is mpi, and mpi4py cannot be loaded: {error}"
        ) from error
    library = ctypes.CDLL(MPI.__file__)
    provided = ctypes.c_int()

    def initialise() -> int:
        return int(library.MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided)))

    if code := _bounded(initialise, deadline, "MPI_Init_thread"):
        raise errors.HorovodInternalError(
            f"MPI_Init_thread failed with code {code}; MPI's own output says why"
        )
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does when it initialises MPI itself


def _node(environ: Mapping[str, str]) -> str:
    """Equal on two ranks that the core will take for one node; different texts at least when it will not."""
    boot = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        boot += f"/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        pass
    own = "" if flag(environ, "SHARED_MEMORY", "1") else f"/{os.getpid()}"
    text = f"{os.uname().nodename}/{boot}/{os.getuid()}/{environ.get('HOROCLONE_NODE', '')}{own}"
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def _place(environ: Mapping[str, str]) -> str:
    """The host, its network devices with Mbit/s and MTU, its fabrics, and the settings that choose among them."""

    def word(file: Path) -> str:
        try:
            return file.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return "?"  # an interface that is down has no speed

    devices = [device.parent for device in sorted(Path("/sys/class/net").glob("*/device"))]
    links = [f"{one.name} {word(one / 'speed')} {word(one / 'mtu')}" for one in devices]
    links += [
        f"{rate.parts[4]} {word(rate)}"
        for rate in sorted(Path("/sys/class/infiniband").glob("*/ports/*/rate"))
    ]
    links += [f"{name}={environ[name]}" for name in FABRIC_VARIABLES if name in environ]
    if interfaces := environ.get("HOROCLONE_NETWORK_INTERFACES") or environ.get("HOROVOD_GLOO_IFACE"):
        links.append(interfaces)
    text = f"{os.uname().nodename} ({len(os.sched_getaffinity(0))} cores; {', '.join(links)})"
    return text if len(text) < 200 else f"{text[:150]}... {selection.digest_of(text)})"


def key_of(offers: Sequence[Offer]) -> str:
    """What it depends on whether MPI or TCP is the faster: version, MPI, and the nodes with their links and ranks."""
    from horoclone import __version__

    ranks: dict[str, int] = {}
    places = {one.node: one.place for one in offers}
    for one in offers:
        ranks[one.node] = ranks.get(one.node, 0) + 1
    nodes = sorted(f"{count} on {places[node]}" for node, count in ranks.items())
    if len(nodes) > 4:
        nodes = [nodes[0], f"{len(nodes) - 1} more nodes {selection.digest_of(' + '.join(nodes))}"]
    return f"{__version__}, {offers[0].library}, ranks: {' + '.join(nodes)}"


def split(blobs: Sequence[bytes]) -> tuple[list[bytes], list[Offer]]:
    """Endpoints and offers of all ranks. HorovodInternalError for what no rank of this version can have sent."""
    endpoints, offers = [], []
    for rank, blob in enumerate(blobs):
        try:
            (length,) = struct.unpack_from("<I", blob)
            if len(blob) < 4 + length or len(blob) > 4 + length + MAX_OFFER_BYTES:
                raise ValueError(f"{len(blob)} bytes")
            endpoints.append(bytes(blob[4 : 4 + length]))
            offers.append(Offer(**json.loads(bytes(blob[4 + length :]))))
        except (struct.error, ValueError, TypeError) as error:
            raise errors.HorovodInternalError(
                f"rank {rank} introduced itself in a way that cannot be read ({error}); is the same version of "
                "horoclone installed everywhere?"
            ) from error
    return endpoints, offers


def agree(offers: Sequence[Offer], job: str, deadline: float) -> Link | None:
    """What the core gets; None: data between nodes goes over TCP, or there is one node only. Collective.

    Unsupported, the same on every rank, when MPI is demanded and a rank has none; Timeout at the deadline.
    """
    if len({one.node for one in offers}) < 2:
        return None
    forced = any(one.forced for one in offers)
    problem = _problem(offers)
    if problem and forced:
        raise errors.Unsupported(
            f"HOROCLONE_CPU_OPERATIONS (or HOROVOD_CPU_OPERATIONS) asks for MPI between the nodes, and {problem}. "
            "Unset it to let data go over TCP."
        )
    if problem:
        return None
    way = "" if forced else offers[0].known.get(selection.digest_of(key_of(offers)), "")
    if way == "tcp":
        return None
    mpi = launchers.initialised_mpi()
    assert mpi is not None  # it was when the offer was made
    if not all(one.has_communicator for one in offers):
        ranks = [one.rank for one in offers]
        _communicators[job] = _bounded(
            lambda: _make_communicator(mpi, ranks), deadline, "MPI_Comm_create_group"
        )
    communicator = _communicators[job]
    return mpi.__file__, mpi._handleof(communicator), mpi._handleof(mpi.BYTE), forced or way == "mpi"


def _problem(offers: Sequence[Offer]) -> str:
    """Why these ranks cannot talk through MPI; empty: they can."""
    for rank, one in enumerate(offers):
        if one.rank < 0 and not one.starts:
            return f"rank {rank} cannot use it: {one.why}"
    first = offers[0]
    for rank, one in enumerate(offers):
        if (one.library, one.world_size) != (first.library, first.world_size):
            return (
                f"rank {rank} has {one.library} with {one.world_size} processes where rank 0 has {first.library} with "
                f"{first.world_size}: they are not one MPI job"
            )
    if len({one.rank for one in offers}) != len(offers):
        return (
            f"each rank is alone in its MPI job ({first.library}): it was not started by that MPI's mpirun"
            if first.world_size == 1
            else "some ranks have the same rank in MPI: they are not one MPI job"
        )
    return ""


def _make_communicator(mpi: Any, ranks: list[int]) -> Any:
    world = mpi.COMM_WORLD
    communicator = world.Create_group(world.Get_group().Incl(ranks), 7)
    communicator.Set_errhandler(mpi.ERRORS_RETURN)
    return communicator


def _bounded(work: Callable[[], Any], deadline: float, call: str) -> Any:
    """What `work` returns; Timeout when it is still at it at the deadline: MPI has no time limits of its own."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="hc-mpi", daemon=True)
    thread.start()
    thread.join(max(0.1, deadline - time.monotonic()))
    if failure:
        raise errors.HorovodInternalError(f"{call} failed: {failure[0]}")
    if not outcome:
        raise errors.Timeout(
            f"{call} did not end before the time limit of init; are all ranks of the job alive?"
        )
    return outcome[0]
