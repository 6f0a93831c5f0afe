"""Connects the members of a torch process group: they exchange endpoints in torch's store and start a runtime.

Nothing that is read from the store is trusted with more than a name: on one host the kernel vouches for the members, on
several they must share a secret (signed.py). Also holds the rendezvous for launchers that set none of torch's
variables, and a barrier in the store.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from horoclone import errors, objects
from horoclone.anonymous_file import anonymous_file
from horoclone.bootstrap import detect, exchange, launchers, wire
from horoclone.runtime import current, lifecycle, logs, native_module, stacks
from horoclone.settings import setting, settings_of, start_timeout_s, with_own_files
from horoclone.torch.c10d.lost import Look
from horoclone.torch.c10d.signed import SignedStore

if TYPE_CHECKING:
    from horoclone._core import Runtime

_memory: dict[tuple[int, int, int], Any] = {}  # rank 0's process, descriptor and inode -> the store there
_groups = itertools.count(1)  # process groups beside hvd.init() in this process
_lives = itertools.count()  # of what rank 0 has handed out: a store is used again
TORCHS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def connect(store: Any, rank: int, size: int, timeout_s: float, look: Look = lambda: None) -> Runtime:
    """A runtime whose world is the process group: every member calls it with the group's store.

    Raises Timeout naming who is missing, what look() raises while it waits, Unsupported for several hosts without a
    common secret, HorovodInternalError where an unauthenticated peer has written into the store.
    """
    deadline = time.monotonic() + timeout_s
    settings = {**logs.settings(os.environ), **settings_of(os.environ)}
    if current.runtime is not None:  # its files are its own
        of_rank = "" if current.runtime.rank == 0 else f".rank{current.runtime.rank}"
        settings = with_own_files(settings, f"group{next(_groups)}{of_rank}")
    secret, host = _own_secret(), _host().encode()
    board = SignedStore(store, rank, size, secret, deadline, look)

    def all_here(values: Sequence[bytes]) -> bool:
        return all(value.rpartition(b"\n")[0] == host for value in values)

    values = board.exchange("host", host + b"\n" + secrets.token_hex(16).encode(), all_here)
    one_host = all_here(values)
    if one_host:
        if "127.0.0.1" in wire.routable_addresses():
            settings["HOROCLONE_NETWORK_INTERFACES"] = "lo"  # nobody else need reach us
        token = values[0].rpartition(b"\n")[2].decode(errors="replace")
        job = exchange.job_on_this_host(token, rank, size, os.environ, deadline)
    logs.begin(native_module.core())
    native = native_module.new_runtime(settings)
    try:
        stacks.watch_stack(native, os.environ)
        if one_host:
            endpoints = job.gather(native.endpoint(), deadline, None)
            with job.connecting() as look:
                left_s = max(0.1, deadline - time.monotonic())
                native.connect(rank, endpoints, job.secret, job.name, 1, left_s, None, look)
        else:
            endpoints = board.exchange("endpoint", native.endpoint())
            name = "c10d:" + hashlib.sha256(b"".join(endpoints)).hexdigest()[:32]
            native.connect(rank, endpoints, secret, name, 1, max(0.1, deadline - time.monotonic()))
    except BaseException:
        try:
            native.shutdown(0.0)
        except errors.HorovodInternalError:
            pass  # the first error is the one to report
        raise
    finally:
        if one_host:
            job.close()
    board.forget()
    return native


def start_limit_s(asked_s: float | None) -> float:
    """How long a job may take to start: HOROCLONE_START_TIMEOUT, or less where init_process_group() was given less;
    more only where that was asked for and the variable is not set."""
    limit_s = start_timeout_s(os.environ)
    if asked_s is None:
        return limit_s
    return min(asked_s, limit_s) if setting(os.environ, "START_TIMEOUT", "") else asked_s


def of_this_life(store: Any, rank: int, size: int, timeout_s: float, look: Look) -> Any:
    """torchrun keeps its store over restarts: what processes that are dead now wrote there must not be read again."""
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    variables = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" in os.environ and len(set(variables)) > 1:  # several agents
        deadline = time.monotonic() + timeout_s
        lives = dist.PrefixStore("horoclone/lives", store)
        token = secrets.token_hex(8).encode()
        life = launchers.told_by_rank_0(lives, rank, size, token, deadline, look).hex()
    return dist.PrefixStore(f"horoclone/{life}", store)


def _own_secret() -> bytes:
    """Of the job that hvd.init() has joined, or from the environment; empty when there is none."""
    return current.job_secret() or launchers.shared_secret(os.environ)


def _host() -> str:
    """The same for processes that can reach each other's abstract sockets as the same user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}:{os.geteuid()}"


# --- rendezvous without torch's variables ---


def rendezvous_of_any_launcher(torchs_own: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """A handler for env:// that does as torch's own where its variables are set; else it asks horoclone's launchers.

    So init_process_group("horoclone") needs no arguments under horoclonerun, mpirun and srun, and in a process alone.
    """

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
        given = not detect.torchs_by_us(os.environ) and any(name in os.environ for name in TORCHS_VARIABLES)
        if given or "rank=" in url or "world_size=" in url:
            yield from serving_at_once(torchs_own)(url, timeout, **kwargs)
            return
        lifecycle.init()
        native = current.native()
        yield _store(native, timeout), native.rank, native.size
        raise RuntimeError("env:// has no second rendezvous")

    return handler


def serving_at_once(torchs_own: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """A handler for env:// and tcp:// that does as torch's own, but for rank 0 where it serves torch's store: there
    torch would wait for all ranks before anybody can be told who is missing. The process group waits for them."""

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
        place = urlparse(url)
        given = {name: values[-1] for name, values in parse_qs(place.query).items()}
        rank = given.get("rank", os.environ.get("RANK"))
        size = given.get("world_size", os.environ.get("WORLD_SIZE"))
        address: Any = place.hostname
        port: Any = place.port
        if place.scheme == "env":
            address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if rank != "0" or by_agent or not (size and address and port) or "use_libuv" in given:
            yield from torchs_own(url, timeout, **kwargs)
            return
        where = (address, int(port), int(size), True, timeout)
        yield dist.TCPStore(*where, wait_for_workers=False, multi_tenant=True), 0, int(size)
        raise RuntimeError(f"{place.scheme}:// has no second rendezvous")

    return handler


def job_store(rank: int, size: int, timeout: timedelta) -> Any:
    """A store of the job's: torch's where its variables say where, else one among those who start as of hvd.init()."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port) or detect.torchs_by_us(os.environ):
        lifecycle.init()
        return _store(current.native(), timeout)
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.TCPStore(address, int(port), size, serves, timeout, wait_for_workers=False, multi_tenant=True)


def _store(native: Runtime, timeout: timedelta) -> Any:
    """A store for everybody: nothing but a dictionary alone, memory of rank 0 on one host, else TCP at rank 0."""
    if native.size == 1:
        return dist.HashStore()
    if native.local_size == native.size and (shared := _store_in_memory(native)) is not None:
        return shared
    server, announced = None, ("", 0)
    if native.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        names = os.environ.get("HOROCLONE_NETWORK_INTERFACES") or os.environ.get("HOROVOD_GLOO_IFACE") or ""
        address = wire.routable_addresses(names)[0]
        server = dist.TCPStore(address, port, native.size, True, timeout, wait_for_workers=False)
        announced = (address, server.port)
    address, port = objects.broadcast_object(announced, 0)
    return server or dist.TCPStore(address, port, native.size, False, timeout, wait_for_workers=False)


def _store_in_memory(native: Runtime) -> Any:
    """A FileStore whose file has no name, so that nothing is left however the processes end; None where not all of them
    may open it. Every rank holds it open by itself: it outlives rank 0."""
    told: tuple[Any, int] = (None, 0)
    if native.rank == 0:
        mine = next((key for key in _memory if key[0] == os.getpid()), None)
        if mine is None:
            descriptor = anonymous_file("horoclone-c10d")
            mine = (os.getpid(), descriptor, os.fstat(descriptor).st_ino)
        told = (mine, next(_lives))
    place, life = objects.broadcast_object(told, 0)
    known: Any = _memory.get(place)
    try:
        if known is None:
            path = f"/proc/{place[0]}/fd/{place[1]}"
            own = place[1] if native.rank == 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
            known = dist.FileStore(f"/proc/self/fd/{own}", -1)
            _memory[place] = known  # for ever: torch opens the path again and again
    except OSError:
        pass  # another process namespace, or a process that must not be looked into
    if not all(objects.allgather_object(known is not None)):
        return None
    return dist.PrefixStore(f"life-{life}", known)


def install_rendezvous() -> None:
    """Puts the handlers in front of torch's for tcp:// and env://, which init_process_group uses by default. Once."""
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    for scheme, ours in (("env", rendezvous_of_any_launcher), ("tcp", serving_at_once)):
        if getattr(handlers.get(scheme), "__module__", "") != __name__:
            handlers[scheme] = ours(handlers[scheme])
