"""Turns a placement (detect.py) into a job: rank, size, secret, and an exchange of one blob with every rank.

Under every launcher the ranks end up at one rendezvous server. It is the launcher's own, or one in rank 0, whose
address the others get through the launcher's key-value store (PMI-1, PMIx), through MPI, or from a name that all
processes can derive. The server stays up between init calls, so that init after shutdown costs one round trip.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from horoclone import errors
from horoclone.bootstrap import detect, launchers, one_host, pmix, service, wire
from horoclone.bootstrap.client import LEFT_OVER, VERDICT_S, Client
from horoclone.bootstrap.detect import Placement
from horoclone.bootstrap.rendezvous import Server

Say = Callable[[str], None]
Environment = Mapping[str, str]

SECRET_BYTES = 32
LINGER_S = 1.0
REACH_S = 2.0  # for the rendezvous that a value of PMIx leads to
ANOTHER_VALUE_S = 10.0  # for a newer one
WITHOUT_SECRET = (
    "the processes are on several hosts, or their launcher does not say that they are on one, and share no secret. Put "
    "the same random text (at least 16 bytes) into a file on every host, readable by you only, and set "
    "HOROCLONE_SECRET_FILE to it; or start the job with horoclonerun"
)


@dataclass(eq=False)
class Rendezvous:
    """Where the processes that one launcher started (or those of one communicator) find each other."""

    key: object  # equal keys mean that it can serve another init
    name: str
    secret: bytes
    uses_mpi: bool
    client: Client | None = None  # None: one process, which needs none
    server: Server | None = None  # in rank 0, unless the launcher has it
    one_host: bool = False  # the launcher says so: nobody outside need reach us
    watches_processes: bool = True  # by connections that stay open; our launcher sees processes end itself
    lives: dict[str, int] = field(default_factory=dict)  # scope -> init calls so far

    def close(self, process_ends: bool) -> None:
        if self.client is not None:
            self.client.leave(process_ends)
        if self.server is not None:
            self.server.close(LINGER_S, process_ends)

    def after_fork_in_child(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.after_fork_in_child()


class Job:
    """One world to be connected: all processes of a rendezvous, or the ranks of a list."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        scope: str = "world",
        group: Any = None,
        members: list[int] | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.rank, self.size = rank, size
        self.generation = 0
        self._scope = scope
        self._group = group  # MPI group of the world that the launcher started; None: that of COMM_WORLD
        self._members = members  # its ranks in our order; None: all of them in theirs

    @property
    def name(self) -> str:
        """The job id of every handshake."""
        return f"{self.rendezvous.name}/{self._scope}"

    @property
    def launched_rank(self) -> int:
        """This process's number among all processes of the rendezvous, whatever part of them calls init."""
        return self.rank if self._members is None else self._members[self.rank]

    @property
    def secret(self) -> bytes:
        return self.rendezvous.secret

    @property
    def uses_mpi(self) -> bool:
        return self.rendezvous.uses_mpi

    def gather(self, blob: bytes, deadline: float, say: Say | None) -> list[bytes]:
        """Everybody's blob by rank, and the next generation number. Errors as Client.gather."""
        self.generation = self.rendezvous.lives[self._scope] = self.rendezvous.lives.get(self._scope, 0) + 1
        if self.size == 1 or self.rendezvous.client is None:
            return [blob]
        timeout_s = max(0.1, deadline - time.monotonic())
        client = self.rendezvous.client
        try:
            return client.gather(self._key, self.rank, self.size, blob, timeout_s, say, self._members)
        except BaseException as error:
            if not getattr(error, "counted", False):
                # the next try is the same life: the others may have it before us
                self.rendezvous.lives[self._scope] -= 1
            raise

    @property
    def _key(self) -> str:
        return f"{self._scope}/{self.generation}"

    @contextlib.contextmanager
    def connecting(self) -> Iterator[Callable[[], None]]:
        """Around what connects the ranks of the last gather. Gives a function that raises PeerLost when one is lost;
        a PeerLost from inside becomes that of the rank which was lost first, and the others hear of any failure."""
        client = self.rendezvous.client
        if client is None or self.size == 1:
            yield lambda: None
            return
        try:
            client.watch(self._key)
            yield lambda: client.look(self._key)
        except BaseException as error:
            if isinstance(error, errors.PeerLost) and error is not client.verdict:
                client.hear(VERDICT_S)  # a link that ended may be the consequence of another rank's end
            client.give_up(self._key, f"{type(error).__name__}: {error}")
            raise
        client.connected(stays=self.rendezvous.watches_processes)

    def listening(self, settings: dict[str, str]) -> dict[str, str]:
        """The settings with which a runtime listens: on one host on loopback only, unless the user has chosen."""
        chosen = settings.get("HOROCLONE_NETWORK_INTERFACES") or settings.get("HOROVOD_GLOO_IFACE")
        if not self.rendezvous.one_host or chosen or "127.0.0.1" not in wire.routable_addresses():
            return settings
        return {**settings, "HOROCLONE_NETWORK_INTERFACES": "lo"}

    def report_failure(self, text: str, consequence: bool) -> None:
        """Tells the launcher (or ranks that still wait to be connected) why this rank ends."""
        if self.rendezvous.client is not None:
            self.rendezvous.client.report_failure(self.launched_rank, text, consequence)

    def world_ranks_of(self, comm: Any) -> list[int]:
        """Our ranks of an mpi4py communicator's members, none of MPI.COMM_NULL. ValueError when not all are ours."""
        group = self._group
        if group is None:
            mpi = launchers.initialised_mpi()
            if mpi is None or not self.uses_mpi:
                raise ValueError("a process set made of a communicator needs a job started by mpirun")
            group = mpi.COMM_WORLD.Get_group()
        if not comm:  # MPI.COMM_NULL: this process is in none of the communicators that a Split has made
            return []
        theirs = comm.Get_group()
        ranks = [int(rank) for rank in theirs.Translate_ranks(list(range(theirs.Get_size())), group)]
        ours = list(range(self.size)) if self._members is None else self._members
        if not set(ranks) <= set(ours):
            raise ValueError("the communicator of a process set has members outside the world of init()")
        return [ours.index(rank) for rank in ranks]

    def close(self, process_ends: bool = False) -> None:
        """process_ends: nobody need wait for this rank any more."""
        self.rendezvous.close(process_ends)

    def after_fork_in_child(self) -> None:
        self.rendezvous.after_fork_in_child()


def open_job(comm: Any, environ: Environment, deadline: float, say: Say | None, previous: Job | None) -> Job:
    """The job that this process belongs to. `previous` (of an earlier init) is used again where it fits, else closed.

    comm: None, a list of ranks, or an mpi4py communicator. ValueError for anything else, and for a list without this
    rank; Unsupported when the launcher leaves no safe way; Timeout at the deadline (time.monotonic()).
    """
    if comm is not None and hasattr(comm, "Get_rank") and hasattr(comm, "Ibcast"):
        _check_communicator(comm)
        return _of_communicator(comm, environ, deadline, previous, key=None)
    placement = detect.detect(environ)
    ranks = _checked_ranks(comm, placement)
    mpi = launchers.initialised_mpi()
    if mpi is not None and placement.launcher == "single" and mpi.COMM_WORLD.Get_size() > 1:
        # A launcher that we cannot read, though MPI could.
        job = _of_communicator(mpi.COMM_WORLD, environ, deadline, previous, key="MPI.COMM_WORLD")
        return _part(job, _checked_ranks(comm, _as_placement(job)))
    if placement.launcher == "single":
        detect.refuse_some_of_several(environ)
    _refuse_foreign_mpi(placement, mpi)
    if placement.size == 0:
        reason = f"{placement.why}, which does not say how many processes there are"
        world = (mpi or launchers.load_mpi(reason)).COMM_WORLD
        job = _of_communicator(world, environ, deadline, previous, key="MPI.COMM_WORLD")
        return _part(job, _checked_ranks(comm, _as_placement(job)))
    if ranks and placement.one_host and placement.launcher != "horoclone":
        # The members have a rendezvous of their own, so nobody else need call init.
        return _job_at_rendezvous((placement, tuple(ranks)), placement, ranks, environ, deadline, previous)
    everybody = list(range(placement.size))
    return _part(_job_at_rendezvous((placement,), placement, everybody, environ, deadline, previous), ranks)


def _check_communicator(comm: Any) -> None:
    if not comm:
        raise ValueError(
            "init(comm=MPI.COMM_NULL): this process is in none of the communicators that were made; it must not call "
            "init(), or needs one with itself in it"
        )
    if getattr(comm, "Is_inter", bool)():
        raise ValueError(
            "init(comm=...): this is an intercommunicator, of two groups; make one group of them with its Merge()"
        )


def job_on_this_host(token: str, rank: int, size: int, environ: Environment, deadline: float) -> Job:
    """The job of `size` processes of one user on this host that know `token` from elsewhere; the caller closes it.

    Timeout at the deadline (time.monotonic()) when rank 0 does not come; Job.gather names the others.
    """
    placement = Placement("c10d", rank, size, rank, size, token, "the processes share a token")
    if size == 1:
        return Job(_rendezvous_of(placement, [0], environ, deadline), rank, size)
    rendezvous = _on_this_host(placement, list(range(size)), "token", b"", environ, deadline)
    return Job(rendezvous, rank, size)


def _as_placement(job: Job) -> Placement:
    return Placement("mpi", job.rank, job.size, -1, -1, "", "MPI is initialised")


def _checked_ranks(comm: Any, placement: Placement) -> list[int]:
    """The list of ranks that the user passed; empty = everybody."""
    if comm is None:
        return []
    try:
        ranks = [int(rank) for rank in comm]
    except (TypeError, ValueError):
        raise ValueError(f"init(comm={comm!r}): comm is a list of ranks or an mpi4py communicator") from None
    if placement.size == 0 or not ranks:
        return ranks
    if len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= placement.size:
        raise ValueError(
            f"init(comm={ranks}): every rank once, each below the size {placement.size} of the job"
        )
    if placement.rank not in ranks:
        raise ValueError(
            f"init(comm={ranks}): this process is rank {placement.rank}, which is not in the list. Call init there "
            "with the list that it belongs to, or do not call it."
        )
    return ranks


def _part(job: Job, ranks: list[int]) -> Job:
    if not ranks or ranks == list(range(job.size)):
        return job
    return Job(job.rendezvous, ranks.index(job.rank), len(ranks), _scope(ranks), job._group, ranks)


def _scope(ranks: list[int]) -> str:
    return "ranks-" + hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def _refuse_foreign_mpi(placement: Placement, mpi: Any | None) -> None:
    """mpiexec of one MPI with mpi4py on another: N processes that each believe to be alone."""
    if mpi is None or not (placement.uses_mpi or placement.launcher == "slurm") or placement.size == 0:
        return
    world = mpi.COMM_WORLD.Get_size()
    if world != placement.size:
        advice = (
            "srun has not told that MPI of the others: give it --mpi=pmix, or put one secret into a file on every "
            "host, set HOROCLONE_SECRET_FILE to it and import mpi4py after hvd.init()."
            if placement.launcher == "slurm"
            else "mpirun and mpi4py belong to different MPIs: start the job with the mpirun of mpi4py's, or import "
            "mpi4py after hvd.init()."
        )
        raise errors.Unsupported(
            f"{placement.why}, and says that there are {placement.size} processes; {launchers.library_of(mpi)}, which "
            f"mpi4py uses, says {world}. {LEFT_OVER} Else {advice}"
        )


# --- rendezvous


def _job_at_rendezvous(
    key: object,
    placement: Placement,
    ranks: list[int],
    environ: Environment,
    deadline: float,
    previous: Job | None,
) -> Job:
    rank = ranks.index(placement.rank)
    rendezvous = previous.rendezvous if previous is not None and previous.rendezvous.key == key else None
    if rendezvous is None:
        if previous is not None:
            previous.close()
        rendezvous = _rendezvous_of(placement, ranks, environ, deadline)
        rendezvous.key, rendezvous.one_host = key, placement.one_host
        if rendezvous.client is not None and placement.launcher != "horoclone":
            rendezvous.client.said_by = placement.why
    everybody = ranks == list(range(placement.size))
    return Job(rendezvous, rank, len(ranks), members=None if everybody else ranks)


def _rendezvous_of(
    placement: Placement, ranks: list[int], environ: Environment, deadline: float
) -> Rendezvous:
    size = len(ranks)
    secret = launchers.shared_secret(environ)
    if placement.launcher == "horoclone":
        if not secret:
            raise errors.Unsupported(
                f"HOROCLONE_RENDEZVOUS={environ['HOROCLONE_RENDEZVOUS']} without HOROCLONE_SECRET_FD: the launcher's "
                "environment did not arrive whole. Set HOROCLONE_SECRET_FILE, or start the job with horoclonerun."
            )
        addresses = [part for part in environ["HOROCLONE_RENDEZVOUS"].split(",") if part]
        client = Client(addresses, secret, placement.job, _left_s(deadline), placement.rank)
        return Rendezvous(None, placement.job, secret, False, client, watches_processes=False)
    if size == 1:
        return Rendezvous(None, f"alone-{os.getpid()}", secrets.token_bytes(SECRET_BYTES), placement.uses_mpi)
    if placement.one_host and placement.launcher != "mpi":
        return _on_this_host(placement, ranks, _scope(ranks), secret, environ, deadline)
    if placement.launcher == "hydra" and "PMI_FD" in environ:
        return _through_pmi(placement, environ, deadline)
    if placement.uses_mpi or (placement.launcher == "slurm" and not secret):
        reason = f"{placement.why}, for several hosts"
        if placement.launcher == "openmpi":
            try:
                return _through_pmix(placement, environ, deadline)
            except pmix.Unavailable as error:
                reason += f", and PMIx cannot be used ({error})"
        world = (launchers.initialised_mpi() or launchers.load_mpi(reason)).COMM_WORLD
        _refuse_foreign_mpi(placement, launchers.initialised_mpi())
        return _of_communicator(world, environ, deadline, None, key=None).rendezvous
    if not secret:
        raise errors.Unsupported(f"{placement.why}, and {WITHOUT_SECRET}.")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _through_torch_store(placement, secret, environ, deadline)
    return _at_derived_port(placement, secret, environ, deadline)


def _on_this_host(
    placement: Placement, ranks: list[int], scope: str, secret: bytes, environ: Environment, deadline: float
) -> Rendezvous:
    """At a name that every process can derive (one_host.py); the kernel vouches for the user at both ends."""
    rank, size = ranks.index(placement.rank), len(ranks)
    job = _job_name(placement, environ)
    addresses = one_host.addresses(secret, job, scope)
    name = addresses[0].removeprefix("unix:")
    server = None
    if rank == 0:
        server = one_host.serve(lambda address: Server(secret, name, size, [address]), addresses, deadline)
        addresses = server.addresses
    client = Client(addresses, secret, name, _left_s(deadline), placement.rank, ranks[0])
    if not secret and server is not None:
        secret = secrets.token_bytes(SECRET_BYTES)
        client.put("secret", secret)
    elif not secret:
        try:
            secret = client.get("secret", _left_s(deadline))
        except errors.Timeout as error:
            raise errors.Timeout(
                f"rank {rank}: rank 0 of {size} has not called hvd.init() ({placement.why}): {error} {LEFT_OVER}"
            ) from None
        if len(secret) != SECRET_BYTES:
            raise errors.HorovodInternalError(f"rank 0 handed out a secret of {len(secret)} bytes")
    return Rendezvous(None, name, secret, placement.uses_mpi, client, server)


def _job_name(placement: Placement, environ: Environment) -> str:
    """Something that only the processes of this run have in common."""
    if placement.job:
        return placement.job
    if placement.launcher == "hydra" and (job := launchers.hydra_job(environ)):
        return job
    return environ.get("HOROCLONE_JOB") or f"{placement.launcher}:parent:{os.getppid()}"


def _through_pmi(placement: Placement, environ: Environment, deadline: float) -> Rendezvous:
    store = launchers.Pmi(environ, deadline)
    try:
        server, blob = _host_server(placement.rank, placement.size, environ)
        blob = store.broadcast(placement.rank, "horoclone", blob)
    finally:
        store.close()
    return _join(blob, server, placement.rank, deadline)


def _through_pmix(placement: Placement, environ: Environment, deadline: float) -> Rendezvous:
    server, blob = _host_server(placement.rank, placement.size, environ)
    try:
        blob = pmix.broadcast(environ, placement.rank, placement.size, blob, deadline)
    except BaseException:
        if server is not None:
            server.close()
        raise
    rendezvous = _join(blob, server, placement.rank, deadline)
    while placement.rank != 0 and _left_s(deadline) > REACH_S:
        if rendezvous.client is None or rendezvous.client.reach(REACH_S):
            break
        # Perhaps what an earlier program has left, in which this rank did not come: rank 0 may publish a newer one.
        try:
            limit = min(deadline, time.monotonic() + ANOTHER_VALUE_S)
            blob = pmix.broadcast(environ, placement.rank, placement.size, b"", limit)
        except (errors.Timeout, pmix.Unavailable):
            continue
        rendezvous = _join(blob, None, placement.rank, deadline)
    return rendezvous


def _through_torch_store(
    placement: Placement, secret: bytes, environ: Environment, deadline: float
) -> Rendezvous:
    """torchrun's store tells the address of rank 0, in clear; the secret decides whether it is believed."""
    server, text = None, ""
    if placement.rank == 0:
        life = secrets.token_hex(8)
        server = Server(secret, f"{placement.job}:{life}", placement.size, wire.bindings(environ))
        text = ",".join([life, *server.addresses])
    try:
        store = launchers.agents_store(environ, deadline)
        blob = launchers.told_by_rank_0(store, placement.rank, placement.size, text.encode(), deadline)
    except BaseException:
        if server is not None:
            server.close()
        raise
    life, *addresses = _addresses(blob)
    job = f"{placement.job}:{life}"
    client = Client(addresses, secret, job, _left_s(deadline), placement.rank, 0)
    return Rendezvous(None, job, secret, False, client, server)


def _at_derived_port(
    placement: Placement, secret: bytes, environ: Environment, deadline: float
) -> Rendezvous:
    """The host of rank 0 is known (Slurm's first node, MASTER_ADDR, a service), its port follows from the secret."""
    ports = launchers.derived_ports(secret, placement.job)
    if placement.launcher == "slurm":
        host = launchers.node_of_slurms_first_task(environ)
    elif placement.launcher == "service":
        host, ports = service.rendezvous_of(environ)
    elif not (host := environ.get("MASTER_ADDR", "")):
        raise errors.Unsupported(
            f"{placement.why}, for several hosts, but nothing says where rank 0 is. Set MASTER_ADDR to its host "
            "name, or start the job with horoclonerun."
        )
    server = None
    if placement.rank == 0:
        server = _first_free(secret, placement, environ, ports)
    addresses = (
        server.addresses if server is not None else [wire.format_address(host, port) for port in ports]
    )
    client = Client(addresses, secret, placement.job, _left_s(deadline), placement.rank, 0)
    return Rendezvous(None, placement.job, secret, False, client, server)


def _first_free(secret: bytes, placement: Placement, environ: Environment, ports: list[int]) -> Server:
    for port in ports:
        try:
            hosts = wire.bindings(environ)
            return Server(
                secret, placement.job, placement.size, [wire.format_address(host, port) for host in hosts]
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise errors.HorovodInternalError(
        f"rank 0: the ports {', '.join(map(str, ports))} are all in use on this host. They follow from the secret "
        "and the job id; set another HOROCLONE_SECRET, or start the job with horoclonerun."
    )


def _of_communicator(
    comm: Any, environ: Environment, deadline: float, previous: Job | None, key: object
) -> Job:
    """A job of an mpi4py communicator's members. Rank 0's address and a fresh secret go through MPI."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if previous is not None:
        if key is not None and previous.rendezvous.key == key:
            return Job(previous.rendezvous, rank, size, group=comm.Get_group())
        previous.close()
    server, blob = _host_server(rank, size, environ)
    try:
        blob = launchers.mpi_broadcast(comm, blob, deadline)
    except BaseException:
        if server is not None:
            server.close()
        raise
    rendezvous = _join(blob, server, rank, deadline)
    rendezvous.key = key if key is not None else object()
    return Job(rendezvous, rank, size, group=comm.Get_group())


def _host_server(rank: int, size: int, environ: Environment) -> tuple[Server | None, bytes]:
    """In rank 0: a server for all that receive this blob [secret 32][name 16 hex digits][addresses, by commas]."""
    if rank != 0:
        return None, b""
    secret, name = secrets.token_bytes(SECRET_BYTES), secrets.token_hex(8)
    server = Server(secret, name, size, [f"unix:horoclone-{name}", *wire.bindings(environ)])
    return server, secret + name.encode() + ",".join(server.addresses).encode()


def _join(blob: bytes, server: Server | None, rank: int, deadline: float) -> Rendezvous:
    secret, name = blob[:SECRET_BYTES], blob[SECRET_BYTES : SECRET_BYTES + 16].decode("ascii")
    client = Client(_addresses(blob[SECRET_BYTES + 16 :]), secret, name, _left_s(deadline), rank, 0)
    return Rendezvous(None, name, secret, True, client, server)


def _addresses(text: bytes) -> list[str]:
    addresses = text.decode("ascii", errors="replace").split(",")
    if not 0 < len(addresses) <= 64:
        raise errors.HorovodInternalError(f"rank 0 announced {len(addresses)} addresses")
    return addresses


def _left_s(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
